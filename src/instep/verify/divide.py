"""The script's command line for each number of processes: an argument divided, or another line for one process."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from instep.errors import UsageError
from instep.records.launch_spec import Program

_KINDS = ("int", "float")


@dataclass(frozen=True)
class Divided:
    """An argument of the script that states something per process. name: as given, without dashes in front."""

    name: str
    kind: str = "int"


def read_divide(text: str) -> Divided:
    """`batch-size` or `batch_size:int`. Raises UsageError."""
    name, colon, kind = text.partition(":")
    if colon and kind not in _KINDS:
        raise UsageError(f"--divide {text}: {kind!r} is no kind of number. Allowed: {', '.join(_KINDS)}.")
    if not name.strip("-"):
        raise UsageError(f"--divide {text!r} names no argument. Write it as in --divide batch-size.")
    return Divided(name.lstrip("-"), kind or "int")


def divide_arguments(arguments: tuple[str, ...], divided: Divided, num_ranks: int) -> tuple[str, ...]:
    """The arguments with the named one divided by the number of processes. Raises UsageError when it is not there."""
    found: list[str] = []
    places = 0
    expects_value = False
    for word in arguments:
        name, equals, value = word.partition("=")
        if expects_value:
            word, expects_value, places = _divide(word, divided, num_ranks), False, places + 1
        elif equals and _same_name(name, divided.name):
            word, places = f"{name}={_divide(value, divided, num_ranks)}", places + 1
        elif not equals and word.startswith("-") and _same_name(word, divided.name):
            expects_value = True
        found.append(word)
    if not places:
        raise UsageError(_not_there(arguments, divided))
    return tuple(found)


def _same_name(word: str, name: str) -> bool:
    return word.lstrip("-").replace("-", "_") == name.replace("-", "_")


def _not_there(arguments: tuple[str, ...], divided: Divided) -> str:
    given = [word.partition("=")[0] for word in arguments if word.startswith("-") or "=" in word]
    listed = f"its arguments here are {', '.join(given)}" if given else "it has none here"
    return (
        f"--divide {divided.name}: the script's command line has no --{divided.name} to divide; {listed}. Give it with "
        f"the value for one process, as in `train.py --{divided.name} 32`. A script that does not take its batch size "
        "as an argument needs no --divide: without it, the batch size of its DataLoaders is divided."
    )


def _divide(text: str, divided: Divided, num_ranks: int) -> str:
    try:
        value = int(text) if divided.kind == "int" else float(text)
    except ValueError as error:
        raise UsageError(f"--divide {divided.name}: its value {text!r} is not a number ({divided.kind}).") from error
    if divided.kind == "float":
        return repr(value / num_ranks)
    if value % num_ranks:
        low = int(value) // num_ranks * num_ranks
        fits = ", ".join(str(size) for size in (low, low + num_ranks) if size > 0)
        raise UsageError(
            f"--divide {divided.name}: {text} cannot be divided by {num_ranks} processes. Nearest that can: {fits}."
        )
    return str(int(value) // num_ranks)


def read_single(text: str) -> Program:
    """The program of `--single "python train.py --batch-size 64"`. Raises UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--single {text!r} is not a command line: {error}.") from error
    if words and words[0].rpartition("/")[2].startswith("python"):
        words = words[1:]
    if not words:
        raise UsageError('--single names no script. Write it as in --single "train.py --batch-size 64".')
    if words[0] == "-m" and len(words) > 1:
        return Program("module", words[1], tuple(words[2:]))
    return Program("script", words[0], tuple(words[1:]))


def program_for(program: Program, num_ranks: int, divided: Divided | None, single: Program | None) -> Program:
    """What is started with so many processes."""
    if num_ranks == 1 and single is not None:
        return single
    if divided is None:
        return program
    return replace(program, args=divide_arguments(program.args, divided, num_ranks))
