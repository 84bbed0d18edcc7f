"""`instep verify`: trains a few steps on several numbers of processes and shows that they agree, or where they part."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from instep.cli.arguments import CommandParser
from instep.errors import UsageError
from instep.records.launch_spec import Program
from instep.verify.divide import program_for, read_divide, read_single
from instep.verify.records import Record
from instep.verify.run_one import Run, recorder_options, run_one
from instep.verify.text import HEADINGS, format_conclusion, format_tables, table_rows, table_title
from instep.verify.verdict import EXIT_CODES, Verdict, judge


def run(argv: list[str]) -> int:
    options = make_parser().parse_args(argv)
    sizes = read_sizes(options.sizes)
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps} compares nothing. Give 1 or more.")
    if options.timeout <= 0:
        raise UsageError(f"--timeout {options.timeout:g} leaves no time. Give the seconds that one run may take.")
    program = Program("module" if options.module else "script", options.script, tuple(options.args))
    divided = read_divide(options.divide) if options.divide else None
    single = read_single(options.single) if options.single else None
    if single is not None and 1 not in sizes:
        raise UsageError(f"--single gives a command line for one process, but -n {options.sizes} has no 1.")
    programs = {size: program_for(program, size, divided, single) for size in sizes}
    for each in programs.values():
        if each.kind == "script" and not os.path.isfile(each.target):
            raise UsageError(f"there is no script {each.target!r}. Check the path; for a module use -m.")
    old = signal.signal(signal.SIGTERM, _stop)
    folder = Path(options.run_dir) if options.run_dir else Path(tempfile.mkdtemp(prefix="instep-verify-"))
    try:
        runs = run_all(programs, folder, options)
        verdict = judge(runs, options.exact, lambda: run_again(programs, folder, options))
    finally:
        signal.signal(signal.SIGTERM, old)
        if not options.run_dir:
            shutil.rmtree(folder, ignore_errors=True)
    show(verdict, options.json)
    return EXIT_CODES[verdict.kind]


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def make_parser() -> CommandParser:
    parser = CommandParser(
        "verify",
        "Trains a few steps of a script on several numbers of processes and compares them: samples, loss, gradients,\n"
        "parameters, buffers, learning rate. Says that they are in step, or the first place where they part, and why.\n"
        "Options of verify come before the script. Exit code: 0 in step, 1 parted, 2 bad usage, 3 not judged.",
        "instep verify -n 1,2,4 --divide batch-size train.py --batch-size 32",
    )
    parser.add_argument("-n", dest="sizes", default="1,2", metavar="1,2,4", help="numbers of processes (default 1,2)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to compare (default 5)")
    parser.add_argument("--divide", metavar="NAME[:int]", help="an argument of the script that is per process: divided")
    parser.add_argument("--single", metavar='"SCRIPT ARGS"', help="another command line for one process")
    parser.add_argument(
        "--keep-random", action="store_true", help="leave dropout and augmentation alone in scripts without instep.Run"
    )
    parser.add_argument("--exact", action="store_true", help="demand equal bits")
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for each run (default 600)")
    parser.add_argument("--run-dir", metavar="DIR", help="keep logs and records there (a folder that does not exist)")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    parser.add_argument("script", help="the script, as it is started with instep run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def read_sizes(text: str) -> list[int]:
    """`1,2,4`, the smallest first. Raises UsageError."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"-n {text}: numbers of processes are whole numbers with commas between, as in -n 1,2,4.")
    sizes = sorted({int(word) for word in words})
    if len(sizes) < 2:
        raise UsageError(f"-n {text}: verify compares at least two numbers of processes, as in -n 1,2.")
    return sizes


def run_all(programs: dict[int, Program], folder: Path, options: argparse.Namespace) -> list[Run]:
    """One after the other, the smallest first; it is what the others are compared with."""
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--run-dir {folder} is not empty. Give a folder that does not exist yet.")
    divides = not options.divide and not options.single
    runs: list[Run] = []
    for size, program in programs.items():
        place = folder.absolute() / f"n{size}"
        reference = runs[0].record if runs else None
        recording = recorder_options(place, options.steps, options.keep_random, divides, reference)
        runs.append(run_one(program, size, recording, place / "launch", options.timeout, say))
        if runs[0].failure and not runs[0].record.num_steps:
            break  # nothing to compare the others with
    return runs


def run_again(programs: dict[int, Program], folder: Path, options: argparse.Namespace) -> Record:
    """The smallest once more, to tell what differs from run to run."""
    size, program = next(iter(programs.items()))
    place = folder.absolute() / f"n{size}-again"
    recording = recorder_options(place, options.steps, options.keep_random, False, None)
    return run_one(program, size, recording, place / "launch", options.timeout, say).record


def say(text: str) -> None:
    print(f"instep verify: {text}", file=sys.stderr, flush=True)


def show(verdict: Verdict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(verdict.as_json(), indent=1))
        return
    if sys.stdout.isatty():
        _show_tables(verdict)
    elif verdict.comparisons:
        print(format_tables(verdict))
    print(format_conclusion(verdict), end="")


def _show_tables(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for comparison in verdict.comparisons:
        table = Table(*HEADINGS, title=table_title(comparison, verdict), title_justify="left")
        for row in table_rows(comparison):
            table.add_row(*row, style="red" if any(cell.endswith("!") for cell in row) else None)
        console.print(table)
