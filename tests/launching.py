"""Runs `instep run` in a folder of its own, and finds whatever a run has left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from instep.launch.failure import describe_failure, keep_failures
from instep.launch.local import empty_store, make_placer, open_store, start_store
from instep.launch.options import parse
from instep.launch.spawn import Zygote
from instep.launch.watch import Hooks, Watch
from instep.records.launch_spec import LaunchSpec, Program
from instep.records.run_dir import RunDir

SCRIPTS = Path(__file__).parent / "ranks" / "launch" / "scripts"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    run_dir: Path

    @property
    def err_lines(self) -> list[str]:
        """What the launcher and the ranks said, without the line on threads."""
        return [line for line in self.err.splitlines() if "OMP_NUM_THREADS=" not in line]


@dataclass
class Launcher:
    """Every process of a run carries a mark in its environment, by which it is found wherever it has gone."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def environment(self, **more: str) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("INSTEP_", "PET_", "OMP_"))}
        return plain | {"INSTEP_TEST_MARK": self.mark} | more

    def begin(self, *words: str, into: IO[str] | None = None, **variables: str) -> subprocess.Popen[str]:
        """into: a file for stdout and stderr, which are pipes otherwise."""
        return subprocess.Popen(
            [sys.executable, "-m", "instep", "run", "--run-dir", "run", *words],
            cwd=self.folder,
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=into or subprocess.PIPE,
            stderr=into or subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def finish(self, process: subprocess.Popen[str], seconds: float = 60) -> Ended:
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            process.kill()
            process.wait()
        return Ended(process.returncode, out, err, self.folder / "run")

    def run(self, *words: str, seconds: float = 60, **variables: str) -> Ended:
        return self.finish(self.begin(*words, **variables), seconds)

    def script(self, text: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def processes(self) -> list[int]:
        """All that carry the mark and live."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) != os.getpid():
                try:
                    marked = self.mark.encode() in Path(f"/proc/{name}/environ").read_bytes()
                    state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if marked and state != "Z":
                    found.append(int(name))
        return found

    def await_gone(self, seconds: float) -> list[int]:
        """What still lives after that time."""
        return self.await_(lambda: not self.processes(), seconds) or self.processes()

    def await_(self, condition: Callable[[], bool], seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        return []

    def await_file(self, name: str, count: int, seconds: float = 60) -> None:
        """Until `count` files `name*` are there, as ranks make them to say how far they are."""
        self.await_(lambda: len(list(self.folder.glob(f"{name}*"))) >= count, seconds)
        assert len(list(self.folder.glob(f"{name}*"))) >= count, f"ranks did not come to {name}"


@dataclass
class Watched:
    """Runs a program on ranks of a zygote that is there already: the launcher without its command line."""

    zygote: Zygote
    folder: Path
    output: pytest.CaptureFixture[str]

    def run(self, program: Program, num_ranks: int = 1, *words: str, watch: bool = False) -> Ended:
        options = parse([*words, "x"], {}).torch
        spec = LaunchSpec(program, num_ranks, str(self.folder / "run"), options, watch=watch)
        (self.folder / "run").mkdir(exist_ok=True)
        server, address = open_store(options)
        with open(os.devnull, "wb") as log:
            store = start_store(self.zygote, server, log.fileno(), num_ranks)
        watching = Watch(spec, self.zygote, Hooks(), make_placer(spec, address))
        watching.empty_store = partial(empty_store, store)
        try:
            code = watching.run()
        finally:
            store.close()
            watching.selector.close()
            while self.zygote.hear().get("key") != "store":  # its end, so that the next test does not hear of it
                pass
        run_dir = RunDir(self.folder / "run")
        keep_failures(watching.group, run_dir)
        console = self.output.readouterr()
        return Ended(code, console.out, console.err + describe_failure(watching.group, run_dir), run_dir.root)

    def script(self, text: str | bytes, *args: str, name: str = "train.py") -> Program:
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return Program("script", str(path), args)
