"""Every setting of instep: one row each, and the only reader of its variables and of `[tool.instep]`.

An argument beats the variable, which beats `[tool.instep]` of the nearest pyproject.toml, which beats the default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from instep.errors import UsageError, nearest
from instep.overrides import override, read_object
from instep.units import read_seconds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Row:
    """read: the value of a text, or UsageError; key: the name in `[tool.instep]`, None where a file may not set it;
    option: the argument that beats all else, if there is one."""

    name: str
    variable: str
    key: str | None
    default: Any
    read: Callable[[str], Any]
    option: str | None
    meaning: str


@dataclass(frozen=True)
class Setting:
    """A value and where it came from: "argument", "INSTEP_X", "pyproject.toml" with its path, or "default"."""

    row: Row
    value: Any
    source: str


def read_switch(text: str) -> bool:
    if text.strip().lower() in ("1", "true", "yes", "on"):
        return True
    if text.strip().lower() in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{text!r} is not a switch; allowed: 1, true, yes, on, 0, false, no, off.")


def read_duration(text: str) -> float:
    seconds = read_seconds(text)
    if seconds <= 0:
        raise UsageError(f"{text!r} has to be longer than no time at all.")
    return seconds


def read_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def read_step_count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"{text!r} has to be a whole number of steps, at least 1.")
    return int(text)


def one_of(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise UsageError(f"{text!r} is not possible; allowed: {', '.join(allowed)}.")
        return text

    return read


ROWS = (
    Row("run_dir", "INSTEP_RUN_DIR", "run-dir", None, str, "instep run --run-dir",
        "where `instep run` leaves what it saw; without it runs/<script>-<time>"),
    Row("stall_after", "INSTEP_STALL_AFTER", "stall-after", 30.0, read_duration, "instep run --stall-after",
        "seconds without progress of any rank, one waiting in a collective, before a stall is reported"),
    Row("on_stall", "INSTEP_ON_STALL", "on-stall", "report", one_of("report", "stop"), "instep run --on-stall",
        "report a stall and go on, or stop the run; a proven deadlock is always stopped"),
    Row("watch", "INSTEP_WATCH", "watch", True, read_switch, "instep run --no-watch",
        "whether `instep run` watches the ranks from inside"),
    Row("fork", "INSTEP_FORK", "fork", True, read_switch, "instep run --no-fork",
        "whether ranks are forked from one process that has imported torch"),
    Row("quiet_ranks", "INSTEP_QUIET_RANKS", "quiet-ranks", False, read_switch, "instep run --quiet-ranks",
        "show the output of rank 0 only; that of all ranks is in the run directory"),
    Row("keep_every", "INSTEP_KEEP_EVERY", "keep-every", None, read_step_count, None,
        "checkpoints of steps that this number divides stay for good; without it only the last and the best do"),
    Row("set", "INSTEP_SET", None, {}, read_object, "instep run --set",
        "arguments of instep.Run that beat the script's, as a JSON object of texts"),
    Row("trackers", "INSTEP_TRACKERS", "trackers", [], read_names, None,
        "where metrics go beside metrics.jsonl: tensorboard, wandb, mlflow, or several with commas"),
    Row("live", "INSTEP_LIVE", None, False, read_switch, None,
        "set by `instep run` on a terminal: ranks redraw their progress line, though they write to a pipe"),
    Row("shared_memory", "INSTEP_SHARED_MEMORY", "shared-memory", True, read_switch, None,
        "whether ranks that train on the CPUs of one host add up gradients in shared memory"),
)  # fmt: skip
_BY_NAME = {row.name: row for row in ROWS}


def read_setting(name: str, argument: Any = None, environ: Mapping[str, str] | None = None) -> Setting:
    """One setting, resolved. argument: what the caller was given, already parsed; None when it was not given."""
    row = _BY_NAME[name]
    if argument is not None:
        return Setting(row, argument, "argument")
    text = (os.environ if environ is None else environ).get(row.variable)
    if text:
        return Setting(row, _read(row, text, row.variable), row.variable)
    path = find_project_file(Path.cwd())
    table = read_project_table(path) if path else {}
    if row.key is not None and row.key in table:
        return Setting(row, _read_toml(row, table[row.key], str(path)), str(path))
    return Setting(row, row.default, "default")


def read_all(environ: Mapping[str, str] | None = None) -> list[Setting]:
    return [read_setting(row.name, environ=environ) for row in ROWS]


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """INSTEP_* variables that no setting reads: most likely a slip of the pen."""
    known = {row.variable for row in ROWS}
    return sorted(name for name in environ if name.startswith("INSTEP_") and name not in known)


def overrides() -> dict[str, str]:
    """What `instep run --set name=value` asked for, as texts."""
    return cast("dict[str, str]", read_setting("set").value)


def override_run_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of instep.Run with those replaced that `--set` names. Raises UsageError."""
    return override(arguments, overrides())


def find_project_file(start: Path) -> Path | None:
    """The nearest pyproject.toml, here or above."""
    return next((path for folder in (start, *start.parents) if (path := folder / "pyproject.toml").is_file()), None)


def read_project_table(path: Path) -> dict[str, Any]:
    """`[tool.instep]` of a pyproject.toml. Raises UsageError for a file that is not TOML and for an unknown key."""
    try:
        table: object = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("instep", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}. Mend it, or start from another folder.") from error
    if not isinstance(table, dict):
        raise UsageError(f"{path}: tool.instep = {table!r} has to be a table, [tool.instep].")
    allowed = [row.key for row in ROWS if row.key is not None]
    for key in cast("dict[str, Any]", table):
        if key not in allowed:
            raise UsageError(f"{path}: [tool.instep] has no setting {key!r}. {nearest(key, allowed)}")
    return cast("dict[str, Any]", table)


def _read_toml(row: Row, value: Any, source: str) -> Any:
    """A value of a TOML file means what its text would mean in a variable."""
    if isinstance(value, list) and isinstance(row.default, list):
        value = ",".join(map(str, cast("list[object]", value)))
    if not isinstance(value, (str, bool, int, float)):
        raise UsageError(f"{source}: {row.key} = {value!r} has to be a text, a number, true or false.")
    return _read(row, str(value), source, row.key)


def _read(row: Row, text: str, source: str, key: str | None = None) -> Any:
    try:
        return row.read(text)
    except UsageError as error:
        raise UsageError(f"{source}: {key + ': ' if key else ''}{error}") from error
