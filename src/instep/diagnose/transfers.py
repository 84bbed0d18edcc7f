"""Transfers between two ranks: which of those that wait has a partner that takes part."""

from __future__ import annotations

from dataclasses import dataclass

from instep.diagnose.rank_view import Position, RankView
from instep.diagnose.run_view import RunView
from instep.records.recording import POINT_TO_POINT, Mark


@dataclass(frozen=True)
class Transfer:
    """A rank that waits in a transfer, and the other side; sends, receives: how many of each it has started."""

    position: Position
    peer: int | None
    sends: int
    receives: int

    def describe(self) -> str:
        whom = f"rank {self.peer}" if self.peer is not None else "another rank"
        if self.sends and self.receives:
            return f"to exchange with {whom}"
        return f"to send to {whom}" if self.sends else f"to receive from {whom}"


def find_transfers(run: RunView, positions: tuple[Position, ...]) -> list[Transfer]:
    """Of the ranks that wait, those that wait in a transfer."""
    found = [(position, _newest(run.by_rank[position.rank], position)) for position in positions]
    return [
        Transfer(position, mark.count - 1 if mark.count else None, *mark.transfers) for position, mark in found if mark
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
    """Whether the other side waits in a transfer with this rank too, which does what this one needs."""
    for other in transfers:
        if other.position.rank == transfer.peer and other.peer in (None, transfer.position.rank):
            return other.sends >= transfer.receives and other.receives >= transfer.sends
    return transfer.peer is None
