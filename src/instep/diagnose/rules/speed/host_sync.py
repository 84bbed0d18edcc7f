"""The host waits for the device in every step.

## What it sees
Calls of the script that return only when the device has done all it was given, as `.item()`, `.cpu()`, `print(loss)`, `if mask.any():`,
`x[mask]`, `.to(device)` of memory that is not pinned, or `torch.cuda.synchronize()`: how often per step and for how long, on a
few sampled steps in which CUDA itself told of each wait. A line counts when it waits in nearly all of them.

## Why it matters
Work is queued: the host runs ahead and the device never stands still. After such a call the queue is empty, and the device has nothing
to do until the host has launched more. The gain named is the most there can be: without the waits a step takes at least as long as the
host works, and at least as long as it waited for the device.

## What to do
Keep losses and counts on the device and read them every 50 steps, or copy them with `non_blocking=True` and read them a step later. Replace
an index by a mask with `torch.where` or a product. Pin the memory of batches and move them with `non_blocking=True`. Leave
`torch.cuda.synchronize()` to measurements.

## When it is wrong
A loop in which the device is busy all the time anyhow, since a single wait at the end of a step is followed by a launch at once; then
the gain is small. With one or two waits per step the finding is `possible` only.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.host_waits import HostWaits, WaitingLine, measure_waits
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.finding import Evidence, Finding

MIN_LOST = 0.25  # of a step: less may be what is left when the device is busy all the time
MIN_SECONDS = 2.0  # in all: less is not worth a word
MANY = 3  # waits per step, from which on the device stands still again and again

_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
_MASKS = ("nonzero", "masked_select", "__getitem__", "__setitem__")
_WORDS = {
    "__bool__": "if tensor:",
    "__getitem__": "tensor[mask]",
    "__setitem__": "tensor[mask] = ...",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__index__": "an index",
}


def check(run: RunView) -> Iterator[Finding]:
    found = [(view, waits) for view in run.ranks if (waits := measure_waits(view)) is not None and waits.lines]
    if not found:
        return
    view, waits = max(found, key=lambda row: row[1].lost)
    total = view.page.seconds["total"] if view.page is not None else 0.0
    if waits.lost < MIN_LOST or waits.lost * total < MIN_SECONDS:
        return
    first = waits.lines[0]
    step, waited = waits.step_seconds * 1e3, waits.waited_seconds * 1e3
    gain = 1 / max(waits.waited, 1 - waits.waited)
    yield Finding(
        id="speed/host-sync",
        title=f"the host waits for the device {_times(waits)} in every step, {waits.waited:.0%} of the time",
        cause=f"{describe(first)} returns only when the device has done all it was given, and until the host has launched more the device "
        f"stands still. Of a step of {step:.1f} ms the host waits {waited:.1f} ms in such calls.",
        fix=(
            *_what_to_do(waits.lines[:4]),
            f"without these waits a step can be up to {gain:.1f} times as fast",
        ),
        evidence=tuple(_cite(view, waits)),
        certainty="likely" if waits.count >= MANY else "possible",
        ranks=() if len(found) == len(run.ranks) else tuple(one.rank for one, _ in found),
        where=first.site,
        explains=("speed/rest-of-loop", "speed/input-bound"),
    )


def describe(line: WaitingLine) -> str:
    """`.item()` at train.py:12, or what the line called that does it."""
    if line.through:
        return f"{line.through}() at {short(line.site)}, which calls {_call(line)},"
    return f"{_call(line)} at {short(line.site)}"


def _call(line: WaitingLine) -> str:
    if line.call == "synchronize":
        return "synchronize()"
    return _WORDS.get(line.call, f".{line.call}()")


def _times(waits: HostWaits) -> str:
    count = round(waits.count)
    return "once" if count == 1 else f"{count} times"


def _cite(view: RankView, waits: HostWaits) -> Iterator[Evidence]:
    for line in waits.lines[:4]:
        often = "" if line.count < 2 else f"{line.count:.0f} times, "
        yield view.cite(
            f"{describe(line).rstrip(',')}: {often}{line.seconds * 1e3:.2f} ms per step (median of {waits.samples} sampled steps)"
        )


def _what_to_do(lines: tuple[WaitingLine, ...]) -> list[str]:
    """What to change, with all the lines that it goes for."""
    places: dict[str, list[str]] = {}
    for line in lines:
        places.setdefault(_advise(line), []).append(short(line.site))
    return [f"at {' and '.join(dict.fromkeys(sites))}: {words}" for words, sites in places.items()]


def _advise(line: WaitingLine) -> str:
    if line.call == "synchronize":
        return "leave synchronize() out, except where time is measured"
    if line.through:
        return f"look whether {line.through}() is needed in every step"
    if line.call in _MASKS:
        return "use torch.where or multiply by the mask: a shape that depends on values has to be read by the host"
    if line.call in _READS:
        return "keep the value on the device and read it every 50 steps, or copy it with non_blocking=True and read it a step later"
    return f"use pin_memory=True in the loader and {_call(line).rstrip('()')}(..., non_blocking=True)"
