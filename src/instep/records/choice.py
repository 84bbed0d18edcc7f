"""A value that was picked for the user, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """name: what was chosen, as the user would write it; source: what would override it."""

    name: str
    value: object
    reason: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.reason} (set {self.source} to change it)"
