"""The learning-rate schedule is not as long as the training.

## What it sees
How many steps a schedule was made for, how often it was stepped, and how many optimizer steps there were. It is said when the schedule was
laid out for the batches of the whole data set while each rank has its share of them only, and when it is stepped several times for each
optimizer step and so comes to its end early.

## Why it matters
A schedule that is too long never reaches its small rates; one that is stepped too often ends with most of the training at the last rate,
or goes up again.

## What to do
Count optimizer steps: `len(loader)` of the loader with the sampler, times epochs, divided by the micro-batches per step; step the schedule
once after each `optimizer.step()`. With Accelerate, whose prepared schedulers step once per process, lay it out before the loader is prepared.

## When it is wrong
A training that is stopped early on purpose, or a periodic schedule; both are silent unless the ratio is that of a usual mistake.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.event import Event
from instep.records.finding import CallSite, Finding

MIN_STEPS = 20  # of the optimizer
MANY = 1.9  # steps of the schedule per optimizer step
TOLERANCE = 0.02
NEAR = 0.1  # of the length: it was laid out for the optimizer steps that there were


def check(run: RunView) -> Iterator[Finding]:
    view = run.ranks[0] if run.ranks else None
    newest = {row["schedule"]: row for row in view.named("schedule")} if view is not None else {}
    for row in newest.values():
        if view is None:
            return
        found = _stepped_often(run, view, row) or _laid_out_for_all(run, view, row)
        if found is not None:
            yield _finding(view, row, *found)
            return


def _all_steps(view: RankView, row: Event) -> int:
    """Optimizer steps in all: a schedule is read now and then only."""
    return view.num_steps if len(view.named("optimizer")) == 1 else row["steps"] + 1


def _stepped_often(run: RunView, view: RankView, row: Event) -> tuple[str, str, str, str] | None:
    """Several steps of the schedule for one of the optimizer, which take it to its end before the training ends."""
    steps, calls, length = row["steps"], row["calls"], row["length"]
    if steps < MIN_STEPS or calls < MANY * steps or abs(length - _all_steps(view, row)) > NEAR * length:
        return None  # a schedule of another length, as a warm-up, may end where it likes
    times = round(calls / steps)
    title = f"the learning-rate schedule of {length} steps was stepped {calls} times in {steps} optimizer steps"
    if row["library"] and times == run.world_size:
        cause = f"The scheduler prepared by Accelerate steps {times} times per optimizer step, once for each process, and {{made}} lays it out for {length} steps: it is at its end after 1/{times} of the training."
        return (
            title,
            cause,
            f"lay it out for {length} x {times} steps, by the length that the loader has before it is prepared",
            "made",
        )
    cause = f"{{step}} runs {times} times for each optimizer step (as for every micro-batch), so the schedule made at {{made}} passes its end early."
    return title, cause, "step the schedule once after each optimizer.step()", "step"


def _laid_out_for_all(run: RunView, view: RankView, row: Event) -> tuple[str, str, str, str] | None:
    """Its length is that of all ranks' batches together, and it was stepped for this rank's share of them."""
    steps, length, total = row["steps"], row["length"], _all_steps(view, row)
    if view.exit_code != 0 or steps < MIN_STEPS or run.world_size < 2:
        return None
    once = abs(row["calls"] - steps) <= 1 + TOLERANCE * steps
    if not once or abs(length - total * run.world_size) > run.world_size + TOLERANCE * length:
        return None
    if not any(_is_whole_length(view, event, length) for event in view.named("loader")):
        return None
    title = f"the learning-rate schedule is {length} steps long, and the training has {total}"
    cause = f"{{made}} counts the batches of the whole data set, which {run.world_size} ranks share, so that each takes 1/{run.world_size} of them: the schedule stops at 1/{run.world_size} of its way."
    return (
        title,
        cause,
        "count the batches of one rank: len(loader) of the loader with the sampler, times epochs",
        "made",
    )


def _is_whole_length(view: RankView, loader: Event, length: int) -> bool:
    """Whether the schedule has as many steps as the epochs have batches when nothing is shared out."""
    laps = [lap for lap in view.named("lap") if lap["loader"] == loader["loader"] and lap["backwards"]]
    if not loader.get("replicas") or not laps or not loader["batch_size"] or not loader["length"]:
        return False
    batches = loader["length"] / loader["batch_size"]
    return len(laps) * (batches - 1) <= length <= len(laps) * (batches + 1)


def _finding(view: RankView, row: Event, title: str, cause: str, fix: str, at: str) -> Finding:
    made = view.site(row["site"])
    sites = {"made": made, "step": _stepped_at(made) or made}
    names = {word: short(site) for word, site in sites.items()}
    return Finding(
        id="numbers/schedule-length",
        title=title,
        cause=cause.format(**names),
        fix=(f"{fix} ({names[at]})",),
        evidence=(
            view.cite(f"{row['kind']} made at {names['made']}: {row['length']} steps long"),
            view.cite(f"stepped {row['calls']} times in {row['steps']} optimizer steps"),
        ),
        certainty="likely",
        where=sites[at],
    )


def _stepped_at(made: CallSite | None) -> CallSite | None:
    """The call of `step` of the variable (or attribute) that the schedule was assigned to."""
    source = load(made.file) if made is not None else None
    statement = source.statement_at(made.line) if source is not None and made is not None else None
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {ast.unparse(target).rpartition(".")[2] for target in targets}
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)] if source is not None else []
    found = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "step"]
    own = [call for call in found if ast.unparse(call.func.value).rpartition(".")[2] in names]  # type: ignore[attr-defined]
    return source.site(own[0]) if source is not None and own else None
