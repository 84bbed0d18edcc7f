"""Sizes and durations as people write and read them: "80GiB", "1h 20min"."""

from __future__ import annotations

import re

from instep.errors import UsageError

BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def read_bytes(text: str) -> int:
    """ "80GiB", "512 MB" or "4096" as a number of bytes. Raises UsageError."""
    number, unit = _split(text)
    if number is None or unit.lower() not in {"", *BYTES}:
        raise UsageError(f"{text!r} is not a size; write a number with a unit, as 80GiB, 512MB or 4096.")
    return round(number * BYTES.get(unit.lower(), 1))


def read_seconds(text: str) -> float:
    """ "30", "1.5min" or "200ms" as seconds. Raises UsageError."""
    number, unit = _split(text)
    if number is None or unit not in {"", *SECONDS}:
        raise UsageError(f"{text!r} is not a duration; write seconds or a number with a unit, as 30, 1.5min or 200ms.")
    return number * SECONDS.get(unit, 1.0)


def format_bytes(num_bytes: float) -> str:
    """Three digits at most and a binary unit: "512 B", "1.21 GiB"."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def format_seconds(seconds: float) -> str:
    """What a person needs of it: "85 us", "1.25 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{_three_digits(seconds * 1e6)} us"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    if seconds < 3599.5:
        return _two_units(round(seconds), 60, "min", "s")
    if seconds < 86370:
        return _two_units(round(seconds / 60), 60, "h", "min")
    return _two_units(round(seconds / 3600), 24, "d", "h")


def _two_units(count: int, per_large: int, large: str, small: str) -> str:
    whole, rest = divmod(count, per_large)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"


def _split(text: str) -> tuple[float | None, str]:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    return (float(match[1]), match[2]) if match else (None, "")


def _three_digits(value: float) -> str:
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
