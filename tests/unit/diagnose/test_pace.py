"""Steps that took longer than usual, and steps that cost the same for more samples."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from instep.diagnose.engine import fold
from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.speed import occasional_straggler, small_batch
from instep.diagnose.run_view import RunView
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.pace import Pace
from instep.launch.probe.recorder import Recorder
from instep.records import recording as layout
from instep.records.event import Event, read_events
from instep.records.finding import Finding
from instep.records.recording import Page

MIB = 1 << 20


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(bytearray(layout.PAGE_BYTES), EventLog(tmp_path / "events.jsonl"), 0, 1)


def walk(recorder: Recorder, own: list[float], rows: list[int], delay: float = 0.0) -> None:
    pace = Pace(recorder)
    pace.begin()
    for number, (seconds, samples) in enumerate(zip(own, rows), 1):
        recorder.rows += samples
        recorder.num_steps = recorder.log.step = number
        recorder.seconds[layout.SECONDS_OF.index("data")] += seconds / 2
        recorder.seen_lines.append((float(number), "train.py", 7))
        pace.add(seconds, float(number), lambda: delay)
    pace.note()


def test_a_step_that_took_much_longer_is_noted_with_what_was_seen_in_it(recorder: Recorder, tmp_path: Path) -> None:
    own = [0.010] * 60
    own[40] = 0.110
    walk(recorder, own, [4] * 60)
    (event,) = [one for one in read_events(tmp_path / "events.jsonl") if one.name == "slow-step"]
    assert event.step == 41 and (event["own"], event["usual"]) == (0.11, 0.01)
    assert event["spent"]["data"] == pytest.approx(0.055) and event["seen"] == [["train.py", 7]]


def test_a_step_that_waited_for_a_core_is_no_slow_step(recorder: Recorder, tmp_path: Path) -> None:
    own = [0.010] * 60
    own[40] = 0.110
    walk(recorder, own, [4] * 60, delay=0.09)
    assert not [one for one in read_events(tmp_path / "events.jsonl") if one.name == "slow-step"]


def test_times_are_kept_by_the_number_of_samples(recorder: Recorder, tmp_path: Path) -> None:
    walk(recorder, [0.010, 0.010, 0.010, 0.006] * 10, [8, 8, 8, 3] * 10)
    event = [one for one in read_events(tmp_path / "events.jsonl") if one.name == "pace"][-1]
    assert event["by_rows"] == [[3, 10, 0.006], [8, 30, 0.01]]


# -- the rules


def page(rank: int, steps: int = 400, **seconds: float) -> Page:
    """400 steps of 20 ms, unless told otherwise."""
    data = bytearray(layout.PAGE_BYTES)
    layout.HEADER.pack_into(data, 0, layout.MAGIC, layout.VERSION, 1, rank, 2, 0.0, 0.0)
    struct.pack_into("<Q", data, layout.NUM_STEPS, steps)
    at = layout.STEPS + (steps - 1) % layout.NUM_STEP_SLOTS * layout.STEP.size
    layout.STEP.pack_into(data, at, steps, 0, steps, steps, steps, steps, 0, 0, 0.1, 0.0)
    values = {"total": 0.02 * steps, "steps": float(steps), "usual_own": 0.01} | seconds
    for name, value in values.items():
        struct.pack_into("<d", data, layout.SECONDS + 8 * layout.SECONDS_OF.index(name), value)
    return Page(bytes(data))


def event(name: str, step: int = 0, **facts: Any) -> Event:
    return Event(name, 0.0, step, facts)


def wrap(size: int) -> Event:
    return event("wrap", wrapper=0, site=0, ranks=None, bytes=size, names=["w"], num_parameters=1, digest=1)


def slow(step: int, own: float = 0.2, seen: int = 1) -> Event:
    spent = {"data": 0.0, "forward": 0.001, "backward_cpu": 0.001, "step": 0.0}
    return event("slow-step", step, own=own, usual=0.01, spent=spent, seen=[[__file__, 3]] * seen)


def run(*notes: list[Event], **seconds: float) -> RunView:
    views = [RankView(rank, page(rank, **seconds), (wrap(MIB), *rows)) for rank, rows in enumerate(notes)]
    return RunView(Path(), tuple(views))


def test_names_the_rank_the_steps_and_the_line() -> None:
    (finding,) = occasional_straggler.check(run([], [slow(10 * n) for n in range(1, 21)]))
    assert finding.title == "rank 1 was slow in 20 of 400 steps, and the others waited 3.8 s for it (47% of the time)"
    assert finding.ranks == (1,) and finding.where is not None and finding.where.line == 3
    assert finding.cause.startswith(
        "In these steps rank 1 worked 190 ms longer than its usual 10 ms, up to 190 ms in step 10;"
    )
    assert "most of it in the rest of the loop at test_pace.py:3" in finding.cause
    assert "up to 1.9 times as fast" in finding.fix[0]
    steady = Finding("speed/straggler", "", "", (), (), "likely")
    assert [one.id for one in fold([finding, steady])] == ["speed/occasional-straggler"]


@pytest.mark.parametrize(
    "notes",
    [
        ([slow(10 * n) for n in range(1, 21)], [slow(10 * n) for n in range(1, 21)]),  # all evaluate
        ([], [slow(100 * n, own=2.0) for n in range(1, 4)]),  # three checkpoints
        ([], [slow(n, own=0.04) for n in range(1, 30)]),  # little is lost
        ([], [slow(n) for n in range(1, 300)]),  # that is what it always needs
    ],
)
def test_what_all_do_and_what_costs_little_is_no_finding(notes: tuple[list[Event], ...]) -> None:
    assert list(occasional_straggler.check(run(*notes))) == []


def pace(*rows: tuple[int, int, float]) -> list[Event]:
    loader = event("loader", loader=1, site=0, batch_size=2, workers=0)
    return [loader, event("pace", by_rows=[list(row) for row in rows])]


def test_a_step_that_costs_the_same_for_half_the_samples_has_too_few() -> None:
    notes = pace((1, 9, 0.0098), (2, 300, 0.0100))
    (finding,) = small_batch.check(run(notes, notes, backward=1.6, backward_cpu=0.8))
    assert finding.title == "96% of a step is fixed cost, with 2 samples per rank and step"
    assert "2 samples take 10.00 ms of work, 1 take 9.80 ms" in finding.cause
    assert "2.0 ms pass in averaging 1 MiB of gradients" in finding.cause
    assert "twice as many samples per step give about 1.9 times as many per second" in finding.fix[0]


def test_small_gradients_that_take_most_of_a_step_are_latency() -> None:
    notes = pace((2, 300, 0.0100))
    (finding,) = small_batch.check(run(notes, notes, backward=7.0, backward_cpu=0.8))
    assert finding.title.startswith("78% of a step is fixed cost, with 2 samples")


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        (((1, 9, 0.0052), (2, 300, 0.0100)), {}),  # half the samples take half the time
        (((16, 9, 0.0099), (32, 300, 0.0100)), {}),  # not so few
        (((2, 300, 0.0100),), {}),  # nothing to compare with
        (((1, 9, 0.0098), (2, 300, 0.0100)), {"total": 4.0}),  # a short run
        (((1, 3, 0.0098), (2, 300, 0.0100)), {}),  # seen three times only
        (((1, 9, 0.0098), (2, 300, 0.0100)), {"data": 5.0}),  # it waits for batches
        (((2, 300, 0.0100),), {"backward": 7.0, "delayed": 3.0}),  # the machine is busy with other things
    ],
)
def test_says_nothing_where_samples_count_or_little_is_known(rows: Any, seconds: dict[str, float]) -> None:
    notes = pace(*rows)
    assert list(small_batch.check(run(notes, notes, **seconds))) == []


def test_on_a_device_a_host_that_never_waits_only_launches() -> None:
    lines = [{"site": 0, "call": "item", "through": "", "count": 1, "seconds": 0.0001}]
    samples = [event("host-waits", seconds=0.01, data=0.0005, lines=lines)] * 6
    joined = event("joined", backend="nccl", rank=0, world_size=2, site=0)
    notes = [joined, *pace((16, 300, 0.01)), *samples]
    (finding,) = small_batch.check(run(notes, notes))
    assert (
        finding.certainty == "possible"
        and finding.title == "94% of a step is fixed cost, with 16 samples per rank and step"
    )
    assert "the device had done all it was given when the host asked for it" in finding.cause
