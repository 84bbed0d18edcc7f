from __future__ import annotations

import pytest

from instep.errors import UsageError
from instep.units import format_bytes, format_seconds, read_bytes, read_seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("80GiB", 80 * 2**30), ("512 MB", 512_000_000), ("1.5kib", 1536), (".5 TB", 500_000_000_000)],
)
def test_reads_sizes(text: str, num_bytes: int) -> None:
    assert read_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("1.5min", 90.0), ("200ms", 0.2), ("2 h", 7200.0), ("1d", 86400.0)]
)
def test_reads_durations(text: str, seconds: float) -> None:
    assert read_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "GiB", "80 GiBs", "-1", "1e9", "1,5GB"])
def test_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_bytes(text)
    assert str(caught.value) == f"{text!r} is not a size; write a number with a unit, as 80GiB, 512MB or 4096."


def test_refuses_what_is_no_duration() -> None:
    with pytest.raises(UsageError) as caught:
        read_seconds("30 m")
    assert str(caught.value) == (
        "'30 m' is not a duration; write seconds or a number with a unit, as 30, 1.5min or 200ms."
    )


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1536, "1.5 KiB"), (1.3e9, "1.21 GiB"), (80 * 2**30, "80 GiB"),
     (2**50, "1024 TiB")],
)  # fmt: skip
def test_writes_sizes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (8.5e-5, "85 us"), (0.00123, "1.23 ms"), (0.9996, "1 s"), (1.25, "1.25 s"), (59.96, "1 min"),
     (200, "3 min 20 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h"), (7500, "2 h 5 min"), (86399, "1 d"),
     (273600, "3 d 4 h"), (-3, "-3 s")],
)  # fmt: skip
def test_writes_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
