"""A rank waits to send to another or to receive from it, and the other does not take part.

## What it sees
A rank that waits in `send`, `recv` or for an `isend`, `irecv` or `batch_isend_irecv`, and the rank at the other side, which is
somewhere else, or does the same instead of the opposite.

## Why it matters
Each `recv` needs one `send` of the other rank, each exchange its counterpart. Without it the rank waits for ever.

## What to do
Look at both sides: for every send to a rank there is one receive on that rank, in the same order.

## When it is wrong
When the other rank would have come later, after long work of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import Hang, cite_positions, classify
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.transfers import Transfer, find_transfers
from instep.records.finding import Certainty, Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "transfer-without-partner":
        return
    first = hang.transfers[0]
    rank, site = first.position.rank, first.position.site
    other = next((one for one in run.positions if one.rank == first.peer), None)
    elsewhere = f"rank {other.rank} is {other.describe()}" if other is not None else "the other rank is not there"
    yield Finding(
        id="hang/transfer-without-partner",
        title=f"rank {rank} waits {first.describe()} at {short(site)}, but {elsewhere}",
        cause=_why(first),
        fix=(
            f"give the transfer at {short(site)} its counterpart on rank {first.peer}, or leave it out on rank {rank}",
        ),
        evidence=cite_positions(run, hang.waiting + hang.outside),
        certainty=_certainty(run, hang),
        ranks=(first.peer,) if first.peer is not None else (),
        where=site,
        explains=("hang/*",),
    )


def _certainty(run: RunView, hang: Hang) -> Certainty:
    """Where all ranks wait in transfers, nothing is under way that could still serve one of them."""
    if hang.outside:
        return "possible"
    known = [one for one in find_transfers(run, hang.waiting) if one.peer is not None]
    return "certain" if hang.proven or len(known) == len(hang.waiting) else "likely"


def _why(first: Transfer) -> str:
    return (
        f"Rank {first.position.rank} waits {first.describe()}, and rank {first.peer} has not started the other half of it: "
        "neither can go on."
    )
