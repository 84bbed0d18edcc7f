"""Which steps are watched, what is told of those that are only counted, and where a rank is that leaves no marks."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from instep.launch.pairing import find_difference
from instep.launch.probe import backward, recorder, standing, step_times, watched_steps
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.recorder import WINDOW, Recorder
from instep.launch.probe.standing import Standing, find_stage
from instep.launch.probe.step_times import StepTimes
from instep.launch.probe.watched_steps import FIRST_SECONDS, FIRST_STEPS, WatchedSteps, choose_period, is_new
from instep.records import recording as layout
from instep.records.recording import KIND_NUMBER, Page


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds, for all that asks for them here."""
    clock = SimpleNamespace(now=100.0)
    for module in (recorder, watched_steps):
        monkeypatch.setattr(module, "monotonic", lambda: clock.now)
    monkeypatch.setattr(step_times, "read_run_delay", lambda: 0.0)
    return clock


@pytest.fixture
def rank(tmp_path: Path, clock: SimpleNamespace) -> Recorder:
    return Recorder(bytearray(layout.PAGE_BYTES), EventLog(tmp_path / "events.jsonl"), 0, 2)


class Run:
    """Steps of one rank, all of the same length."""

    def __init__(self, rank: Recorder, clock: SimpleNamespace, seconds: float) -> None:
        self.rank, self.clock, self.seconds = rank, clock, seconds
        self.looked: list[int] = []
        prints = SimpleNamespace(next_step=3, look=self._look)
        self.prints = prints
        self.times = StepTimes(rank)
        self.steps = WatchedSteps(rank, self.times, prints)  # type: ignore[arg-type]
        self.watched: list[int] = []

    def _look(self, step: int) -> None:
        self.looked.append(step)
        self.prints.next_step = 2 * step

    def go(self, count: int) -> None:
        for _ in range(count):
            self.clock.now += self.seconds
            self.rank.backwards += 1
            if self.rank.only_counts:
                self.steps.end_counted()
                continue
            self.rank.seconds[layout.SECONDS_OF.index("data")] += self.seconds / 4
            self.rank.end_step(0, 0.1)
            self.watched.append(self.rank.num_steps)
            self.steps.end_watched(self.clock.now)


@pytest.mark.parametrize(("seconds", "share"), [(0.005, 128), (0.019, 32), (0.03, 8), (0.079, 8)])
def test_of_short_steps_some_in_a_row_are_watched(
    rank: Recorder, clock: SimpleNamespace, seconds: float, share: int
) -> None:
    run = Run(rank, clock, seconds)
    first = max(FIRST_STEPS, int(FIRST_SECONDS / seconds)) + 2 * WINDOW
    run.go(first + 16 * share * WINDOW)
    early = max(FIRST_STEPS, int(FIRST_SECONDS / seconds) - 1)
    assert run.watched[:early] == list(range(1, early + 1))
    assert sum(step > first for step in run.watched) == pytest.approx(16 * WINDOW, abs=2 * WINDOW)
    late = [step for step in run.watched if step > first + share * WINDOW]
    assert all(step % (share * WINDOW) < WINDOW for step in late)
    assert run.looked == [3 * 2**power for power in range(len(run.looked))] and run.looked[-1] > first


def test_long_steps_are_all_watched(rank: Recorder, clock: SimpleNamespace) -> None:
    run = Run(rank, clock, 0.1)
    run.go(3000)
    assert len(run.watched) == 3000 and choose_period(0.1) == choose_period(0.0) == 0


def test_windows_of_ranks_that_choose_differently_meet() -> None:
    periods = sorted({choose_period(seconds) for seconds in (0.001, 0.015, 0.03)})
    assert all(longer % shorter == 0 for shorter, longer in pairwise(periods))
    assert all(period > WINDOW for period in periods)


def test_what_needs_every_step_keeps_them_watched(rank: Recorder, clock: SimpleNamespace) -> None:
    run = Run(rank, clock, 0.005)
    rank.keeps_awake.append(lambda: True)
    run.go(6000)
    rank.keeps_awake.clear()
    run.steps.has_nested = True
    run.go(500)
    assert len(run.watched) == 6500


def test_sums_cover_the_counted_steps(rank: Recorder, clock: SimpleNamespace) -> None:
    run = Run(rank, clock, 0.012)
    run.go(6 * 1024 + WINDOW + 10)
    sums = dict(zip(layout.SECONDS_OF, rank.seconds))
    began = 6 * 1024 - 1  # of the newest window
    assert sums["steps"] == pytest.approx(began - 5 + WINDOW, abs=2)
    assert sums["total"] == pytest.approx(sums["steps"] * 0.012)
    assert sums["data"] == pytest.approx(sums["total"] / 4, rel=1e-3)


