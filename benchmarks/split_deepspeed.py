"""DeepSpeed's ZeRO on the CPU, through gloo.

When its communication is set up it compiles an operator (`deepspeed_shm_comm`, a minute or more, once); the other ranks
wait for a lock file, which stays behind when that start is killed: then remove it from ~/.cache/torch_extensions.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from tasks import Task
from variants import Losses, ranked_loader


def is_installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def with_deepspeed(task: Task, rank: int, size: int, stage: int) -> Losses:
    """As its guide has it, with PyTorch's fused optimizer, since its own has to be compiled."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(size), "LOCAL_RANK": str(rank)}
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = task.model()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.global_batch // size,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    loader = ranked_loader(task, rank, size)
    while True:
        for inputs, targets in loader:
            loss = task.loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            yield loss.detach()
