"""Runs a script on a few recorded ranks without the launcher, which takes a second, and hands back what was recorded."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
from pathlib import Path

from instep.records.launch_spec import Program
from instep.verify.record.options import Options
from instep.verify.records import Record
from instep.verify.run_one import Run, read_record, recorder_options
from instep.verify.verdict import Verdict, judge

SCRIPTS = Path(__file__).parent / "verify_scripts"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])  # the first optimizer imports dynamo


def verify_script(
    name: str,
    folder: Path,
    sizes: tuple[int, ...] = (1, 2),
    steps: int = 3,
    keep_random: bool = False,
    divides: bool = True,
    exact: bool = False,
    args: tuple[str, ...] = (),
) -> Verdict:
    """The verdict on a script of tests/verify_scripts."""
    program = Program("script", str(SCRIPTS / f"{name}.py"), args)
    runs: list[Run] = []
    for size in sizes:
        reference = runs[0].record if runs else None
        options = recorder_options(folder / f"n{size}", steps, keep_random, divides, reference)
        runs.append(Run(record_script(program, size, options)))

    def repeat() -> Record:
        return record_script(program, sizes[0], recorder_options(folder / "again", steps, keep_random, False, None))

    return judge(runs, exact, repeat)


def record_script(program: Program, size: int, options: Options, timeout_seconds: float = 90) -> Record:
    """Raises RuntimeError when a rank fails or does not end."""
    port = _free_port()
    ranks = [_context.Process(target=_rank, args=(program, rank, size, options, port)) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        for rank, process in enumerate(ranks):
            process.join(timeout_seconds)
            if process.exitcode != 0:
                log = Path(options.folder) / f"rank{rank}.log"
                raise RuntimeError(f"rank {rank} ended with {process.exitcode}:\n{log.read_text()}")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return read_record(Path(options.folder), size)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(program: Program, rank: int, size: int, options: Options, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    os.chdir(options.folder)
    log = os.open(f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    from instep.launch.run_program import run_program
    from instep.verify.record.install import install

    torch.set_num_threads(1)
    recording = install(options)
    with contextlib.suppress(SystemExit):
        try:
            run_program(program)
        except BaseException as error:
            recording.close(error)
            raise
    recording.close(None)
    sys.stdout.flush()
    os._exit(0)  # a script's atexit handlers are not ours to run
