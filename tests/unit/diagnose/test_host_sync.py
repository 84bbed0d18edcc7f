"""Waits of the host for a device: seen on sampled steps only, told with the lines, and not a word about those that cost little."""

from __future__ import annotations

import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.diagnose.host_waits import measure_waits
from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.speed.host_sync import check
from instep.diagnose.run_view import RunView
from instep.launch.probe import host_waits
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.host_waits import SAMPLED_STEPS, HostWaits
from instep.launch.probe.recorder import Recorder
from instep.records import recording as layout
from instep.records.event import Event, read_events
from instep.records.recording import Page

TOLD = "called a synchronizing CUDA operation"
UNWATCHED = {name: vars(torch.Tensor).get(name) for owner, name in host_waits._WATCHED if owner is torch.Tensor}


class Device(host_waits.Cuda):
    """Says of every tensor that it lies on it; warns as CUDA does while it is told to."""

    on = False

    def can_tell(self) -> bool:
        return True

    def tell(self, on: bool) -> None:
        self.on = on

    def is_there(self, tensor: torch.Tensor) -> bool:
        return True

    def wait(self) -> None:
        if self.on:
            warnings.warn(TOLD, stacklevel=1)
        time.sleep(0.001)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """`item` and an index wait for it; `copy_` does not."""
    device = Device()
    for name in ("item", "__getitem__"):
        monkeypatch.setattr(torch.Tensor, name, waiting(device, getattr(torch.Tensor, name)), raising=False)
    return device


