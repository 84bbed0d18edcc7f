"""Micro-batches keep their structure on the way to the device, and are begun in order, one ahead."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from data_sources import Augmented, Split, as_lists, loader_of, steps_of, tensors
from instep.train.data.epoch import Epoch
from instep.train.data.to_device import DeviceCopy, map_tensors

Pair = namedtuple("Pair", ["first", "second"])
META = torch.device("meta")


@dataclass(frozen=True)
class Record:
    image: torch.Tensor
    name: str


class Encoding(dict):
    """As batches of tokenizers are: a mapping that moves itself."""

    device = "cpu"

    def to(self, device: Any, **options: Any) -> Encoding:
        moved = Encoding({key: value.to(device) for key, value in self.items()})
        moved.device = str(device)
        return moved


def test_every_structure_is_kept() -> None:
    tensor = torch.zeros(2)
    data = {
        "list": [tensor, 1, "text", None],
        "tuple": (tensor, b"bytes"),
        "pair": Pair(tensor, 2.5),
        "record": Record(tensor, "a"),
        "ordered": OrderedDict(b=tensor, a=tensor),
        "encoding": Encoding(ids=tensor),
        "other": {1, 2},
    }
    moved = DeviceCopy(META).move(data)
    assert type(moved) is dict
    assert moved["list"][0].device == META
    assert moved["list"][1:] == [1, "text", None]
    assert type(moved["tuple"]) is tuple
    assert moved["tuple"][0].device == META
    assert type(moved["pair"]) is Pair
    assert (moved["pair"].first.device, moved["pair"].second) == (META, 2.5)
    assert type(moved["record"]) is Record
    assert (moved["record"].image.device, moved["record"].name) == (META, "a")
    assert list(moved["ordered"]) == ["b", "a"]
    assert type(moved["ordered"]) is OrderedDict
    assert moved["encoding"].device == "meta"
    assert moved["other"] == {1, 2}
    assert data["list"][0].device.type == "cpu"
    assert data["record"].image.device.type == "cpu"


def test_on_the_host_nothing_is_copied() -> None:
    data = [torch.zeros(2)]
    assert DeviceCopy(torch.device("cpu")).move(data) is data


def test_a_loader_for_another_device_gives_its_tensors() -> None:
    batch = next(iter(loader_of(tensors(), device=META).start_epoch(0).next_step()))
    assert {part.device for part in batch.data} == {META}


def test_map_tensors_leaves_frozen_records_of_others_alone() -> None:
    record = Record(torch.zeros(1), "x")
    changed = map_tensors(record, lambda tensor: tensor + 1)
    assert changed.image.item() == 1
    assert record.image.item() == 0


class Ahead(DeviceCopy):
    """A device with a copying stream of its own, as far as the order of things goes."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_ahead = True
        self.log: list[str] = []

    def begin(self, data: Any) -> tuple[Any, Any]:
        self.log.append("begin")
        return data, "event"

    def finish(self, moved: Any, event: Any) -> Any:
        assert event == "event"
        self.log.append("finish")
        return moved


@pytest.mark.parametrize("make", [tensors, Augmented, Split])
@pytest.mark.parametrize("world_size", [1, 8])
def test_copies_ahead_change_nothing(make: Any, world_size: int) -> None:
    one = steps_of(make)
    got = {}
    for rank in range(world_size):
        epoch = loader_of(make(), rank, world_size).start_epoch(1)
        ahead = Epoch(epoch._feed, 0, Ahead())
        step = 0
        while ahead.has_next():
            for batch in ahead.next_step():
                got[step, batch.slot] = batch.num_samples, as_lists(batch.data)
            step += 1
    assert dict(sorted(got.items())) == one


def test_the_next_copy_begins_before_this_one_is_handed_out() -> None:
    copier = Ahead()
    epoch = Epoch(loader_of(tensors(), rank=0, world_size=4).start_epoch(0)._feed, 0, copier)
    batches = iter(epoch.next_step())
    next(batches)
    assert copier.log == ["begin", "begin", "finish"]
    next(batches)
    assert copier.log[3:] == ["begin", "finish"]  # the first one of the next step


def test_a_copy_ahead_of_a_step_left_early_is_not_handed_out() -> None:
    one = steps_of(Augmented)
    epoch = Epoch(loader_of(Augmented()).start_epoch(1)._feed, 0, Ahead())
    next(iter(epoch.next_step()))
    got = [(batch.num_samples, as_lists(batch.data)) for batch in epoch.next_step()]
    assert got == [one[1, slot] for slot in range(8)]


def test_streams_are_not_read_ahead_of_a_step() -> None:
    made = []

    class Counted(Split):
        def __iter__(self) -> Any:
            for sample in super().__iter__():
                made.append(sample[0])
                yield sample

    epoch = Epoch(loader_of(Counted()).start_epoch(0)._feed, 0, Ahead())
    list(epoch.next_step())
    assert len(made) == 16
