"""What `exact=True` needs around the reducer: sizes that form one tree, deterministic kernels, and facts to compare."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch

from instep.errors import UsageError
from instep.train.slots import Slots
from instep.train.world import World


def check_exact_sizes(slots: Slots) -> None:
    """Raises UsageError, naming the numbers of ranks that fit: each rank's slots have to be a subtree."""
    if slots.world_size == 1 or _fits(slots.count, slots.world_size):
        return
    fitting = [str(n) for n in range(1, slots.count + 1) if n == 1 or _fits(slots.count, n)]
    raise UsageError(
        f"exact=True cannot run on {slots.world_size} ranks: a step has {slots.count} micro-batches, and each rank needs the "
        f"same power of two of them. These numbers of ranks fit: {', '.join(fitting)}."
    )


def _fits(count: int, ranks: int) -> bool:
    share, rest = divmod(count, ranks)
    return not rest and share & (share - 1) == 0


def be_deterministic(threads: int | None) -> Callable[[], None]:
    """Kernels that give the same bits for the same input; returns what undoes it.

    One thread per rank on the CPU unless `threads` says otherwise, since sums are cut by the number of threads.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
    )
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(threads or 1)

    def undo() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
        torch.set_num_threads(before[3])
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)

    return undo


def read_facts(world: World) -> dict[str, Any]:
    """What the bits depend on beside the script: kept in checkpoints."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else _cpu_name()
    return {
        "device": world.device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "kernels": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def describe_differences(then: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str | None:
    """Why the run will not continue with the bits it would have had, or None when it will."""
    if then is None:
        return "the checkpoint was made without exact=True"
    found = [f"{key} was {then.get(key)!r}, is {value!r}" for key, value in now.items() if then.get(key) != value]
    return "; ".join(found) or None
