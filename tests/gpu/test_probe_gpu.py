"""What is watched of a device: waits of the host are seen and told with their lines; losses are read without one."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from instep.launch.probe.backward import Losses
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.host_waits import SAMPLED_STEPS, HostWaits
from instep.launch.probe.late_values import LateValues, can_send
from instep.launch.probe.recorder import Recorder
from instep.records import recording as layout
from instep.records.event import read_events

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(bytearray(layout.PAGE_BYTES), EventLog(tmp_path / "events.jsonl"), 0, 1)


def test_waits_are_told_by_cuda_itself_and_free_copies_are_not(recorder: Recorder, tmp_path: Path) -> None:
    x = torch.ones(64, 64, device="cuda")
    pinned = torch.ones(64, 64).pin_memory()
    waits = HostWaits(recorder)
    for step in range(20):
        y = x @ x
        y.sum().item()
        y[y > 0]
        pinned.to("cuda", non_blocking=True)
        torch.ones(64, 64).to("cuda")
        torch.cuda.synchronize()
        recorder.num_steps = step + 1
        waits.look(time.monotonic())
    assert torch.cuda.get_sync_debug_mode() == 0
    rows = [event["lines"] for event in read_events(tmp_path / "events.jsonl") if event.name == "host-waits"]
    assert len(rows) == sum(step < 20 for step in SAMPLED_STEPS)
    calls = {row["call"]: row["count"] for row in rows[0]}
    assert calls == {"item": 1, "__getitem__": 1, "to": 1, "synchronize": 1}


def test_a_loss_is_read_without_a_wait(recorder: Recorder, tmp_path: Path) -> None:
    losses = Losses()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, value in enumerate((1.0, 2.0, math.nan)):
            recorder.num_steps = recorder.log.step = step
            loss = torch.full((), value, device="cuda")
            assert can_send(loss)
            losses.send(recorder, loss, 0)
    finally:
        torch.cuda.set_sync_debug_mode(0)
    torch.cuda.synchronize()
    losses.look_at_arrived(recorder)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event.step == 2 and event["history"] == [1.0, 2.0]


def test_nothing_is_sent_while_a_graph_is_captured() -> None:
    value = torch.ones((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = can_send(value)
    assert not inside and can_send(value)


def test_half_precision_comes_as_it_is() -> None:
    late = LateValues()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert late.send(torch.full((), 1.5, dtype=dtype, device="cuda"), dtype)
    torch.cuda.synchronize()
    assert [value for value, _ in late.arrived()] == [1.5, 1.5, 1.5]
