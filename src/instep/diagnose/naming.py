"""How ranks and lines are named in what is told."""

from __future__ import annotations

import os
from collections.abc import Iterable

from instep.records.finding import CallSite


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2 and 5`, `ranks 0-7`."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]}-{numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def short(site: CallSite | None) -> str:
    return f"{os.path.basename(site.file)}:{site.line}" if site else "an unknown line"