def test_a_rank_that_is_woken_counts_its_time_from_there(rank: Recorder, clock: SimpleNamespace) -> None:
    run = Run(rank, clock, 0.005)
    run.go(5000)
    assert rank.only_counts
    before = len(run.watched)
    rank.wake()
    clock.now += 30.0  # an evaluation, say
    run.go(60)
    assert run.watched[before:] == list(range(5001, 5001 + WINDOW))
    sums = dict(zip(layout.SECONDS_OF, rank.seconds))
    assert sums["total"] == pytest.approx(sums["steps"] * 0.005 + 30.0)


def test_what_comes_up_often_is_watched_more_and_more_seldom() -> None:
    assert [times for times in range(1, 70) if is_new(times)] == [*range(1, 9), 16, 32, 64]


@pytest.mark.parametrize(("loss", "usual"), [(1.0, True), (float("nan"), False), (float("-inf"), False)])
def test_a_loss_is_looked_at_in_each_step(loss: float, usual: bool) -> None:
    losses = backward.Losses()
    for kind in (torch.tensor(loss), torch.tensor(loss, dtype=torch.complex64), torch.tensor([loss])):
        assert backward._is_usual(losses, kind) is usual
    assert len(losses.newest) == 3 * usual
    assert backward._is_usual(losses, None) and backward._is_usual(losses, torch.zeros(2))


def test_where_a_rank_is_can_be_read_from_its_stack(rank: Recorder) -> None:
    seen: list[tuple[int, FrameType | None]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append(find_stage(sys._getframe()))

    Watched([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    rank.only_counts = True
    backward._wrap(rank, backward.Losses(), lambda loss: seen.append(find_stage(sys._getframe())))(None)
    assert [kind for kind, _ in seen] == [KIND_NUMBER["enter-step"], KIND_NUMBER["enter-backward"]]
    assert all(frame is not None and frame.f_code.co_filename == __file__ for _, frame in seen)
    assert find_stage(sys._getframe()) == (0, None)
    assert (rank.backwards, rank.num_marks) == (1, 0)


def test_a_rank_that_stands_is_marked_from_outside_and_watched_again(
    rank: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "count_operations", lambda: 12)
    monkeypatch.setattr(standing.flight, "read_status", lambda: (12, 11))
    rank.only_counts, rank.rests, rank.num_steps, rank.turns = True, 1, 70, 71
    looks, frames = Standing(rank), list[FrameType]()
    looks.look(sys._getframe())
    assert rank.only_counts and Page(bytes(rank.page)).num_steps == 70  # it has gone on since the look before
    backward._wrap(rank, backward.Losses(), lambda loss: frames.append(sys._getframe()))(None)
    looks.look(frames[0])
    (_, mark) = Page(bytes(rank.page)).marks()
    assert (mark.kind, mark.sequence, mark.step, mark.elements) == ("enter-backward", 11, 70, 71)
    assert not rank.only_counts and rank.is_cut


def test_a_collective_of_the_script_stays_the_newest_mark(rank: Recorder) -> None:
    rank.only_counts, rank.rests = True, 1
    rank.mark(KIND_NUMBER["enter-collective"])
    looks = Standing(rank)
    looks.look(sys._getframe())
    looks.look(sys._getframe())
    assert [mark.kind for mark in Page(bytes(rank.page)).marks()] == ["enter-collective"] and not rank.only_counts


def make_page(steps: dict[int, int], num_steps: int) -> Page:
    """steps: collectives until the end of each step that has a mark."""
    data = bytearray(layout.PAGE_BYTES)
    for step, calls in steps.items():
        row = (step, calls, 0, 0, 0, 0, 0, 0, 0.1, 0.0)
        layout.STEP.pack_into(data, layout.STEPS + (step - 1) % layout.NUM_STEP_SLOTS * layout.STEP.size, *row)
    layout.U64.pack_into(data, layout.NUM_STEPS, num_steps)
    return Page(bytes(data))


def test_counts_are_compared_where_all_ranks_left_a_mark() -> None:
    pages = {0: make_page({32: 32, 1024: 1024, 1025: 1025}, 1800), 1: make_page({32: 32, 1024: 1023}, 1810)}
    found = find_difference(pages)
    assert found is not None and {rank: mark.sequence for rank, mark in found.items()} == {0: 1024, 1: 1023}
    assert find_difference({0: pages[0], 1: make_page({1025: 1025}, 1802)}) is None
    assert find_difference({0: pages[0], 1: make_page({7: 7}, 1802)}) is None
    newest = pages[0].newest_step_mark
    assert newest is not None and newest.step == 1025
