"""Binds a rank to the cores near its GPU (`--numa-binding`), with torch's own rules."""

from __future__ import annotations


def bind_to_numa(local_rank: int, mode: str) -> None:
    """Raises what torch raises when this machine has no such GPU or no numactl."""
    # Private in torch 2.11 to 2.13: its public surface is only the launcher that this one replaces.
    from torch.numa import binding

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    binding._maybe_apply_numa_binding_to_current_process(gpu_index=local_rank, numa_options=options)
