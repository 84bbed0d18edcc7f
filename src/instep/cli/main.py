"""The command `instep`: a table of commands, each in its own file, imported when asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from instep import __version__
from instep.errors import InstepError, UsageError, nearest

COMMANDS = {
    "run": "start a script on several processes, watch it, report what goes wrong",
    "diagnose": "judge a finished, killed or running run from its run directory",
    "explain": "what a finding means, why it matters, what to do, when it is wrong",
    "verify": "show that a script gives the same numbers on 1, 2, 4 processes, or where they part",
    "checkpoints": "list, verify, compare and convert checkpoints",
    "settings": "every setting, its value, and where it came from",
    "check": "whether this machine, or this set of nodes, is fit to train",
    "plan": "memory and step time for every way to split a model",
    "tune": "measure the settings that do not change the numbers, keep the fastest",
    "lint": "find the mistakes of distributed scripts in the source",
    "migrate": "turn a script for one device into one for any number",
    "report": "one page with findings, loss, throughput, time and memory of a run",
    "new": "a small project that trains, evaluates, checkpoints, resumes and is tested",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit code. Prints an error of ours as its text, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = dispatch(arguments)
        sys.stdout.flush()
    except InstepError as error:
        print(f"instep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has left, as in `instep settings | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(describe_commands())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"instep {__version__}")
        return 0
    name, *rest = arguments
    if name not in existing_commands():
        raise UsageError(refusal(arguments))
    command = import_module(f"instep.cli.{name}")
    return command.run(rest)


def existing_commands() -> list[str]:
    """The commands of this version, in the order of help: those that have a file beside this one."""
    here = Path(__file__).parent
    return [name for name in COMMANDS if (here / f"{name}.py").is_file()]


def describe_commands() -> str:
    names = existing_commands()
    width = max(map(len, names))
    rows = [f"  {name:<{width}}  {COMMANDS[name]}" for name in names]
    return "\n".join(
        [
            "usage: instep COMMAND ...",
            "",
            "Train PyTorch models on any number of processes, with the numbers of one.",
            "",
            *rows,
            "",
            "example: instep run -n 2 train.py --epochs 3",
            "`instep COMMAND --help` says more; `instep --version` prints the version.",
        ]
    )


def refusal(arguments: list[str]) -> str:
    name = arguments[0]
    if name.startswith("-") or name.endswith(".py"):
        return f"{name!r} is not a command; to start a script: instep run {' '.join(arguments)}"
    return f"{name!r} is not a command. {nearest(name, existing_commands())} See: instep --help"
