"""Collectives that the script calls itself in every step take a good part of the time.

## What it sees
For each line of the script that calls a collective: how often per step, and how long all ranks spend in it at least, without the waiting that
a slower rank explains.

## Why it matters
A collective of a few bytes costs as long as a message needs to go and come, and the rank does nothing meanwhile. `barrier()` in a step keeps
ranks together that the averages keep together anyway. Many small ones in a row cost that time once for each.

## What to do
Leave barriers out of the loop. Add metrics up on the rank and join them every 50 steps or at the end of an epoch, in one tensor. Join the
gradients of all parameters in one flat tensor, or let DistributedDataParallel do it.

## When it is wrong
Algorithms that need the value in each step.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.plain_facts import plain_models
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.site_costs import Cost, costs_of
from instep.diagnose.time_shares import measure_shares
from instep.records.finding import CallSite, Finding

MIN_PER_STEP = 0.9  # calls
MIN_SHARE = 0.2  # of the time, on the rank that waits least
MIN_SECONDS = 1.0  # in all: less is not worth a word
_EXCHANGES = ("gather", "scatter", "all_to_all", "broadcast", "send", "recv")
SEVERAL = 1.9  # calls per step: one may be needed in each, as for the number of targets
MANY = 16  # calls of one line per step that can be joined in one


def check(run: RunView) -> Iterator[Finding]:
    found = [(view, shares) for view in run.ranks if (shares := measure_shares(view)) is not None]
    if not run.is_whole or len(found) < len(run.ranks) or len(found) < 2:
        return
    averages = {model.averaged_at for model in plain_models(run)}
    tables = [{cost.site: cost for cost in _each_step(view, shares.steps, averages)} for view, shares in found]
    common = [site for site in tables[0] if all(site in table for table in tables)]
    least = {site: min(table[site].seconds for table in tables) for site in common}
    # On a busy machine a message waits for a core at both of its ends.
    delayed = max(shares.delayed_seconds for _, shares in found)
    total, seconds = max(shares.total_seconds for _, shares in found), sum(least.values()) - delayed
    if not common or seconds < max(MIN_SECONDS, MIN_SHARE * total):
        return
    where = max(least, key=lambda site: least[site])
    yield _finding(run, tables, where, least, seconds / total, found[0][1].steps)


def _each_step(view: RankView, steps: int, averages: set[CallSite | None]) -> list[Cost]:
    """Lines that can do without: those that join something small several times in a step, barriers, and objects, which
    are pickled; of gradients that the script averages itself when there are very many of them."""
    rows = [cost for cost in costs_of(view, "collectives") if cost.calls >= MIN_PER_STEP * steps]
    others = [cost for cost in rows if cost.site not in averages and not _is_needed(cost.site.source)]
    dear = [cost for cost in others if any(word in cost.site.source for word in ("barrier", "_object"))]
    small = others if sum(cost.calls for cost in others) >= SEVERAL * steps else dear
    return [*small, *(cost for cost in rows if cost.site in averages and cost.calls >= MANY * steps)]


def _is_needed(source: str) -> bool:
    """Whether a line exchanges tensors that most likely are a part of the computation, as embeddings that a loss compares."""
    return "_object" not in source and any(word in source for word in _EXCHANGES)


def _finding(
    run: RunView,
    tables: list[dict[CallSite, Cost]],
    where: CallSite,
    least: dict[CallSite, float],
    share: float,
    steps: int,
) -> Finding:
    lines = sorted(least, key=lambda site: -least[site])
    calls = sum(tables[0][site].calls for site in lines) / steps
    many = tables[0][where].calls >= MANY * steps
    remedy = (
        f"join them in one: copy into one flat tensor, call the collective once at {short(where)}, copy back"
        if many
        else "leave barriers out of the loop; add metrics up on the rank and join them every 50 steps, in one tensor"
    )
    return Finding(
        id="speed/collectives-each-step",
        title=f"{share:.0%} of the time goes into {calls:.0f} collective{'s' if calls >= 1.5 else ''} per step that the script calls itself",
        cause=f"In every step the script waits at {', '.join(short(site) for site in lines[:3])}; a message that goes and comes costs the same for a few bytes as for many.",
        fix=(f"{remedy} (up to {1 / max(0.05, 1 - share):.1f} times as fast)",),
        evidence=tuple(
            run.ranks[0].cite(
                f"{short(site)}: {tables[0][site].calls} calls in {steps} steps, {least[site]:.2f} s on the rank that waits least ({site.source})"
            )
            for site in lines[:4]
        ),
        certainty="likely",
        where=where,
    )
