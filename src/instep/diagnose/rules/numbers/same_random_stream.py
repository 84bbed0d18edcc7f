"""All ranks draw the same random numbers, though the script means them to draw different ones.

## What it sees
The state of torch's generator, equal on all ranks at each step that was compared and different from step to step, in a script whose seed
depends on the rank in its source but had the same value on all of them.

## Why it matters
Dropout masks, noise and augmentation made in the rank are the same everywhere, so that more ranks see less variety than they should.

## What to do
Seed with `seed + dist.get_rank()` (or RANK from the environment) after the model was built.

## When it is wrong
Seeding all ranks alike is a common habit and mostly harmless; it is not reported unless the script's own seed names the rank.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.arguments import find_local_rank_argument
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.slices import call_at, definitions
from instep.diagnose.source import load
from instep.records.finding import CallSite, Finding

MIN_STEPS = 3  # compared, with numbers drawn in between
_SEEDS = ("manual_seed", "seed", "seed_everything", "set_seed")


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole or run.world_size < 2:
        return
    tables = [{event.step: event["print"] for event in view.named("random")} for view in run.ranks]
    common = sorted(step for step in tables[0] if all(step in table for table in tables))
    states = [tables[0][step] for step in common if len({table[step] for table in tables}) == 1]
    if len(states) < max(MIN_STEPS, len(common)) or len(set(states)) < MIN_STEPS:
        return
    found = _same_seed(run)
    if found is None:
        return
    value, where = found
    argument = find_local_rank_argument(where)
    because = f" `{argument.source}` keeps its default on every rank." if argument else ""
    yield Finding(
        id="numbers/same-random-stream",
        title=f"all ranks draw the same random numbers: each was seeded with {value}",
        cause=f"The seed at {short(where)} depends on the rank in the source, and was {value} on every rank.{because}",
        fix=(f"at {short(where)} use seed + dist.get_rank()",),
        evidence=tuple(
            view.cite(f"rank {view.rank}: seed {value}; generator equal to the other ranks' at {len(states)} steps")
            for view in run.ranks[:4]
        ),
        certainty="possible",
        where=where,
    )


def _same_seed(run: RunView) -> tuple[int, CallSite] | None:
    """The newest seed that all ranks set alike at a line whose argument names the rank."""
    rows = [view.named("seeded") for view in run.ranks]
    for events in reversed(list(zip(*rows))):
        site = run.ranks[0].site(events[0]["site"])
        if len({event["value"] for event in events}) == 1 and site is not None and _names_rank(site):
            return events[0]["value"], site
    return None


def _names_rank(site: CallSite) -> bool:
    source = load(site.file)
    call = call_at(source, site.line, *_SEEDS) if source else None
    if source is None or call is None or not call.args:
        return False
    made = definitions(source, call.args[0], source.function_at(site.line))
    return any(source.depends_on_rank(node) for node in (call.args[0], *made) if isinstance(node, ast.expr))
