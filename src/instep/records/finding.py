"""One diagnosed fact, as it stands in findings.json and on the terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Certainty = Literal["certain", "likely", "possible"]


@dataclass(frozen=True)
class CallSite:
    """A line of the user's code."""

    file: str
    line: int
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Evidence:
    """fact: what was seen; source: where, as `rank2/stacks.txt` or `train.py:41`; rank: None when of all."""

    fact: str
    source: str
    rank: int | None = None


@dataclass(frozen=True)
class Finding:
    """id: family/rule; ranks: the odd or guilty ones, empty where all or none in particular;
    where: the line to change or to look at first; explains: ids of findings that are its consequences."""

    id: str
    title: str
    cause: str
    fix: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    certainty: Certainty
    ranks: tuple[int, ...] = ()
    where: CallSite | None = None
    explains: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Finding:
        return Finding(
            id=data["id"],
            title=data["title"],
            cause=data["cause"],
            fix=tuple(data["fix"]),
            evidence=tuple(Evidence(**item) for item in data["evidence"]),
            certainty=data["certainty"],
            ranks=tuple(data["ranks"]),
            where=CallSite(**data["where"]) if data["where"] else None,
            explains=tuple(data["explains"]),
        )
