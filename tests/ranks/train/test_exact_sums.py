"""Sums in tree order over ranks that share no memory, plain and with 16-bit numbers on the way."""

from __future__ import annotations

import torch
import torch.distributed as dist

from instep.train.reduce.bucket import Bucket, Transport
from instep.train.reduce.exact_sum import ExactCompressedSum, ExactSum
from instep.train.reduce.shared_memory import add_in_tree
from run_ranks import run_ranks

NUMEL = 10_007  # no multiple of any number of ranks


def values_of(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def sum_up(rank: int, size: int, compressed: bool) -> list[torch.Tensor]:
    groups = [dist.new_group() for _ in range(2)]
    transport: Transport = ExactCompressedSum(groups, "bf16") if compressed else ExactSum(groups)
    buckets = [Bucket(index, values_of(rank) * (index + 1)) for index in range(3)]
    buckets.append(Bucket(3, values_of(rank).bfloat16()))
    for handle in [transport.start(bucket) for bucket in buckets]:
        handle.wait()
    transport.close()
    chained = values_of(rank).bfloat16()
    dist.all_reduce(chained)  # what torch's bf16 hook does
    return [*(bucket.flat for bucket in buckets), chained.float()]


def test_adds_in_tree_order() -> None:
    for size in (2, 3, 4):
        expected = add_in_tree([values_of(rank) for rank in range(size)])
        for sums in run_ranks(sum_up, size, False):
            assert torch.equal(sums[0], expected)
            assert torch.equal(sums[1], 2 * expected)
            narrow = add_in_tree([values_of(rank).bfloat16() for rank in range(size)])
            assert torch.equal(sums[3], narrow.bfloat16())


def test_a_compressed_tree_is_nearer_to_the_true_sum_than_a_chain_in_bf16() -> None:
    size = 8
    true = torch.stack([values_of(rank) for rank in range(size)]).double().sum(0)
    for tree, *_, chain in run_ranks(sum_up, size, True):
        tree_error, chain_error = ((found - true).square().mean().sqrt() for found in (tree, chain))
        assert tree_error < 0.9 * chain_error
