"""While ranks run: whether they have taken part in equally many collectives by the end of the same optimizer step.

A rank that leaves one out goes on with others' numbers, and the pages that show it are overwritten within seconds; so
they are kept as they were when the first difference was seen. What it means is for `instep diagnose` to say.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from dataclasses import dataclass

from instep.records import recording as layout
from instep.records.recording import Page, StepMark, check_page
from instep.records.run_dir import RunDir, write_json

MOST_LOOKS = 3  # a script whose counts rightly differ is not looked at for ever
LOOK_STEPS = 64  # between two looks that found a difference


def find_difference(pages: Mapping[int, Page]) -> dict[int, StepMark] | None:
    """The marks of the newest step that all ranks have ended and marked, when their counts of collectives or forwards
    differ there."""
    tables = [page.counts_by_step() for page in pages.values()]
    step = max(set.intersection(*map(set, tables)), default=0)
    if len({table.get(step) for table in tables}) < 2:
        return None
    marks = {rank: mark for rank, page in pages.items() if (mark := page.step_mark(step)) is not None}
    return marks if len(marks) == len(pages) else None


@dataclass
class PairWatch:
    """Called some times a second with the ranks' pages as they are mapped."""

    run_dir: RunDir
    looks: int = 0
    next_step: int = 1

    def look(self, mapped: Mapping[int, mmap.mmap]) -> bool:
        """Whether a difference was seen now, and the pages of that moment have been kept."""
        if len(mapped) < 2 or self.looks >= MOST_LOOKS:
            return False
        step = min(layout.U64.unpack_from(view, layout.NUM_STEPS)[0] for view in mapped.values())
        if step < self.next_step:
            return False
        self.next_step = step + 1
        pages = {rank: page for rank, view in mapped.items() if (page := check_page(view[:])) is not None}
        if len(pages) < len(mapped) or len(pages) != next(iter(pages.values())).world_size:
            return False  # ranks on other nodes cannot be seen from here
        marks = find_difference(pages)
        if marks is None:
            return False
        self.looks += 1
        self.next_step = step + LOOK_STEPS
        self._keep(pages, marks)
        return True

    def _keep(self, pages: Mapping[int, Page], marks: Mapping[int, StepMark]) -> None:
        with contextlib.suppress(OSError):  # a full disk costs the copy
            for rank, page in pages.items():
                self.run_dir.rank(rank).mispaired_page.write_bytes(page.data)
            rows = {str(rank): [mark.sequence, mark.turns] for rank, mark in marks.items()}
            write_json(self.run_dir.pairing, {"step": next(iter(marks.values())).step, "collectives": rows})
