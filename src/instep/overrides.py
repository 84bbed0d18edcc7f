"""What `instep run --set name=value` changes: arguments of instep.Run, given as texts, read by their types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from instep.errors import UsageError


def read_whole_number(text: str) -> int:
    if not text.strip().lstrip("-").isdecimal():
        raise UsageError(f"{text!r} is not a whole number.")
    return int(text)


def read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a number.") from error


def read_truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{text!r} is not possible; allowed: true, false.")
    return text.lower() == "true"


def or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def read_optional(text: str) -> Any:
        return None if text.lower() == "none" else read(text)

    return read_optional


def number_or_word(text: str) -> int | str:
    return int(text) if text.strip().isdecimal() else text


# The arguments of instep.Run; a test compares the names with its signature.
RUN_ARGUMENTS: dict[str, Callable[[str], Any]] = {
    "global_batch": read_whole_number,
    "micro_batch": or_none(read_whole_number),
    "parallel": str,
    "precision": str,
    "exact": read_truth,
    "clip_norm": or_none(read_number),
    "clip_value": or_none(read_number),
    "compress": or_none(str),
    "recompute": number_or_word,
    "offload": read_truth,
    "compile": read_truth,
    "seed": read_whole_number,
    "threads": or_none(read_whole_number),
    "dir": or_none(str),
    "checkpoint_every": or_none(read_whole_number),
    "keep": or_none(read_whole_number),
}


def read_override(name: str, text: str) -> Any:
    """The value of one `--set name=text`. Raises UsageError for a name or a text that cannot be."""
    if name not in RUN_ARGUMENTS:
        raise UsageError(
            f"--set {name}={text}: instep.Run has no argument {name!r}. Allowed: {', '.join(RUN_ARGUMENTS)}."
        )
    try:
        return RUN_ARGUMENTS[name](text)
    except UsageError as error:
        raise UsageError(f"--set {name}={text}: {error}") from error


def read_object(text: str) -> dict[str, str]:
    """The JSON object of texts that carries `--set` to the ranks. Raises UsageError."""
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{text!r} is not JSON ({error}).") from error
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in cast("dict[str, Any]", value).values()):
        raise UsageError(f'{text!r} has to be a JSON object of texts, as {{"micro_batch": "4"}}.')
    return cast("dict[str, str]", value)


def override(arguments: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of instep.Run with those named in `texts` replaced."""
    return {**arguments, **{name: read_override(name, text) for name, text in texts.items()}}
