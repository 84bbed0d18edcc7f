"""The command line of `instep run`: torchrun's options by a table of their arities, and ours beside them.

torchrun's own parser lives in a module that imports torch, so it is not asked here; a test compares this table with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from instep.errors import UsageError
from instep.records.launch_spec import Program


def split_commas(text: str) -> list[str]:
    """`a,b` in two; a double comma stands for one that does not split (torchrun's rule)."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]


@dataclass(frozen=True)
class Option:
    """flags: all spellings; convert: None for a switch; variable: whether PET_<NAME> gives its default."""

    flags: tuple[str, ...]
    convert: Callable[[str], Any] | None = str
    default: Any = None
    variable: bool = True
    choices: tuple[str, ...] = ()
    ours: bool = False

    @property
    def name(self) -> str:
        """As torchrun's parser calls it: the first long spelling."""
        first = next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])
        return first.lstrip("-").replace("-", "_")


def _torch(*flags: str, **how: Any) -> Option:
    """An option of torchrun, with the underscore spelling that each of them has."""
    spelled = [flag.replace("-", "_").replace("__", "--", 1) for flag in flags if "-" in flag[2:]]
    return Option((*flags, *spelled), **how)


def _ours(*flags: str, **how: Any) -> Option:
    return Option(flags, variable=False, ours=True, **how)


