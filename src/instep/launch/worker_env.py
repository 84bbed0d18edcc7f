"""The variables of a rank: the same that torchrun sets, and ours."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from instep.errors import UsageError


def local_variables(
    options: Mapping[str, Any],
    *,
    local_rank: int,
    num_ranks: int,
    address: tuple[str, int],
    run_id: str,
    restart: int,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """What torchrun's agent sets for one rank of a run on one machine."""
    variables = {
        "RANK": str(local_rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(local_rank),
        "ROLE_NAME": str(options["role"]),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "WORLD_SIZE": str(num_ranks),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(options["max_restarts"]),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": str(options["signals_to_handle"]),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "LOCAL_RANK": str(local_rank),
    }
    if options["virtual_local_rank"]:
        variables |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": _visible_device(local_rank, environ)}
    return variables


def our_variables(run_dir: str, overrides: Mapping[str, str], on_terminal: bool = False) -> dict[str, str]:
    """INSTEP_RUN_DIR: where this run keeps its files; INSTEP_SET: what --set overrides, as a JSON object of strings;
    INSTEP_LIVE: a progress line that is redrawn reaches a terminal, though by way of a pipe."""
    variables = {"INSTEP_RUN_DIR": run_dir} if run_dir else {}
    if overrides:
        variables["INSTEP_SET"] = json.dumps(overrides)
    if on_terminal:
        variables["INSTEP_LIVE"] = "1"
    return variables


def _visible_device(local_rank: int, environ: Mapping[str, str]) -> str:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise UsageError(
            f"local rank {local_rank} has no device: CUDA_VISIBLE_DEVICES={visible} names {len(devices)}. "
            f"Start at most {len(devices)} ranks here (-n {len(devices)}), or name more devices."
        )
    return devices[local_rank].strip()


def choose_threads(num_local_ranks: int, environ: Mapping[str, str]) -> int | None:
    """Threads for each rank: the cores this process may use, shared evenly. None when there is nothing to choose."""
    if "OMP_NUM_THREADS" in environ or num_local_ranks < 2:
        return None
    return max(1, count_cores() // num_local_ranks)


def count_cores() -> int:
    """Cores that this process may use, by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
