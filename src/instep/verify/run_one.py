"""Starts the script once, on so many processes, with the recorder in each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.records.launch_spec import Program
from instep.records.run_dir import RunDir
from instep.verify.parting import processes
from instep.verify.record.options import Options
from instep.verify.records import Record, read_record

_STALL_SECONDS = "20"
_TAIL_LINES = 25


@dataclass(frozen=True)
class Run:
    """record: what was recorded before the end, whatever the end; failure: how it ended when not well, else empty."""

    record: Record
    failure: str = ""


def run_one(
    program: Program, num_ranks: int, options: Options, folder: Path, timeout_seconds: float, say: Callable[[str], None]
) -> Run:
    folder.mkdir(parents=True)
    run_dir, log = folder / "run", folder / "output.log"
    command = [
        sys.executable, "-m", "instep", "run", "-n", str(num_ranks), "--run-dir", str(run_dir),
        "--stall-after", _STALL_SECONDS, "--on-stall", "stop",
        "--set", f"dir={folder / 'training'}",  # a run that is looked at must neither continue nor leave checkpoints
        "-m", "instep.verify.record", options.as_text(), *(["-m"] if program.kind == "module" else []),
        program.target, *program.args,
    ]  # fmt: skip
    say(f"{processes(num_ranks)}: {' '.join([program.target, *program.args])}")
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            code = process.wait(timeout_seconds)
            timed_out = False
        except subprocess.TimeoutExpired:
            code, timed_out = 1, True
        finally:
            _end(process)
    record = read_record(Path(options.folder), num_ranks)
    return Run(record, _describe_failure(record, num_ranks, code, timed_out, timeout_seconds, RunDir(run_dir), log))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Lets the launcher end its ranks before it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _describe_failure(
    record: Record, num_ranks: int, code: int, timed_out: bool, timeout_seconds: float, run_dir: RunDir, log: Path
) -> str:
    errors = [f"rank {rank.number}: {rank.error}" for rank in record.ranks if rank.error]
    if code == 0 and record.num_steps and len(record.ranks) == num_ranks and not errors:
        return ""
    run = f"the run on {processes(num_ranks)}"
    if timed_out:
        return f"{run} had not ended after {timeout_seconds:g} s (--timeout)" + _tail(log)
    if code != 0 or errors:
        findings = _read_findings(run_dir)
        why = "; ".join(errors) or (findings[0]["title"] if findings else "")
        return f"{run} failed with exit code {code}{': ' + why if why else ''}" + _hint(record) + _tail(log)
    if len(record.ranks) < num_ranks:
        return f"{run} left a record of {len(record.ranks)} of them only" + _tail(log)
    return (
        f"{run} ended without a step of a torch.optim optimizer on every rank, so there is nothing to compare. "
        "verify needs a script that trains when it is started as given; check its arguments."
    )


def _hint(record: Record) -> str:
    """A script may rely on the batch size that it states."""
    if not any(note["used"] != note["given"] for rank in record.ranks for note in rank.named("loader")):
        return ""
    return (
        ". verify had divided the batch size of its DataLoaders; if it needs the one it states, give --divide NAME or "
        "--single, which leave them alone"
    )


def _read_findings(run_dir: RunDir) -> list[dict[str, Any]]:
    try:
        return json.loads(run_dir.findings.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return []


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return "".join(f"\n    {line}" for line in lines if not line.startswith("instep: exit code"))


def recorder_options(folder: Path, steps: int, keep_random: bool, divides: bool, reference: Record | None) -> Options:
    """divides: batch sizes of DataLoaders are to be divided as the reference, which ran first, has them."""
    records = folder / "records"
    records.mkdir(parents=True)
    batches: list[int | None] = []
    if divides and reference is not None and reference.ranks:
        batches = [size and size * reference.world_size for size in reference.batch_sizes]
    return Options(os.fspath(records), steps, keep_random, divides and reference is not None, tuple(batches))
