"""What `instep run` is asked to start: the user's program and where its ranks run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ProgramKind = Literal["script", "module", "command", "run_path"]


@dataclass(frozen=True)
class Program:
    """kind: how `target` is run: a Python file, a module (`python -m`), a command, or a file in torchrun's --run-path."""

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()

    @property
    def short_name(self) -> str:
        """A name for folders and headings: `train` for `examples/train.py` and for `-m package.train`."""
        if self.kind == "module":
            return self.target.rpartition(".")[2] or "module"
        name = self.target.replace("\\", "/").rstrip("/").rpartition("/")[2]
        return name.removesuffix(".py") or "run"


@dataclass(frozen=True)
class RankPlace:
    """One rank before it starts. variables: what torchrun would set for it; stdout, stderr: a file instead of ours;
    tee_stdout, tee_stderr: a file beside ours; filtered: files for lines that contain a wanted text."""

    rank: int
    local_rank: int
    variables: dict[str, str]
    stdout: str = ""
    stderr: str = ""
    tee_stdout: str = ""
    tee_stderr: str = ""
    filtered_stdout: str = ""
    filtered_stderr: str = ""
    error_file: str = ""
    shown: bool = True


@dataclass(frozen=True)
class LaunchSpec:
    """The whole of a launch, as it stands in launch.json. torch_options: torchrun's, by their destination."""

    program: Program
    num_local_ranks: int
    run_dir: str
    torch_options: dict[str, Any]
    overrides: dict[str, str] = field(default_factory=dict[str, str])
    watch: bool = True
    stall_after_seconds: float = 30.0
    on_stall: Literal["report", "stop"] = "report"
    profile: tuple[int, int] | None = None
    quiet_ranks: bool = False
    fork: bool = True

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
