"""An exception on one rank was caught, and that rank went on without the others.

## What it sees
An exception that passed through a data loader, a forward, a backward or a collective on one rank only, after which that
rank did something else. Or an exception that one rank handles at this moment, in an `except` or a `finally` where it waits for the
others.

## Why it matters
The rank has left out collectives that the others wait in.

## What to do
Let the exception end the run, or handle it on every rank alike: tell the others with a collective that all of them call. Let no
`finally` wait for other ranks: they do not come there without an exception of their own.

## When it is wrong
When the ranks part for another reason long after an exception that was rightly ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.hang import cite_positions, classify
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "error-swallowed" or hang.error is None:
        return
    rank, event = hang.error
    frames = event["frames"]
    where = (
        CallSite(frames[0]["file"], frames[0]["line"], source_line(frames[0]["file"], frames[0]["line"]))
        if frames
        else None
    )
    first = (event["message"].splitlines() or [""])[0][:160]
    if event.name == "held-back":
        title = f"rank {rank} raised {event['type']}: {first} and cannot end, since it is {event['call']}"
        cause = f"The exception at {short(where)} led rank {rank} into an `except` or `finally` that waits for the others, which wait elsewhere for rank {rank}."
    else:
        title = f"rank {rank} caught {event['type']}: {first} and went on without the others"
        cause = f"The exception at {short(where)} made rank {rank} leave out collectives in which the others now wait."
    yield Finding(
        id="hang/error-swallowed",
        title=title,
        cause=cause,
        fix=("let the exception end the run, or handle it on every rank alike", f"mend what raised it: {short(where)}"),
        evidence=(
            run.by_rank[rank].cite(f"{event['type']}: {first} in {event['call']} at {short(where)}, step {event.step}"),
            *cite_positions(run, hang.waiting + hang.outside),
        ),
        certainty="certain" if hang.proven else "likely",
        ranks=(rank,),
        where=where,
        explains=("hang/*", "numbers/*"),
    )
