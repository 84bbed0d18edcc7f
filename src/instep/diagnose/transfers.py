"""Transfers between two ranks: which of those that wait has a partner that takes part."""

from __future__ import annotations

from dataclasses import dataclass

from instep.diagnose.run_view import Position, RankView, RunView
from instep.records.recording import POINT_TO_POINT, Mark

_GIVES = ("send", "isend", "send_object_list")


@dataclass(frozen=True)
class Transfer:
    """A rank that waits in a transfer, and the other side; operation: what it called, before a `wait` too."""

    position: Position
    operation: str
    peer: int | None

    def describe(self) -> str:
        whom = f"rank {self.peer}" if self.peer is not None else "another rank"
        if self.operation == "batch_isend_irecv":
            return f"to exchange with {whom}"
        return f"to send to {whom}" if self.operation in _GIVES else f"to receive from {whom}"


def find_transfers(run: RunView, positions: tuple[Position, ...]) -> list[Transfer]:
    """Of the ranks that wait, those that wait in a transfer."""
    found = [(position, _newest(run.by_rank[position.rank], position)) for position in positions]
    return [
        Transfer(position, mark.operation, mark.count - 1 if mark.count else None) for position, mark in found if mark
    ]


def _newest(view: RankView, position: Position) -> Mark | None:
    """The call of the transfer that the rank is in, or waits for."""
    if position.operation in POINT_TO_POINT:
        return view.marks[-1]
    if position.operation != "wait":
        return None
    started = [mark for mark in view.marks if mark.kind == "enter-collective" and mark.operation != "wait"]
    return started[-1] if started and started[-1].operation in POINT_TO_POINT else None


def has_partner(transfer: Transfer, transfers: list[Transfer]) -> bool:
    """Whether the other side waits in a transfer with this rank too, and not in the same direction."""
    for other in transfers:
        if other.position.rank == transfer.peer and other.peer in (None, transfer.position.rank):
            both = "batch_isend_irecv" in (transfer.operation, other.operation)
            return both or (transfer.operation in _GIVES) != (other.operation in _GIVES)
    return transfer.peer is None
