"""Binds a rank to the cores near its GPU (`--numa-binding`), with torch's own rules."""

from __future__ import annotations

from instep.errors import UsageError


def bind_to_numa(local_rank: int, mode: str) -> None:
    """Raises what torch raises when this machine has no such GPU or no numactl, and UsageError for a torch without it."""
    from torch.numa import binding

    # Private in torch 2.11 to 2.13: its public surface is only the launcher that this one replaces.
    apply = getattr(binding, "_maybe_apply_numa_binding_to_current_process", None)
    if apply is None:
        raise UsageError("--numa-binding cannot be used with this version of torch; leave it out.")
    apply(gpu_index=local_rank, numa_options=binding.NumaOptions(affinity_mode=binding.AffinityMode(mode)))
