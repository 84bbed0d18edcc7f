"""A callback of the user's that asked a training library to stop on some ranks and not on others."""

from __future__ import annotations

from dataclasses import dataclass

from instep.diagnose.naming import name_ranks
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.finding import CallSite, Evidence


@dataclass(frozen=True)
class StopRequest:
    """where: the condition under which it was asked, or the line that did; site: that line."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    step: int
    function: str
    attribute: str
    site: CallSite
    where: CallSite

    @property
    def cause(self) -> str:
        return (
            f"{self.function} set {self.attribute} on {name_ranks(self.ranks)} after step {self.step} and not on "
            f"{name_ranks(self.others)}: each rank decides for itself."
        )

    @property
    def fix(self) -> str:
        return "let one rank decide and broadcast the decision, or all-reduce the value before it is compared"

    def cite(self, run: RunView) -> tuple[Evidence, ...]:
        asked = f"{self.attribute} was set after step {self.step} at {self.site.file}:{self.site.line}"
        mine = run.by_rank[self.ranks[0]].cite(f"rank {self.ranks[0]}: {asked}")
        return (mine, run.by_rank[self.others[0]].cite(f"rank {self.others[0]}: it was not set"))


def find_stop_request(run: RunView) -> StopRequest | None:
    """None when nobody asked, or all did at the same step."""
    asked = {
        view.rank: event for view in run.ranks if (event := next(iter(view.named("stop-asked")), None)) is not None
    }
    if not asked or not run.is_whole:
        return None
    step = min(event.step for event in asked.values())
    ranks = tuple(rank for rank, event in asked.items() if event.step == step)
    others = tuple(view.rank for view in run.ranks if view.rank not in ranks)
    site = run.by_rank[ranks[0]].site(asked[ranks[0]]["site"])
    if not others or site is None:
        return None
    event = asked[ranks[0]]
    return StopRequest(ranks, others, step, event["function"], event["attribute"], site, _condition(site))


def _condition(site: CallSite) -> CallSite:
    source = load(site.file)
    if source is None:
        return site
    guard = next((node for node in source.enclosing(site.line) if type(node).__name__ == "If"), None)
    return source.site(guard) if guard is not None else site
