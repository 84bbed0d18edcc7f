"""The first code inside a rank: makes the process what torchrun would have made it, then runs the user's program.

Reached in two ways: forked from the zygote (`enter`), or in a fresh interpreter (`start.py`, the job in the variable
INSTEP_JOB). What the program raises is told to the launcher over the status pipe, which prints
it last and folds what is equal on several ranks; without a launcher to tell, Python's own printing takes place.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from instep.errors import InstepError
from instep.launch.numa import bind_to_numa
from instep.launch.profile_steps import record_steps
from instep.launch.run_program import run_program
from instep.records.launch_spec import Program
from instep.records.run_dir import RankDir

JOB_VARIABLE = "INSTEP_JOB"


@dataclass(frozen=True)
class Job:
    """What a rank is told at its start. status_file: the open pipe to the launcher; rank_dir: empty when not kept."""

    program: Program
    variables: dict[str, str]
    local_rank: int
    rank_dir: str
    status_file: int
    watch: bool
    probe_options: dict[str, Any]
    prints_errors: bool = False
    numa_binding: str | None = None
    profile: list[int] | None = None

    @staticmethod
    def from_json(data: dict[str, Any]) -> Job:
        fields = dict(data)
        program = fields.pop("program")
        return Job(Program(program["kind"], program["target"], tuple(program["args"])), **fields)


def enter(job: Job) -> None:
    """Runs the program; returns or raises as the program ends, so that Python finishes as it always does."""
    os.environ.update(job.variables)
    if job.numa_binding is not None:
        bind_to_numa(job.local_rank, job.numa_binding)
    _forget_shared_randomness()
    if job.rank_dir:
        _record_crashes(Path(job.rank_dir))
    if job.watch:
        _install_probe(job)
    if job.profile is not None:
        record_steps(job.profile[0], job.profile[1], RankDir(Path(job.rank_dir)).trace)
    rank = os.getpid()
    try:
        run_program(job.program)
    except SystemExit as error:
        if os.getpid() != rank:
            raise
        _tell_exit(job, error)
        if job.watch:
            _note_exit(error)
        raise
    except BaseException as error:
        _forget_our_frames(error)
        if os.getpid() != rank:  # in a child that the program has forked: its end is not the rank's
            sys.excepthook(type(error), error, error.__traceback__)
            sys.excepthook = lambda *_: None
            raise
        _tell(job, error)
        if job.watch:
            _note_uncaught(error)
        if isinstance(error, InstepError):
            sys.exit(error.exit_code)
        # Python handles the rest (exit code, atexit, SIGINT's status); the text is out already.
        sys.excepthook = lambda *_: None
        raise


def main() -> None:
    job = Job.from_json(json.loads(os.environ.pop(JOB_VARIABLE)))
    enter(job)


def _forget_shared_randomness() -> None:
    """Forked ranks would draw equal numbers from the unseeded generators of numpy and torch; fresh processes do not.
    Python's own is seeded anew by `os.fork` itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _record_crashes(rank_dir: Path) -> None:
    """SIGSEGV, SIGABRT and their like leave the Python line in a file (kept open as long as the process lives)."""
    try:
        file = os.open(RankDir(rank_dir).crash, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    except OSError:  # a full disk costs the file, not the rank
        file = 2
    faulthandler.enable(file=file, all_threads=True)


def _install_probe(job: Job) -> None:
    spec = importlib.util.find_spec("instep.launch.probe")
    if spec is None or spec.origin is None:
        return
    try:
        from instep.launch.probe import install

        install(Path(job.rank_dir), **job.probe_options)
    except Exception as error:  # noqa: BLE001  # whatever breaks the watching must not break the user's program
        print(f"instep: this rank is not watched ({type(error).__name__}: {error})", file=sys.stderr)


def _forget_our_frames(error: BaseException) -> None:
    """Takes what instep's launcher added to the stack out of a traceback, in the causes of an exception too."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _without_our_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def _note_exit(error: SystemExit) -> None:
    """For diagnosis: the exception that was being handled when the program asked to end."""
    from instep.launch.probe import note_exit

    note_exit(error)


def _note_uncaught(error: BaseException) -> None:
    """For diagnosis while the process has not ended: it may not come to its end by itself."""
    from instep.launch.probe import note_uncaught

    note_uncaught(error)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Our entry, runpy at the top and what the probe wrapped around PyTorch's functions are left out."""
    ours = str(Path(__file__).parent) + os.sep
    kept: list[TracebackType] = []
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        runpy = not kept and (name == "<frozen runpy>" or name.endswith(f"{os.sep}runpy.py"))
        if not runpy and not name.startswith(ours):
            kept.append(trace)
        trace = trace.tb_next
    for one, following in zip(kept, [*kept[1:], None]):
        one.tb_next = following
    return kept[0] if kept else None


def _tell(job: Job, error: BaseException) -> None:
    printed = not _is_plain(sys.excepthook)
    told = _send_report(job.status_file, describe(error) | {"printed": printed})
    if isinstance(error, InstepError) and job.prints_errors:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    elif printed or job.prints_errors or not told:
        sys.excepthook(type(error), error, error.__traceback__)


def _tell_exit(job: Job, error: SystemExit) -> None:
    """Where the program gave up by itself, for a failing exit code that explains nothing."""
    trace = _without_our_frames(error.__traceback__)
    if error.code not in (None, 0) and trace is not None:
        _send_report(job.status_file, {"event": "exit", "where": _site(traceback.extract_tb(trace))})


def _is_plain(hook: Any) -> bool:
    """Whether it is Python's own hook, or torch's, which only adds the rank to each line."""
    return hook is sys.__excepthook__ or getattr(hook, "__name__", "") == "_distributed_excepthook"


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as the launcher and the reports want it; `where` is the deepest line of the user's own code."""
    return {
        "event": "error",
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "text": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "where": _site(traceback.extract_tb(error.__traceback__)),
        "exit_code": error.exit_code if isinstance(error, InstepError) else 1,
        "is_usage": isinstance(error, InstepError),
    }


def _site(frames: traceback.StackSummary) -> dict[str, Any] | None:
    """The deepest line of the user's own code, or the deepest of all."""
    own = [frame for frame in frames if is_users(frame.filename)]
    frame = own[-1] if own else frames[-1] if frames else None
    return None if frame is None else {"file": frame.filename, "line": frame.lineno or 0, "source": frame.line or ""}


def is_users(filename: str) -> bool:
    """Whether a file is the user's, not Python's, an installed package's or ours."""
    ours = str(Path(__file__).parent.parent)
    library = os.path.dirname(os.__file__)
    return not (
        filename.startswith((ours, library, "<"))
        or f"{os.sep}site-packages{os.sep}" in filename
        or f"{os.sep}dist-packages{os.sep}" in filename
    )


def _send_report(status_file: int, report: dict[str, Any]) -> bool:
    data = (json.dumps(report) + "\n").encode()
    try:
        while data:
            data = data[os.write(status_file, data) :]
    except OSError:
        return False
    return True
