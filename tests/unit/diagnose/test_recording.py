"""The page of a rank, written as the probe writes it and read as the launcher does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from instep.launch.probe.event_log import MOST_OF_A_KIND, EventLog
from instep.launch.probe.fingerprints import is_early
from instep.launch.probe.first_bad import find_first_bad
from instep.launch.probe.page import open_page
from instep.launch.probe.recorder import Recorder, contained, make_current
from instep.launch.probe.tensor_prints import print_tensor, tensors_in
from instep.launch.probe.tokens import find_mean_loss
from instep.launch.sights import waits_in
from instep.records import recording as layout
from instep.records.event import read_events
from instep.records.recording import KIND_NUMBER, OPERATION_NUMBER, read_page


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(open_page(tmp_path / "page.bin", 1, 4), EventLog(tmp_path / "events.jsonl"), 1, 4)


def test_marks_come_back_as_they_were_written(recorder: Recorder, tmp_path: Path) -> None:
    when = recorder.mark(KIND_NUMBER["enter-collective"], OPERATION_NUMBER["barrier"], layout.ASYNC, 5, 7, 9)
    page = read_page(tmp_path / "page.bin")
    assert page is not None and (page.rank, page.world_size, page.num_marks) == (1, 4, 1)
    mark = page.last_mark()
    assert mark is not None
    assert (mark.kind, mark.operation, mark.flags, mark.site, mark.count, mark.elements, mark.when) == (
        ("enter-collective", "barrier", layout.ASYNC, 5, 7, 9, when)
    )
    assert waits_in(page, when) == ("barrier", 0)


def test_an_old_reading_of_what_is_pending_does_not_count(recorder: Recorder, tmp_path: Path) -> None:
    when = recorder.mark(KIND_NUMBER["enter-backward"])
    layout.I64.pack_into(recorder.page, layout.LAST_ENQUEUED, 3)
    layout.I64.pack_into(recorder.page, layout.LAST_COMPLETED, 2)
    layout.F64.pack_into(recorder.page, layout.BEAT, when)
    page = read_page(tmp_path / "page.bin")
    assert page is not None
    assert waits_in(page, when + 1) == ("backward", 0)
    assert waits_in(page, when + 5) is None


def test_the_ring_keeps_the_newest_marks(recorder: Recorder, tmp_path: Path) -> None:
    for number in range(layout.NUM_MARK_SLOTS + 10):
        recorder.mark(KIND_NUMBER["leave-data"], count=number)
    page = read_page(tmp_path / "page.bin")
    assert page is not None
    marks = page.marks()
    assert len(marks) == layout.NUM_MARK_SLOTS
    assert marks[0].count == 10 and marks[-1].count == layout.NUM_MARK_SLOTS + 9


def test_steps_are_found_by_their_number_until_they_are_overwritten(recorder: Recorder, tmp_path: Path) -> None:
    for _ in range(layout.NUM_STEP_SLOTS + 3):
        recorder.end_step(2, 0.1)
    page = read_page(tmp_path / "page.bin")
    assert page is not None and page.num_steps == layout.NUM_STEP_SLOTS + 3
    newest = page.step_mark(page.num_steps)
    assert newest is not None and newest.step == page.num_steps and newest.rate == 0.1
    assert page.step_mark(3) is None and page.step_mark(page.num_steps + 1) is None


def test_a_page_of_another_version_or_a_short_one_is_none(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"istp")
    (tmp_path / "other").write_bytes(b"xxxx" + bytes(layout.PAGE_BYTES))
    assert read_page(tmp_path / "short") is None and read_page(tmp_path / "other") is None
    assert read_page(tmp_path / "missing") is None


def test_a_disk_that_cannot_be_written_costs_the_notes_only(tmp_path: Path) -> None:
    page = open_page(tmp_path / "no" / "page.bin", 0, 1)
    log = EventLog(tmp_path / "no" / "events.jsonl")
    recorder = Recorder(page, log, 0, 1)
    assert recorder.mark(KIND_NUMBER["ended"]) > 0
    assert not log.note("start")


def test_a_note_that_repeats_is_cut_off(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    written = [log.note("tokens", name=number) for number in range(MOST_OF_A_KIND + 5)]
    assert written.count(True) == MOST_OF_A_KIND
    events = read_events(tmp_path / "events.jsonl")
    assert len(events) == MOST_OF_A_KIND and events[3]["name"] == 3


def test_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).note("start", pid=1)
    path.write_bytes(path.read_bytes() + b'{"event": "lap", "t": 1.')
    assert [event.name for event in read_events(path)] == ["start"]


def test_a_failure_in_watching_is_noted_and_goes_no_further(recorder: Recorder, tmp_path: Path) -> None:
    make_current(recorder)

    @contained
    def breaks() -> int:
        raise LookupError("no such thing")

    assert breaks() is None
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event.name == "probe-failed" and "LookupError: no such thing" in event["error"]


def test_prints_tell_batches_apart() -> None:
    one = torch.arange(1000.0)
    assert print_tensor(one) == print_tensor(one.clone())
    assert print_tensor(one) != print_tensor(one + 1)
    assert print_tensor(torch.zeros(0)) == 0
    assert print_tensor(torch.ones(3, 4).t()) and print_tensor(one.bfloat16()) and print_tensor(one > 3)


def test_tensors_are_found_in_nested_batches() -> None:
    batch = {"x": torch.ones(1), "meta": [torch.zeros(2), {"y": torch.ones(3)}], "id": "a"}
    assert [place for place, _ in tensors_in(batch)] == ["['x']", "['meta'][0]", "['meta'][1]['y']"]


def test_steps_to_look_at_are_dense_at_first() -> None:
    assert [step for step in range(4, 40) if is_early(step)] == [4, 6, 8, 12, 16, 24, 32]


def test_the_operation_that_made_an_infinity_is_named() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    found = find_first_bad(torch.log(x * 1.0).sum())
    assert found is not None and found.name == "Log" and found.certain
    assert found.why == "logarithm of 0 (1 of 2 elements)"
    assert find_first_bad(torch.log(x + 1.0).sum()) is None


def test_the_mean_over_targets_is_found_behind_a_scaled_loss() -> None:
    scores = torch.randn(4, 5, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 1, -100, 2]))
    node = find_mean_loss((loss * 3 / 2).grad_fn)
    assert node is not None and float(node._saved_total_weight) == 3.0 and node._saved_target.numel() == 4
    summed = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 1, 3, 2]), reduction="sum")
    assert find_mean_loss(summed.grad_fn) is None
