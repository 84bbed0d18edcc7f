"""Where the time of a rank's steps went, from the sums in its page."""

from __future__ import annotations

from dataclasses import dataclass

from instep.diagnose.rank_view import RankView

MIN_STEPS = 20  # backwards after the first five: one per optimizer step, or more with accumulation


@dataclass(frozen=True)
class Shares:
    """Sums over all steps after the first five. own: without waiting for other ranks; exposed: share of a step that
    passes in backward without this rank's own work, which is communication that is not hidden."""

    steps: int
    total_seconds: float
    data_seconds: float
    forward_seconds: float
    backward_seconds: float
    backward_own_seconds: float
    step_seconds: float
    collective_seconds: float
    delayed_seconds: float  # without a core, though there was work: on a busy machine
    usual_own_seconds: float  # of one step: the median, so that an evaluation now and then does not count

    @property
    def data(self) -> float:
        return min(1.0, self.data_seconds / self.total_seconds)

    @property
    def exposed(self) -> float:
        return max(0.0, min(1.0, (self.backward_seconds - self.backward_own_seconds) / self.total_seconds))

    @property
    def communication(self) -> float:
        """The exposed share as it would be with a core for every rank: waits for one are taken off."""
        had_core = max(1e-9, self.total_seconds - self.delayed_seconds)
        return max(0.0, self.exposed * self.total_seconds - self.delayed_seconds) / had_core

    @property
    def own_seconds(self) -> float:
        return max(
            0.0, self.total_seconds - self.collective_seconds - (self.backward_seconds - self.backward_own_seconds)
        )

    def largest_excess(self, other: Shares) -> str:
        """The part of a step in which this rank spends more than the other."""
        parts = {
            "data": (self.data_seconds, other.data_seconds),
            "backward": (self.backward_own_seconds, other.backward_own_seconds),
            "the optimizer": (self.step_seconds, other.step_seconds),
        }
        known = sum(mine for mine, _ in parts.values()), sum(theirs for _, theirs in parts.values())
        parts["forward and the rest of the loop"] = (self.own_seconds - known[0], other.own_seconds - known[1])
        return max(parts, key=lambda name: parts[name][0] / self.steps - parts[name][1] / other.steps)


def measure_shares(view: RankView) -> Shares | None:
    """None when the run was too short to judge, or when work on a device hides the host's clock."""
    mark = view.page.newest_step_mark if view.page is not None else None
    if view.page is None or mark is None:
        return None
    seconds = view.page.seconds
    if mark.backwards < MIN_STEPS + 5 or seconds["steps"] < 2 or seconds["total"] <= 0:
        return None
    joined = view.last("joined")
    if joined is not None and joined["backend"] not in ("gloo", "mpi"):
        return None  # kernels run after their call has come back: the host's times are not theirs
    return Shares(
        int(seconds["steps"]),
        seconds["total"],
        seconds["data"],
        seconds["forward"],
        seconds["backward"],
        seconds["backward_cpu"],
        seconds["step"],
        seconds["collective"],
        seconds["delayed"],
        seconds["usual_own"],
    )
