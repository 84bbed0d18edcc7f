"""The first code inside a rank: makes the process what torchrun would have made it, then runs the user's program.

Reached in two ways: forked from the zygote (`enter`), or as a fresh interpreter (`python -m instep.launch.worker_entry`,
the job in the variable INSTEP_JOB). What the program raises is told to the launcher over the status pipe, which prints
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
from instep.launch.run_program import run_program
from instep.records.launch_spec import Program
from instep.records.run_dir import RankDir

JOB_VARIABLE = "INSTEP_JOB"


@dataclass(frozen=True)
class Job:
    """What a rank is told at its start. status_file: the open pipe to the launcher; rank_dir: empty when not kept."""

    program: Program
    variables: dict[str, str]
    rank_dir: str
    status_file: int
    watch: bool
    probe_options: dict[str, Any]
    prints_errors: bool = False

    @staticmethod
    def from_json(data: dict[str, Any]) -> Job:
        program = data["program"] | {"args": tuple(data["program"]["args"])}
        return Job(**(data | {"program": Program(**program)}))


def enter(job: Job) -> None:
    """Runs the program; returns or raises as the program ends, so that Python finishes as it always does."""
    os.environ.update(job.variables)
    _forget_shared_randomness()
    if job.rank_dir:
        _record_crashes(Path(job.rank_dir))
    if job.watch:
        _install_probe(job)
    try:
        run_program(job.program)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _without_our_frames(error.__traceback__)
        _tell(job, error)
        # Python handles the rest (exit code, atexit, SIGINT's status); the text is out already.
        sys.excepthook = lambda *_: None
        raise


def main() -> None:
    job = Job.from_json(json.loads(os.environ.pop(JOB_VARIABLE)))
    if sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)  # the place of `-m instep...`, not of the user's program
    enter(job)


def _forget_shared_randomness() -> None:
    """Forked ranks would draw equal numbers from numpy's unseeded generator, which fresh processes do not."""
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def _record_crashes(rank_dir: Path) -> None:
    """SIGSEGV, SIGABRT and their like leave the Python line in a file (kept open as long as the process lives)."""
    file = os.open(RankDir(rank_dir).crash, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
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


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    ours = str(Path(__file__).parent)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((ours, "<frozen runpy")):
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_code.co_filename.endswith(f"{os.sep}runpy.py"):
        return _without_runpy(trace)
    return trace


def _without_runpy(trace: TracebackType) -> TracebackType | None:
    while trace.tb_next is not None and trace.tb_frame.f_code.co_filename.endswith(f"{os.sep}runpy.py"):
        trace = trace.tb_next
    return trace


def _tell(job: Job, error: BaseException) -> None:
    own_hook = sys.excepthook is not sys.__excepthook__
    report = describe(error) | {"printed": own_hook or job.prints_errors}
    told = _send_report(job.status_file, report)
    if report["printed"] or not told:
        sys.excepthook(type(error), error, error.__traceback__)


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as the launcher and the reports want it; `where` is the deepest line of the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)]
    where = own[-1] if own else (frames[-1] if frames else None)
    return {
        "event": "error",
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "text": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "where": where and {"file": where.filename, "line": where.lineno or 0, "source": where.line or ""},
        "exit_code": error.exit_code if isinstance(error, InstepError) else 1,
        "is_usage": isinstance(error, InstepError),
    }


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


if __name__ == "__main__":
    main()