def waiting(device: Device, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        device.wait()
        return original(*args)

    return call


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(bytearray(layout.PAGE_BYTES), EventLog(tmp_path / "events.jsonl"), 0, 1)


def run_steps(recorder: Recorder, device: Device, step: Callable[[int], None], count: int = 40) -> None:
    waits = HostWaits(recorder, device)
    for number in range(count):
        step(number)
        recorder.num_steps = recorder.log.step = number + 1
        waits.look(time.monotonic())


def notes(tmp_path: Path) -> list[Event]:
    return [event for event in read_events(tmp_path / "events.jsonl") if event.name == "host-waits"]


def test_waits_of_sampled_steps_are_counted_by_line(recorder: Recorder, device: Device, tmp_path: Path) -> None:
    loss = torch.ones(4)

    def step(number: int) -> None:
        loss.sum().item()
        for _ in range(2):
            loss[loss > 0]
        loss.copy_(loss)

    run_steps(recorder, device, step)
    found = notes(tmp_path)
    assert [event.step for event in found] == sorted(one + 1 for one in SAMPLED_STEPS if one < 40)
    rows = {row["call"]: row for row in found[0]["lines"]}
    assert set(rows) == {"item", "__getitem__"}
    assert (rows["item"]["count"], rows["__getitem__"]["count"]) == (1, 2)
    assert rows["item"]["seconds"] >= 0.001 and rows["item"]["through"] == ""
    site = {e["id"]: e for e in read_events(tmp_path / "events.jsonl") if e.name == "site"}[rows["item"]["site"]]
    assert site["file"] == __file__ and "loss.sum().item()" in Path(__file__).read_text().splitlines()[site["line"] - 1]


def test_what_was_replaced_is_put_back(recorder: Recorder, device: Device) -> None:
    before = vars(torch.Tensor)["item"]
    waits = HostWaits(recorder, device)
    recorder.num_steps = min(SAMPLED_STEPS)
    waits.look(0.0)
    assert vars(torch.Tensor)["item"] is not before
    recorder.num_steps += 100
    waits.look(1.0)
    assert vars(torch.Tensor)["item"] is before
    assert {name: vars(torch.Tensor).get(name) for name in UNWATCHED if name not in ("item", "__getitem__")} == {
        name: value for name, value in UNWATCHED.items() if name not in ("item", "__getitem__")
    }
    assert device.on is False


def test_the_scripts_own_filters_and_warnings_are_left_alone(
    recorder: Recorder, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, shown = torch.ones(4), []
    monkeypatch.setattr(warnings, "showwarning", lambda *args: shown.append(str(args[0])))

    def step(number: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss.sum().item()  # would raise if the warning came through
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("of the script", stacklevel=1)

    filters = list(warnings.filters)
    run_steps(recorder, device, step, 14)
    assert shown == ["of the script"] * 14
    assert list(warnings.filters) == filters


def test_without_a_device_nothing_is_ever_wrapped(recorder: Recorder, tmp_path: Path) -> None:
    before = dict(vars(torch.Tensor))
    waits = HostWaits(recorder)
    for number in SAMPLED_STEPS:
        recorder.num_steps = number
        waits.look(0.0)
        assert dict(vars(torch.Tensor)) == before
    assert notes(tmp_path) == []


def test_a_call_by_way_of_a_library_is_told_with_its_name(recorder: Recorder, device: Device, tmp_path: Path) -> None:
    loss = torch.ones(())
    run_steps(recorder, device, lambda number: str(loss) and None, 14)  # printing a tensor reads it
    assert {row["call"] for row in notes(tmp_path)[0]["lines"]} <= {"item", "tolist", "__bool__", "__getitem__"}
    assert all(row["through"] for row in notes(tmp_path)[0]["lines"])


# -- the rule


def page(total: float) -> Page:
    data = bytearray(layout.PAGE_BYTES)
    struct.pack_into("<d", data, layout.SECONDS + 8 * layout.SECONDS_OF.index("total"), total)
    return Page(bytes(data))


def sample(seconds: float, *lines: tuple[int, str, str, int, float]) -> Event:
    keys = ("site", "call", "through", "count", "seconds")
    return Event(
        "host-waits", 1.0, 12, {"seconds": seconds, "data": 0.0, "lines": [dict(zip(keys, row)) for row in lines]}
    )


def run_of(*samples: Event, total: float = 60.0) -> RunView:
    sites = tuple(
        Event("site", 0.0, 0, {"id": number, "file": __file__, "line": number, "name": "main"})
        for number in range(1, 9)
    )
    return RunView(Path(), (RankView(0, page(total), (*sites, *samples)),))


def test_says_how_often_and_how_long_and_what_can_be_gained() -> None:
    rows = [sample(0.010, (3, "item", "", 4, 0.004), (5, "__getitem__", "", 1, 0.001)) for _ in range(6)]
    (finding,) = check(run_of(*rows))
    assert finding.title == "the host waits for the device 5 times in every step, 50% of the time"
    assert finding.certainty == "likely" and finding.where is not None and finding.where.line == 3
    assert finding.cause.startswith(".item() at test_host_sync.py:3 returns only when the device has done all")
    assert finding.fix[0] == (
        "at test_host_sync.py:3: keep the value on the device and read it every 50 steps, or copy it with non_blocking=True and read it a step later"
    )
    assert finding.fix[1].startswith("at test_host_sync.py:5: use torch.where or multiply by the mask")
    assert finding.fix[-1] == "without these waits a step can be up to 2.0 times as fast"
    assert (
        finding.evidence[0].fact
        == ".item() at test_host_sync.py:3: 4 times, 4.00 ms per step (median of 6 sampled steps)"
    )


def test_a_single_wait_is_possible_at_most() -> None:
    (finding,) = check(run_of(*[sample(0.010, (3, "item", "", 1, 0.006)) for _ in range(6)]))
    assert finding.certainty == "possible" and finding.title.startswith(
        "the host waits for the device once in every step"
    )


@pytest.mark.parametrize(
    "rows",
    [
        [sample(0.100, (3, "item", "", 1, 0.095)) for _ in range(6)],  # the device is busy nearly all the time
        [sample(0.010, (3, "item", "", 5, 0.0005)) for _ in range(6)],  # it has long been done when it is asked
        [sample(0.010, *([(3, "item", "", 5, 0.005)] if n % 3 == 0 else [])) for n in range(9)],  # now and then
        [sample(0.010, (3, "item", "", 5, 0.005)) for _ in range(4)],  # too short to judge
    ],
)
def test_says_nothing_where_little_is_lost(rows: list[Event]) -> None:
    assert list(check(run_of(*rows))) == []


def test_a_short_run_is_not_worth_a_word() -> None:
    assert list(check(run_of(*[sample(0.010, (3, "item", "", 5, 0.005)) for _ in range(6)], total=3.0))) == []


def test_copies_of_pageable_memory_and_synchronize_have_their_own_advice() -> None:
    rows = [
        sample(
            0.010, (3, "to", "", 2, 0.003), (5, "synchronize", "", 1, 0.002), (6, "item", "GradScaler.step", 1, 0.001)
        )
    ] * 6
    (finding,) = check(run_of(*rows))
    assert finding.fix[0] == "at test_host_sync.py:3: use pin_memory=True in the loader and .to(..., non_blocking=True)"
    assert finding.fix[1] == "at test_host_sync.py:5: leave synchronize() out, except where time is measured"
    assert finding.fix[2] == "at test_host_sync.py:6: look whether GradScaler.step() is needed in every step"
    waits = measure_waits(run_of(*rows).ranks[0])
    assert waits is not None and waits.lost == pytest.approx(0.4)
