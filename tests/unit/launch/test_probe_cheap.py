"""What the probe leaves out to be cheap does not show in what it tells."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.launch.probe import flight, gradients, plain_models, recorder, sites
from instep.launch.probe.data import Loaders
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.exits import note_raised
from instep.launch.probe.fingerprints import Fingerprints, is_early
from instep.launch.probe.page import open_page
from instep.launch.probe.recorder import Recorder
from instep.launch.probe.sites import Sites
from instep.launch.probe.watcher import Watcher
from instep.records.event import read_events
from instep.records.recording import KIND_NUMBER, read_page


@pytest.fixture
def rank(tmp_path: Path) -> Recorder:
    return Recorder(open_page(tmp_path / "page.bin", 0, 2), EventLog(tmp_path / "events.jsonl"), 0, 2)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for the default group: how many operations it was given, and how often that was asked."""
    group = SimpleNamespace(operations=0, asked=0)

    def count() -> int:
        group.asked += 1
        return int(group.operations)

    monkeypatch.setattr(recorder, "count_operations", count)
    return group


def leave_marks(rank: Recorder, group: SimpleNamespace, steps: int, in_forward: int = 0) -> None:
    """As a script does that averages gradients in backward, and perhaps buffers in forward."""
    for _ in range(steps):
        for kind in ("enter-data", "leave-data", "enter-forward"):
            rank.mark(KIND_NUMBER[kind])
        group.operations += in_forward
        rank.mark(KIND_NUMBER["leave-forward"])
        rank.mark(KIND_NUMBER["enter-backward"])
        group.operations += 1
        rank.read_sequence(KIND_NUMBER["leave-backward"])
        rank.mark(KIND_NUMBER["leave-backward"])
        rank.mark(KIND_NUMBER["enter-step"])
        rank.end_step(0, 0.1)
        rank.mark(KIND_NUMBER["leave-step"])


def sequences(path: Path, newest: int) -> list[tuple[str, int]]:
    page = read_page(path)
    assert page is not None
    return [(mark.kind, mark.sequence) for mark in page.marks(newest)]


@pytest.mark.parametrize("in_forward", [0, 1])
def test_the_count_of_collectives_is_right_in_every_mark_though_it_is_seldom_read(
    rank: Recorder, counted: SimpleNamespace, tmp_path: Path, in_forward: int
) -> None:
    leave_marks(rank, counted, 20, in_forward)
    before, asked = counted.operations, counted.asked
    leave_marks(rank, counted, 1, in_forward)
    assert counted.asked - asked == 2 + in_forward
    middle, after = before + in_forward, before + in_forward + 1
    told = dict(sequences(tmp_path / "page.bin", 8))
    assert [told[kind] for kind in ("enter-data", "leave-data", "enter-forward")] == [before] * 3
    assert [told[kind] for kind in ("leave-forward", "enter-backward")] == [middle] * 2
    assert [told[kind] for kind in ("leave-backward", "enter-step", "leave-step")] == [after] * 3


def test_collectives_from_where_none_came_before_make_all_marks_count_again(
    rank: Recorder, counted: SimpleNamespace, tmp_path: Path
) -> None:
    leave_marks(rank, counted, 20)
    counted.operations += 5  # neither in a backward nor in a call that is marked
    leave_marks(rank, counted, 1)
    asked = counted.asked
    leave_marks(rank, counted, 1, in_forward=1)
    assert counted.asked - asked == 9
    assert sequences(tmp_path / "page.bin", 8)[3] == ("leave-forward", counted.operations - 1)


def test_collectives_that_python_calls_are_counted_where_they_begin_and_end(
    rank: Recorder, counted: SimpleNamespace, tmp_path: Path
) -> None:
    leave_marks(rank, counted, 20)
    before = counted.operations
    rank.mark(KIND_NUMBER["enter-collective"])
    counted.operations += 1
    rank.mark(KIND_NUMBER["leave-collective"])
    assert sequences(tmp_path / "page.bin", 2) == [("enter-collective", before), ("leave-collective", before + 1)]


def test_each_line_has_one_number_however_often_and_from_where_it_calls(tmp_path: Path) -> None:
    found = Sites(EventLog(tmp_path / "events.jsonl"))
    for _ in range(3):
        assert (found.here(0), found.here(0)) == (1, 1)
    assert found.here(0) == 2
    one, two = read_events(tmp_path / "events.jsonl")
    assert (one["id"], two["id"], two["line"]) == (1, 2, one["line"] + 1)
    assert one["file"] == __file__ and one["name"].startswith("test_each_line")


def test_lines_keep_their_numbers_when_a_script_makes_new_code_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "_MOST_CODES", 4)
    found = Sites(EventLog(tmp_path / "events.jsonl"))
    source = "def call():\n    return found.here(0)\n"
    numbers = set()
    for _ in range(20):
        names: dict[str, Any] = {"found": found}
        exec(compile(source, __file__, "exec"), names)
        numbers.add(names["call"]())
    assert numbers == {1}
    assert len(found._codes) <= 4


