"""Where two runs, or the ranks of one, part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


def processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


@dataclass(frozen=True)
class Cause:
    """id: its short name; text: what was seen and why it matters; fix: what to do; where: `file:line` or empty."""

    id: str
    text: str
    fix: str
    where: str = ""


@dataclass(frozen=True)
class Parting:
    """step: from 1; quantity: as in the table; name: of a parameter or a loader, or empty; between: "ranks" of one run
    or "runs"; difference and tolerance: relative, None where the fact is not a distance."""

    step: int
    quantity: str
    between: str
    world_size: int
    cause: Cause
    name: str = ""
    difference: float | None = None
    tolerance: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def title(self) -> str:
        what = f"{self.quantity} of {self.name}" if self.name else self.quantity
        if self.difference is None:
            return f"step {self.step}: {what}"
        allowed = f", tolerance {self.tolerance:.1e}" if self.tolerance is not None else ""
        return f"step {self.step}: {what} ({self.difference:.1e} apart{allowed})"
