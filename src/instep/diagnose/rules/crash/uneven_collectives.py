"""A run broke off because ranks met in different collectives.

## What it sees
The first collective in which the ranks meant different things, and the end of a rank in it.

## Why it matters
Collectives are paired by count. When one rank has left one out, the next ones meet with other sizes: gloo ends the process with
SIGABRT and no traceback, NCCL waits for ever or mixes up the data.

## What to do
Enter the same collectives on every rank in every step. Where the number of values varies, put them into one tensor of fixed
size, with zeros for what is not there.

## When it is wrong
Scripts whose ranks rightly take part in different collectives of different groups.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

from instep.diagnose.data_facts import UnevenLap, describe_counts, find_uneven_lap, made_uneven_at
from instep.diagnose.hang import find_fork
from instep.diagnose.missing import explain_missing, with_odd_rank
from instep.diagnose.naming import short
from instep.diagnose.pairing import Mispairing, find_mispairing
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.finding import Evidence, Finding


def check(run: RunView) -> Iterator[Finding]:
    yield from _parted(run) if find_mispairing(run) is None else ()
    mispairing = find_mispairing(run)
    failed = [view for view in run.ranks if view.failure is not None]
    if mispairing is None or mispairing.is_silent or mispairing.sizes_differ or not failed or run.stall is not None:
        return
    if any(view.error is not None and not view.echoes for view in failed):
        return  # a rank with an error of its own left the others behind
    uneven = find_uneven_lap(run)
    if uneven is not None:
        where, why = (
            made_uneven_at(run, uneven),
            "The ranks have different numbers of batches, and met in different places.",
        )
    else:
        mispairing = with_odd_rank(run, mispairing)
        where, why = explain_missing(run, mispairing)
    yield Finding(
        id="crash/uneven-collectives",
        title=describe_counts(uneven) if uneven is not None else describe(mispairing),
        cause=why
        or "The ranks had entered different collectives, which were paired all the same, and their sizes differ.",
        fix=(
            "enter the same collectives on every rank in every step",
            "or reduce one tensor of fixed size, with zeros for what is missing",
        ),
        evidence=cite(run, mispairing),
        certainty="certain" if where is not None else "likely",
        ranks=_odd_ranks(mispairing, uneven),
        where=where or mispairing.slots[-1].site,
        explains=("crash/*", "hang/*", "numbers/ranks-apart"),
    )


def _parted(run: RunView) -> Iterator[Finding]:
    """Where the collectives themselves are not known, as those that torch starts in C++: the ranks' stacks at their end."""
    aborted = [view for view in run.ranks if _has_aborted(view)]
    others = [view for view in run.ranks if not _has_aborted(view) and (_was_ended(view) or view.echoes)]
    if not aborted or run.stall is not None or len(aborted) + len(others) < run.world_size:
        return
    fork = find_fork(tuple(view.position for view in run.ranks if view.position is not None))
    if fork is None or fork.kind not in ("rank-branch", "branch"):
        return
    inside, outside = run.by_rank[fork.inside], run.by_rank[fork.outside]
    there, elsewhere = (view.main_frames[0].site if view.main_frames else None for view in (inside, outside))
    yield Finding(
        id="crash/uneven-collectives",
        title=f"rank {inside.rank} was at {short(there)} when rank {outside.rank} was at {short(elsewhere)}, and both sent to each other",
        cause=f"The condition at {short(fork.condition)} came out differently on the ranks; the collectives behind it were paired "
        "with others all the same, and their sizes differ.",
        fix=(f"run {short(fork.where)} on every rank, or on none",),
        evidence=tuple(
            view.cite(f"rank {view.rank} was at {short(at)}") for view, at in ((inside, there), (outside, elsewhere))
        ),
        certainty="likely",
        ranks=(inside.rank,),
        where=fork.where,
        explains=("crash/*",),
    )


def _was_ended(view: RankView) -> bool:
    """By the launcher, after another rank's end."""
    return view.error is None and bool((view.exit or {}).get("by_us"))


def _has_aborted(view: RankView) -> bool:
    """As gloo does on a message of another size, in a thread of its own that has no Python code."""
    has_aborted = view.failure is not None and view.failure.get("exit_code") == -signal.SIGABRT and view.error is None
    return has_aborted and "Current thread" not in view.crash_text


def _odd_ranks(mispairing: Mispairing, uneven: UnevenLap | None) -> tuple[int, ...]:
    if uneven is not None:
        return uneven.short_ranks
    return (mispairing.odd,) if mispairing.odd is not None else ()


def describe(mispairing: Mispairing) -> str:
    one = mispairing.slots[0]
    two = next(slot for slot in mispairing.slots if slot.meaning != one.meaning)
    if mispairing.odd is not None and mispairing.expected is not None:
        got = f", and went on to {_name(mispairing.got)}" if mispairing.got else ""
        return f"{mispairing.when} rank {mispairing.odd} left out {_name(mispairing.expected)}{got}"
    return f"collective {one.sequence} is {one.describe()} on rank {one.rank}, but {two.describe()} on rank {two.rank}"


def _name(act: tuple[str, object]) -> str:
    words = {"gradients": "the average of the gradients", "buffers": "the wrapped model's forward"}
    return f"{words.get(act[0], act[0])} at {short(act[1])}"  # type: ignore[arg-type]


def cite(run: RunView, mispairing: Mispairing) -> tuple[Evidence, ...]:
    return tuple(
        run.by_rank[slot.rank].cite(f"collective {slot.sequence}: {slot.describe()}, step {slot.step}", "page.bin")
        for slot in mispairing.slots[:8]
    )
