"""The verdict as it is printed: a table for each number of processes, then what comes of it."""

from __future__ import annotations

import os
import textwrap

from instep.verify.across.judge import Comparison
from instep.verify.across.quantities import Difference, StepRow
from instep.verify.parting import Parting, processes
from instep.verify.verdict import Verdict

HEADINGS = ("step", "samples", "loss", "gradients", "parameters", "buffers", "learning rate")
_WIDTH = 118
_MOST_OTHERS = 3
_MOST_ROWS = 12  # of a table; beyond it the beginning, the end and the steps around the first parting


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    judged = not comparison.by_rights
    shown: list[tuple[str, ...]] = []
    last = 0
    for row in choose_rows(comparison):
        if row.step > last + 1:
            shown.append(("...", *[""] * (len(HEADINGS) - 1)))
        shown.append(_cells(row, judged))
        last = row.step
    return shown


def choose_rows(comparison: Comparison) -> list[StepRow]:
    if len(comparison.rows) <= _MOST_ROWS:
        return comparison.rows
    ends = {1, 2, 3, len(comparison.rows)}
    around = {step + offset for step in [one.step for one in comparison.partings[:1]] for offset in (-1, 0, 1, 2)}
    return [row for row in comparison.rows if row.step in ends | around]


def _cells(row: StepRow, judged: bool) -> tuple[str, ...]:
    return (
        str(row.step),
        _samples(row),
        _losses(row),
        *(_apart(row.differences.get(key), judged) for key in ("gradients", "parameters", "buffers")),
        _rates(row),
    )


def _samples(row: StepRow) -> str:
    one, two, both = row.samples
    return f"{one} the same" if row.same_samples else f"{one} and {two}, {both} in both"


def _losses(row: StepRow) -> str:
    one, two = row.losses
    if one is None or two is None:
        return "-"
    found = row.differences.get("loss")
    return f"{one:.6g}" if found is not None and not found.is_beyond else f"{one:.6g} / {two:.6g}"


def _apart(found: Difference | None, judged: bool) -> str:
    if found is None or (not found.relative and not found.name):
        return "equal" if found is not None else "-"
    return f"{found.relative:.1e}{' !' if found.is_beyond and judged else ''}"


def _rates(row: StepRow) -> str:
    one, two = (", ".join(f"{rate:g}" for rate in rates[:2]) for rates in row.rates)
    return one if one == two else f"{one} / {two}"


def table_title(comparison: Comparison, verdict: Verdict) -> str:
    return f"{processes(comparison.world_size)} against {processes(verdict.reference_size)}"


def format_tables(verdict: Verdict) -> str:
    parts: list[str] = []
    for comparison in verdict.comparisons:
        rows = [HEADINGS, *table_rows(comparison)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(HEADINGS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        parts.append("\n".join([table_title(comparison, verdict), *(f"  {line}" for line in lines)]) + "\n")
    return "\n".join(parts)


def format_conclusion(verdict: Verdict) -> str:
    lines: list[str] = []
    if verdict.kind == "in step":
        lines += [f"in step: {_largest(verdict)}"]
    elif verdict.kind == "parted":
        lines += [f"parted at {_title(verdict.partings[0])}", *_entries(verdict.partings[0])]
        for other in verdict.partings[1 : 1 + _MOST_OTHERS]:
            lines += ["", f"also at {_title(other)}", *_entries(other)]
        lines += [f"and {len(verdict.partings) - 1 - _MOST_OTHERS} more; see --json"] * (
            len(verdict.partings) > 1 + _MOST_OTHERS
        )
    for question in verdict.questions:
        word = "not judged" if verdict.kind == "not judged" else "not compared"
        lines += ["", *_entry(f"{word}: ", question)] if lines else _entry(f"{word}: ", question)
    if verdict.kind == "not judged" and verdict.comparisons:
        lines += ["The ranks of each run agree with each other, and so does everything before that step."]
    for note in verdict.notes:
        lines += _entry("note: ", _shorten(note))
    return "\n".join(lines) + "\n"


def _title(parting: Parting) -> str:
    among = parting.between == "ranks" and parting.world_size > 1
    place = f"between the ranks of {parting.world_size} processes" if among else f"on {processes(parting.world_size)}"
    return f"{parting.title()}, {place}  [{parting.cause.id}]"


def _entries(parting: Parting) -> list[str]:
    cause = parting.cause
    lines = _entry("  why   ", _shorten(cause.text))
    if cause.where and _shorten(cause.where) not in _shorten(cause.text):
        lines += _entry("  at    ", _shorten(cause.where) + _source(cause.where))
    return lines + _entry("  do    ", cause.fix)


def _entry(label: str, text: str) -> list[str]:
    indent = " " * min(len(label), 8)
    lines: list[str] = []
    for number, paragraph in enumerate(text.splitlines() or [""]):
        width = _WIDTH if number == 0 else 10**6  # output of a failed run keeps its lines
        lines += textwrap.wrap(
            paragraph, width, initial_indent=label if number == 0 else indent, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False, drop_whitespace=number == 0,
        )  # fmt: skip
    return lines


def _shorten(text: str) -> str:
    """Paths below the working directory without it."""
    return text.replace(os.getcwd() + os.sep, "")


def _source(where: str) -> str:
    path, _, line = where.rpartition(":")
    try:
        with open(path, encoding="utf-8") as file:
            return f": {file.read().splitlines()[int(line) - 1].strip()}"
    except (OSError, ValueError, IndexError):
        return ""


def _largest(verdict: Verdict) -> str:
    """The difference that comes nearest to its tolerance, over everything that was judged."""
    best: tuple[float, str] = (-1.0, "")
    for comparison in verdict.comparisons:
        judged = ("loss", "gradients", "gradient norm", "parameters", "buffers")
        for row in comparison.rows if not comparison.by_rights else []:
            for quantity in judged:
                found = row.differences.get(quantity)
                if found is not None and found.tolerance and found.relative / found.tolerance > best[0]:
                    best = found.relative / found.tolerance, _tell(quantity, found, row, comparison)
    if not best[1]:
        return (
            f"the ranks of each run agree over {verdict.steps} steps, with the same samples, initial weights and "
            "learning rates as the reference"
        )
    return f"over {verdict.steps} steps the largest difference for its tolerance is {best[1]}"


def _tell(quantity: str, found: Difference, row: StepRow, comparison: Comparison) -> str:
    of = f" of {found.name}" if found.name else ""
    return (
        f"{found.relative:.1e} ({quantity}{of}, step {row.step}, {processes(comparison.world_size)}); "
        f"tolerance there {found.tolerance:.1e}"
    )