def test_of_short_steps_some_gradients_are_looked_at_and_of_long_ones_all(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = [0.0]
    monkeypatch.setattr(gradients, "_LOOKED", looked)

    def count(seconds: float) -> int:
        turns = 0
        for step in range(800):
            if gradients.is_gradient_turn(step, step * seconds):
                looked[0] = step * seconds
                turns += 1
        return turns

    assert count(1.0) == 800
    assert 200 < count(0.005) <= 64 + 800 // 3


def make_fast(rank: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the first steps, while the watching thread lives."""
    monkeypatch.setattr(recorder, "_SHORT_SECONDS", 60.0)
    rank.is_watched = True
    for _ in range(70):
        rank.end_step(0, 0.1)


def test_marks_of_short_steps_wait_for_the_one_that_may_be_the_last(
    rank: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fast(rank, monkeypatch)
    kinds = ("enter-data", "leave-data", "enter-forward", "leave-forward")
    for kind in kinds:
        rank.mark(KIND_NUMBER[kind])
    assert sequences(tmp_path / "page.bin", 9) == []
    rank.mark(KIND_NUMBER["enter-backward"])
    assert [kind for kind, _ in sequences(tmp_path / "page.bin", 9)] == [*kinds, "enter-backward"]
    rank.mark(KIND_NUMBER["leave-backward"])
    assert sequences(tmp_path / "page.bin", 1) == [("leave-backward", 0)]
    page = read_page(tmp_path / "page.bin")
    assert page is not None and page.num_steps == 70 and page.step_mark(70) is not None


def test_marks_that_wait_are_written_by_the_watching_thread_and_before_an_error_is_noted(
    rank: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atexit.register", lambda function: function)
    make_fast(rank, monkeypatch)
    rank.mark(KIND_NUMBER["enter-forward"])
    Watcher(rank, tmp_path / "snapshot.json")._look()
    assert [kind for kind, _ in sequences(tmp_path / "page.bin", 9)] == ["enter-forward"]
    rank.mark(KIND_NUMBER["leave-forward"])
    note_raised(rank, "forward", 0, ValueError("of the script"))
    assert sequences(tmp_path / "page.bin", 1) == [("leave-forward", 0)]


def test_marks_of_long_steps_and_of_a_rank_without_a_watching_thread_are_written_at_once(
    rank: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fast(rank, monkeypatch)
    monkeypatch.setattr(recorder, "_SHORT_SECONDS", 0.0)
    rank.end_step(0, 0.1)
    rank.mark(KIND_NUMBER["enter-data"])
    assert sequences(tmp_path / "page.bin", 1) == [("enter-data", 0)]
    monkeypatch.setattr(recorder, "_SHORT_SECONDS", 60.0)
    rank.is_watched = False
    rank.end_step(0, 0.1)
    rank.mark(KIND_NUMBER["leave-data"])
    assert sequences(tmp_path / "page.bin", 1) == [("leave-data", 0)]


def test_a_loop_without_backwards_does_not_fill_the_memory(
    rank: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fast(rank, monkeypatch)
    for _ in range(1000):
        rank.mark(KIND_NUMBER["enter-data"])
    page = read_page(tmp_path / "page.bin")
    assert page is not None and 900 < page.num_marks <= 1000 and len(rank._marks) < 100


@pytest.mark.parametrize("followed", [41, 4096])
def test_an_optimizer_is_looked_at_before_the_steps_of_which_it_is_printed(followed: int) -> None:
    expected = [*range(1, 42), *(step for step in range(42, followed + 1) if plain_models.is_printed(step))]
    step, turns = 0, []
    while (step := plain_models.next_turn(step)) <= followed:
        turns.append(step)
    assert turns == expected


def test_parameters_are_looked_at_after_the_same_steps_as_if_each_step_were_asked(rank: Recorder) -> None:
    looks = Fingerprints.__new__(Fingerprints)
    looks._recorder, looks._interval, looks._last, looks.next_step = rank, 512, 0.0, 4
    seen: list[int] = []
    looks._note = lambda name: seen.append(step)  # type: ignore[method-assign]
    for step in range(1, 3000):
        if step >= looks.next_step:
            looks.look(step)
    dense = [step for step in range(4, 1025) if is_early(step)]
    assert seen[: len(dense)] == dense
    assert seen[len(dense) :] and all(step % 512 == 0 for step in seen[len(dense) :])


def test_what_is_pending_is_read_when_a_rank_stands_still(
    rank: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    monkeypatch.setattr(flight, "read_status", lambda: reads.append(1) or (7, 6))
    monkeypatch.setattr("atexit.register", lambda function: function)
    watcher = Watcher(rank, tmp_path / "snapshot.json")
    pending = []
    for marks in (1, 0, 0, 3):
        for _ in range(marks):
            rank.mark(KIND_NUMBER["enter-backward"])
        watcher._look()
        page = read_page(tmp_path / "page.bin")
        assert page is not None and page.beat > 0
        pending.append(page.pending)
    assert pending == [None, True, True, False] and len(reads) == 2  # once it goes on, nothing is known to be pending


def test_the_flow_of_an_iterator_goes_with_it() -> None:
    class Iterator:
        pass

    loaders, one, two = Loaders(), Iterator(), Iterator()
    flow = loaders.flow_of(one)
    assert loaders.flow_of(two) is not flow and loaders.flow_of(one) is flow
    gone = weakref.ref(one)
    del one
    assert gone() is None and len(loaders.flows) == 1
