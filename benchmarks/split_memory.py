"""How much memory a split takes on each rank: what a process had at most, and what arithmetic says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from split_variants import SEQUENCES, gpt_50m
from tasks import Block

# What glibc gets from the system at once and gives back at once, so that memory that is free does not count as used.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass
class Peak:
    """Bytes above what the process had before its model. shared: this rank's part of what ranks have mapped together."""

    private: int
    shared: int


def measure_peak(start: Callable[..., Iterator[Any]], rank: int, size: int, steps: int = 2) -> Peak:
    """The most that a step needs, once training has settled. Every rank must call it, in a process with ENVIRONMENT."""
    warm_up()
    before = status("VmRSS")
    running = iter(start(gpt_50m(size), rank, size))
    for _ in range(2):
        next(running)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel starts its record of the highest anew
    for _ in range(steps):
        next(running)
    peak = Peak(status("VmHWM") - status("RssShmem") - before, shared_bytes() // size)
    running.close()  # type: ignore[attr-defined]  # here, and not as the interpreter ends
    return peak


def warm_up() -> None:
    """Runs a little of everything, so that the code of torch and of instep is in memory before anything is counted."""
    import instep

    assert instep.Run  # imports training, on first use
    model = torch.nn.Sequential(*(Block(8, 2) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.zeros(1, 4, 8)).sum().backward()
        optimizer.step()


def status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def shared_bytes() -> int:
    """Of all regions that this process has mapped together with others, the copies of all ranks."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) .*instep-bucket", line)
        if found:
            total += int(found.group(2), 16) - int(found.group(1), 16)
    return total


@dataclass
class Parts:
    """What `zero3` has to hold on each rank, in bytes, by arithmetic on the model. Nothing of it is fitted.

    shards: parameters and two moments; gathered: the rest of the model, and of blocks in backward the one that runs, the
    next, which is being gathered, its gradients, and the gradients before it, which are being sent (`sent` of these four
    are private memory); growing: what gradient shards and activations come to at the worst moment of backward.
    """

    shards: float
    gathered: float
    growing: float

    @property
    def total(self) -> float:
        return self.shards + self.gathered + self.growing


def arithmetic(size: int, activations: float, sent: int = 4) -> Parts:
    """activations: of all blocks, for one micro-batch (`activation_bytes`)."""
    model = gpt_50m(size).model()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    blocks = list(model.blocks)  # type: ignore[arg-type]
    block = sum(p.numel() * p.element_size() for p in blocks[0].parameters())
    each = activations / len(blocks)
    moments = [(len(blocks) - left) * block / size + left * each for left in range(2, len(blocks) + 1)]
    return Parts(3 * whole / size, whole - len(blocks) * block + sent * block, max(moments))


def activation_bytes(size: int) -> int:
    """What autograd keeps of one micro-batch beside parameters, each piece of memory once."""
    task = gpt_50m(size)
    model = task.model()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    samples = [task.data[index] for index in range(SEQUENCES)]
    inputs, targets = (torch.stack(column) for column in zip(*samples))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        task.loss(model(inputs), targets)
    return sum(kept.values())
