"""Losses and gradients of a device, read a step later: the same path with memory of the host and events of ours."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.nonfinite import gradients as gradients_rule
from instep.diagnose.rules.nonfinite import loss as loss_rule
from instep.diagnose.run_view import RunView
from instep.launch.probe import gradients, nonfinite
from instep.launch.probe.backward import Losses
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.late_values import MOST, LateValues
from instep.launch.probe.recorder import Recorder
from instep.records import recording as layout
from instep.records.event import read_events


class Event:
    """Of a device that does its work when it is told to."""

    done = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded and Event.done


def late_values() -> LateValues:
    Event.done = False
    return LateValues(lambda dtype: torch.zeros(MOST, dtype=dtype), Event)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(bytearray(layout.PAGE_BYTES), EventLog(tmp_path / "events.jsonl"), 0, 1)


def view(tmp_path: Path) -> RunView:
    return RunView(tmp_path, (RankView(0, None, tuple(read_events(tmp_path / "events.jsonl"))),))


def test_nothing_is_looked_at_before_it_has_come() -> None:
    late = late_values()
    assert late.send(torch.tensor(1.5), "first") and late.send(torch.tensor([2.5], dtype=torch.float64), "second")
    assert list(late.arrived()) == []
    Event.done = True
    assert list(late.arrived()) == [(1.5, "first"), (2.5, "second")]
    assert list(late.arrived()) == []


def test_a_number_on_its_way_is_not_overwritten_by_later_ones() -> None:
    late = late_values()
    sent = [late.send(torch.tensor(float(number)), number) for number in range(MOST + 3)]
    assert sent == [True] * MOST + [False] * 3
    Event.done = True
    assert [value for value, _ in late.arrived()] == list(map(float, range(MOST)))


def train(recorder: Recorder, losses: Losses, values: list[torch.Tensor]) -> None:
    for number, x in enumerate(values):
        recorder.num_steps = recorder.log.step = number
        nonfinite.remember_batch([x], list(range(10 * number, 10 * number + len(x))))
        losses.look_at_arrived(recorder)
        losses.send(recorder, x.mean(), 0)
        Event.done = number != 2  # the host runs ahead for a while


def test_a_bad_sample_is_named_with_the_step_whose_loss_it_spoiled(recorder: Recorder, tmp_path: Path) -> None:
    losses = Losses()
    losses.late = late_values()
    batches = [torch.ones(4, 2) * step for step in range(1, 7)]
    batches[3][2, 1] = math.nan
    train(recorder, losses, batches)
    losses.look_at_arrived(recorder)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event.step == 3 and event["value"] == "nan" and event["history"] == [1.0, 2.0, 3.0]
    (finding,) = loss_rule.check(view(tmp_path))
    assert finding.title == "the loss became nan on rank 0 in step 4" and finding.certainty == "certain"
    assert "samples [2] of the batch, [32] of the data set" in finding.cause


def test_without_a_bad_sample_only_what_is_known_is_said(recorder: Recorder, tmp_path: Path) -> None:
    losses = Losses()
    losses.late = late_values()
    losses.late.send(torch.tensor(math.inf), nonfinite.what_is_sent(recorder, torch.tensor(math.inf), 0, False)[1])
    Event.done = True
    losses.look_at_arrived(recorder)
    (finding,) = loss_rule.check(view(tmp_path))
    assert finding.certainty == "possible"
    assert finding.cause.startswith("The loss lies on a device and was read when its step was over")


def test_of_a_scaled_loss_the_one_before_scaling_is_read(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.tensor(3.0)
    scaled = raw * math.inf
    monkeypatch.setitem(nonfinite.SCALED, "raw", raw)
    monkeypatch.setitem(nonfinite.SCALED, "scaled", scaled)
    assert nonfinite.what_is_sent(recorder, scaled, 0, False)[0] is raw


def test_a_gradient_that_was_bad_is_told_with_its_own_step(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = late_values()
    monkeypatch.setattr(gradients, "_LATE", [late])
    monkeypatch.setattr(gradients, "_noted", set())
    monkeypatch.setattr(gradients, "can_send", lambda value: True)
    gradients._NEWEST.clear()
    wrapped: Any = Wrapped()
    for step, size in enumerate((1.0, 2.0, math.nan, 4.0)):
        recorder.num_steps = recorder.log.step = step
        gradients.look_later(recorder, wrapped, torch.full((8, 4), -size), 0, 0)
    Event.done = True
    recorder.num_steps = recorder.log.step = 9
    gradients.judge_arrived(recorder, late)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event.step == 2 and event["history"] == [[1, 1.0], [2, 2.0]] and event["bad"] == ["weight"]
    (finding,) = gradients_rule.check(view(tmp_path))
    assert finding.title.startswith("gradients became NaN or infinite in step 3")
    assert "no gradient is finite" not in finding.evidence[0].fact
    gradients._NEWEST.clear()


class Wrapped:
    """A wrapped model, as far as it matters here."""

    number = 0

    def __init__(self) -> None:
        self.inner = nn.Linear(4, 8)
        self.parameters = list(self.inner.parameters())

    def model(self) -> Any:
        return self

    @property
    def module(self) -> nn.Module:
        return self.inner


def test_the_batch_that_is_held_is_let_go_when_its_loss_has_come(recorder: Recorder) -> None:
    losses = Losses()
    losses.late = late_values()
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    sent = []
    for (x,) in loader:
        nonfinite.remember_batch([x], [])
        value, what = nonfinite.what_is_sent(recorder, x.sum(), 0, keeps_batch=len(losses.late) < 2)
        losses.late.send(value, what)
        sent.append(bool(what.batch))
    assert sent == [True, True, False, False]  # a host that runs ahead holds two batches at most
