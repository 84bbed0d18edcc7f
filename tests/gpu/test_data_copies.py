"""Micro-batches on a GPU: the copies that run beside the computation bring the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from data_sources import Augmented, Split, loader_of, steps_of, tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("make", [tensors, Augmented, Split])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_gpu_gets_what_the_cpu_gets(make: Any, num_workers: int) -> None:
    one = steps_of(make)
    assert steps_of(make, 2, device=GPU, num_workers=num_workers) == one


def test_data_are_on_the_device() -> None:
    batch = next(iter(loader_of(tensors(), device=GPU).start_epoch(0).next_step()))
    assert {part.device for part in batch.data} == {GPU}


def test_a_dataset_on_the_device_stays_there() -> None:
    dataset = TensorDataset(*(tensor.to(GPU) for tensor in tensors().tensors))
    assert steps_of(lambda: dataset, device=GPU, shuffle=True) == steps_of(tensors, shuffle=True)


def test_a_busy_device_gets_whole_copies() -> None:
    """Large copies while the computing stream is behind: what is handed out has to have arrived."""
    images = torch.arange(64.0).repeat_interleave(1 << 20).reshape(64, 1 << 20)
    epoch = loader_of(TensorDataset(images), device=GPU, micro_batch=8, global_batch=32).start_epoch(0)
    weights = torch.randn(4096, 4096, device=GPU)
    sums = []
    while epoch.has_next():
        for batch in epoch.next_step():
            weights = torch.tanh(weights @ weights)
            sums.append(batch.data[0].mean(dim=1))
    assert torch.cat(sums).tolist() == [float(index) for index in range(64)]