TORCH_OPTIONS = (
    _torch("--nnodes", default="1:1"),
    _torch("--nproc-per-node", default="1"),
    _torch("--rdzv-backend", default="static"),
    _torch("--rdzv-endpoint", default=""),
    _torch("--rdzv-id", default="none"),
    _torch("--rdzv-conf", default=""),
    _torch("--standalone", convert=None, default=False),
    _torch("--max-restarts", convert=int, default=0),
    _torch("--monitor-interval", convert=float, default=0.1),
    _torch("--start-method", default="spawn", choices=("spawn", "fork", "forkserver")),
    _torch("--event-log-handler", default="null"),
    _torch("--role", default="default"),
    _torch("-m", "--module", convert=None, default=False),
    _torch("--no-python", convert=None, default=False),
    _torch("--run-path", convert=None, default=False),
    _torch("--log-dir"),
    _torch("-r", "--redirects", default="0"),
    _torch("-t", "--tee", default="0"),
    _torch("--local-ranks-filter", default=""),
    _torch("--duplicate-stdout-filters", convert=split_commas, default=()),
    _torch("--duplicate-stderr-filters", convert=split_commas, default=()),
    _torch("--node-rank", convert=int, default=0),
    _torch("--master-addr", default="127.0.0.1"),
    _torch("--master-port", convert=int),
    _torch("--local-addr"),
    _torch("--logs-specs", variable=False),
    _torch(
        "--numa-binding",
        variable=False,
        choices=("node", "socket", "exclusive", "core-complex"),
    ),
    _torch("--signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    _torch("--shutdown-timeout", convert=int),
    _torch("--virtual-local-rank", convert=None, default=False),
)

OUR_OPTIONS = (
    _ours("--set", default=()),
    _ours("--run-dir"),
    _ours("--stall-after", convert=float),
    _ours("--on-stall", choices=("report", "stop")),
    _ours("--no-watch", convert=None, default=False),
    _ours("--no-fork", convert=None, default=False),
    _ours("--profile"),
    _ours("--quiet-ranks", convert=None, default=False),
    _ours("-h", "--help", convert=None, default=False),
)

_SHORT = {"-n": "--nproc-per-node"}
# What other launchers call it.
_FOREIGN = {"--nprocs": "-n", "--num-processes": "-n", "--num_processes": "-n", "--np": "-n", "--num-nodes": "--nnodes"}
_REPEATED = ("set",)


@dataclass(frozen=True)
class Parsed:
    """torch, ours: every option's value by name; words: torchrun's options as they were written, for its own parser."""

    torch: dict[str, Any]
    ours: dict[str, Any]
    program: Program | None
    words: tuple[str, ...] = ()
    given: frozenset[str] = field(default_factory=frozenset[str])


def parse(argv: list[str], environ: Mapping[str, str] | None = None) -> Parsed:
    """Splits a command line into torchrun's options, ours and the program. Raises UsageError for what cannot be."""
    environ = os.environ if environ is None else environ
    values = {option.name: _default(option, environ) for option in (*TORCH_OPTIONS, *OUR_OPTIONS)}
    values["set"] = []
    words: list[str] = []
    given: set[str] = set()
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        option, text = _match(word)
        if option.convert is None:
            if text is not None:
                raise UsageError(f"{word.partition('=')[0]} takes no value, but was given {text!r}. Write it alone.")
            value: Any = True
        else:
            if text is None:
                if not rest or (rest[0].startswith("-") and not _is_negative_number(rest[0])):
                    raise UsageError(f"{word} needs a value after it, as in `{word} {_example(option)}`.")
                text = rest.pop(0)
            value = _converted(option, text, word.partition("=")[0])
        if option.name in _REPEATED:
            values[option.name].append(value)
        else:
            values[option.name] = value
        given.add(option.name)
        if not option.ours:
            words += [option.flags[0]] if text is None else [f"{_long(option)}={text}"]
    return Parsed(
        torch={option.name: values[option.name] for option in TORCH_OPTIONS},
        ours={option.name: values[option.name] for option in OUR_OPTIONS},
        program=_program(values, rest) if rest else None,
        words=tuple(words),
        given=frozenset(given),
    )


def _long(option: Option) -> str:
    return next(flag for flag in option.flags if flag.startswith("--"))


def _program(values: dict[str, Any], rest: list[str]) -> Program:
    target, *args = rest
    if values["module"] and values["no_python"]:
        raise UsageError("-m runs a Python module and --no-python a command that is none; give only one of them.")
    if values["run_path"]:
        return Program("run_path", target, tuple(args))
    kind = "module" if values["module"] else "command" if values["no_python"] else "script"
    return Program(kind, target, tuple(args))


def _default(option: Option, environ: Mapping[str, str]) -> Any:
    variable = f"PET_{option.name.upper()}"
    if not option.variable or variable not in environ:
        return option.default
    text = environ[variable]
    if option.convert is None:
        return bool(_converted(Option(("--x",), int), text, f"the variable {variable}"))
    return _converted(option, text, f"the variable {variable}")


def _match(word: str) -> tuple[Option, str | None]:
    """The option that a word means and the value glued to it (`--x=1`, `-r3`)."""
    name, equals, text = word.partition("=")
    value = text if equals else None
    if not word.startswith("--") and len(name) > 2:
        name, value = word[:2], word[2:].removeprefix("=")
    name = _SHORT.get(name, name)
    for option in (*TORCH_OPTIONS, *OUR_OPTIONS):
        if name in option.flags:
            return option, value
    for table in (TORCH_OPTIONS, OUR_OPTIONS):  # torchrun accepts any beginning that is unique
        found = [o for o in table if name.startswith("--") and any(flag.startswith(name) for flag in o.flags)]
        if len(found) == 1:
            return found[0], value
        if found:
            names = ", ".join(_long(option) for option in found)
            raise UsageError(f"{name} could mean {names}. Write one of them in full.")
    raise UsageError(_unknown(name))


def _unknown(name: str) -> str:
    import difflib  # rarely needed; importing it costs as much as the whole parse

    flags = [flag for option in (*TORCH_OPTIONS, *OUR_OPTIONS) for flag in option.flags]
    near = [_FOREIGN[name]] if name in _FOREIGN else difflib.get_close_matches(name, flags, n=1)
    hint = f"Did you mean {near[0]}?" if near else "`instep run --help` lists them."
    return f"{name} is not an option of `instep run`. {hint} Options of your script come after its name."


def _converted(option: Option, text: str, shown: str) -> Any:
    assert option.convert is not None
    try:
        value = option.convert(text)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}.get(option.convert, "a value of its kind")  # type: ignore[arg-type]
        raise UsageError(f"{shown} has to be {kind}, but is {text!r}.") from None
    if option.choices and value not in option.choices:
        raise UsageError(f"{shown} cannot be {text!r}. Allowed: {', '.join(option.choices)}.")
    return value


def _is_negative_number(text: str) -> bool:
    return text[1:].replace(".", "", 1).isdecimal()


def _example(option: Option) -> str:
    examples = {"set": "micro_batch=8", "nproc_per_node": "2", "nnodes": "2", "run_dir": "runs/try", "profile": "10:20"}
    return option.choices[0] if option.choices else examples.get(option.name, str(option.default or "VALUE"))
