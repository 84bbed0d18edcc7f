"""Reduce-scatter and all-gather of our own give what PyTorch's give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from instep.train.reduce.shard_traffic import PiecewiseScatter, SharedGather, SharedRegions, SharedScatter
from instep.train.reduce.shared_memory import SharedSum
from instep.train.reduce.spread import CHUNK_BYTES, GroupSpread, SharedSpread, choose_spread
from instep.train.world import World
from run_ranks import run_ranks


def world_of(rank: int, size: int) -> World:
    return World(rank, size, rank, size, torch.device("cpu"), host_group=dist.group.WORLD)


def scatter(comm: Any, numel: int, dtype: torch.dtype, rank: int, size: int, seed: int) -> Tensor:
    """As FSDP2 calls it."""
    given = comm.allocate((numel,), dtype=dtype, device=torch.device("cpu"))
    given.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + seed)).to(dtype))
    output = comm.allocate((numel // size,), dtype=dtype, device=torch.device("cpu"))
    comm(output_tensor=output, input_tensor=given, group=dist.group.WORLD, op=dist.ReduceOp.SUM)
    return output


def expected_sum(numel: int, dtype: torch.dtype, size: int, seed: int) -> Tensor:
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(100 * r + seed)).to(dtype) for r in range(size)]
    return torch.stack([part.double() for part in parts]).sum(0)


def play(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    waits = SharedSum(dist.group.WORLD, world_of(rank, size))
    assert waits.is_shared
    shared, pieces, gather = SharedScatter(waits), PiecewiseScatter(dist.group.WORLD), SharedGather(waits)
    pairs: list[tuple[Tensor, Tensor]] = []
    for seed, numel, dtype in ((1, 24, torch.float32), (2, 24, torch.float32), (3, 120000, torch.float64),
                               (4, 240, torch.bfloat16), (5, 24, torch.float32)):  # fmt: skip
        numel *= size
        whole = expected_sum(numel, dtype, size, seed)
        mine = whole[rank * numel // size : (rank + 1) * numel // size]
        for comm in (shared, pieces):
            pairs.append((scatter(comm, numel, dtype, rank, size, seed).double(), mine))
        part = whole.to(dtype)[rank * numel // size : (rank + 1) * numel // size].clone()
        output = gather.allocate((numel,), dtype=dtype, device=torch.device("cpu"))
        own = output.narrow(0, rank * part.numel(), part.numel())
        own.copy_(part)
        gather(output_tensor=output, input_tensor=own, group=dist.group.WORLD)
        pairs.append((output.double(), whole.to(dtype).double()))
    dist.barrier()
    waits.close()
    return pairs


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_wholes_are_right(size: int) -> None:
    for rank in run_ranks(play, size):
        for found, expected in rank:
            torch.testing.assert_close(found, expected, rtol=1e-2 if found.numel() == 240 else 1e-6, atol=2e-2)


def through_fsdp(rank: int, size: int, own: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)) for _ in range(3)))
    mesh = init_device_mesh("cpu", (size,))
    waits = SharedSum(dist.group.WORLD, world_of(rank, size))
    scatter_, gather = SharedScatter(waits), SharedGather(waits)
    for unit in [*model, model]:
        fully_shard(unit, mesh=mesh)
        unit.set_force_sum_reduction_for_comms(True)
        if own:
            unit.set_custom_reduce_scatter(scatter_)
            unit.set_custom_all_gather(gather)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [p.full_tensor() for p in model.parameters()]
    dist.barrier()
    waits.close()
    return values


def test_fsdp_allocates_in_the_order_that_is_relied_on() -> None:
    """Memory for the input, then for the output: a change in FSDP2 shows here."""
    for ours, theirs in zip(run_ranks(through_fsdp, 2, True), run_ranks(through_fsdp, 2, False)):
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def many_sizes(rank: int, size: int) -> list[bool]:
    waits = SharedSum(dist.group.WORLD, world_of(rank, size))
    regions = SharedRegions(waits)
    found = [regions.find(number + 1, torch.float32) is not None for number in range(18)]
    dist.barrier()
    waits.close()
    return found


def test_memory_is_mapped_for_few_sizes_only() -> None:
    assert run_ranks(many_sizes, 2) == [[True] * 16 + [False] * 2] * 2


def owned_by(size: int, seed: int) -> list[list[Tensor]]:
    """Small and large, of several types, one not contiguous, more than a chunk of one owner, and an owner of nothing."""
    source = torch.Generator().manual_seed(seed)
    numel = CHUNK_BYTES // 4 + 1000
    first = [torch.randn(numel, generator=source), torch.randn(3, generator=source).double(), torch.tensor(float(seed))]
    second = [torch.randn(2, 3, 40, 300, generator=source).to(memory_format=torch.channels_last)]
    return [first, [*second, torch.randint(9, (7,), generator=source)], *([] for _ in range(size - 2))]


def spread_both_ways(rank: int, size: int) -> list[tuple[str, bool]]:
    world = world_of(rank, size)
    waits = SharedSum(dist.group.WORLD, world)
    by_group, found = GroupSpread(world), []
    for name, spread in (("shared", SharedSpread(waits, by_group)), ("group", by_group)):
        for seed in (1, 2):  # the second time in memory that has been used
            expected, mine = owned_by(size, seed), owned_by(size, seed)
            for owner, tensors in enumerate(mine):
                for tensor in tensors if owner != rank else ():
                    tensor.zero_()
            spread(mine, "a test")
            same = [torch.equal(a, b) for some, others in zip(mine, expected) for a, b in zip(some, others)]
            found.append((f"{name} {seed}", all(same) and len(same) == 5))
    found.append(("choice", isinstance(choose_spread(waits, world), SharedSpread)))
    dist.barrier()
    waits.close()
    return found


def test_what_one_rank_owns_comes_to_all() -> None:
    for found in run_ranks(spread_both_ways, 3):
        assert [name for name, is_right in found if not is_right] == []
        assert len(found) == 5
