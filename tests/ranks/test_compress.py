"""16-bit sums against sums in float64, with the error that rounding each piece and the sum once may make."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from instep.errors import UsageError
from instep.train.reduce.bucket import Bucket
from instep.train.reduce.compress import CompressedSum
from run_ranks import run_ranks

ROUND_OFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
SIZES = (1, 1000, 4096, 7, 50_001)
TAIL = 37
SCALES = {"usual": 1.0, "beyond fp16": 1e7, "below fp16": 1e-12}


def gradients(rank: int, index: int, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    values = torch.randn(SIZES[index], generator=generator, dtype=torch.float64) * scale * 10.0**rank
    return values.to(dtype)


def words(rank: int, size: int) -> Tensor:
    """Each rank's own row, and a number that only fp32 can hold."""
    tail = torch.zeros(TAIL)
    tail[rank] = 16777213.0 + rank
    tail[size:] = 1.0
    return tail


def make_buckets(rank: int, size: int, scale: float, dtype: torch.dtype) -> list[Bucket]:
    buckets = [Bucket(index, gradients(rank, index, scale, dtype)) for index in range(len(SIZES))]
    if dtype != torch.bfloat16:
        last = buckets[-1]
        buckets[-1] = Bucket(last.index, torch.cat([last.flat, words(rank, size).to(dtype)]), tail=TAIL)
    return buckets


def sum_buckets(rank: int, size: int, name: str, scales: list[float], dtype: torch.dtype) -> list[list[Tensor]]:
    transport = CompressedSum((dist.group.WORLD,), name)
    results = []
    for scale in scales:
        buckets = make_buckets(rank, size, scale, dtype)
        handles = [transport.start(bucket) for bucket in buckets]  # all under way at once
        for handle in handles:
            handle.wait()
        results.append([bucket.flat for bucket in buckets])
    transport.close()
    return results


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_sums_stay_within_the_rounding_of_16_bits(name, size):
    scales = list(SCALES.values())
    ranks = run_ranks(sum_buckets, size, name, scales, torch.float32)
    for number, scale in enumerate(scales):
        for index in range(len(SIZES)):
            pieces = torch.stack([gradients(rank, index, scale).double() for rank in range(size)])
            exact = pieces.sum(0)
            bound = 1.01 * ROUND_OFF[name] * (pieces.abs().sum(0) + exact.abs())
            bound += 2.0**-37 * pieces.abs().max() * size  # the smallest are rounded to a fraction of the largest
            result = ranks[0][number][index]
            assert ((result[: SIZES[index]].double() - exact).abs() <= bound).all()
            assert all(torch.equal(other[number][index], result) for other in ranks)
        tail = torch.stack([words(rank, size) for rank in range(size)]).sum(0)
        assert torch.equal(ranks[0][number][-1][-TAIL:], tail)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_buckets_of_other_types_keep_them(dtype):
    (first,), (second,) = run_ranks(sum_buckets, 2, "bf16", [1.0], dtype)
    for index, (one, other) in enumerate(zip(first, second)):
        exact = gradients(0, index, 1.0, dtype).double() + gradients(1, index, 1.0, dtype).double()
        assert one.dtype == dtype and torch.equal(one, other)
        torch.testing.assert_close(one[: SIZES[index]].double(), exact, rtol=0.05, atol=0.05)


def sum_nonfinite(rank: int, size: int, name: str) -> list[Tensor]:
    transport = CompressedSum((dist.group.WORLD,), name)
    results = []
    for bad in (float("inf"), float("nan")):
        flat = torch.ones(10)
        if rank == 1:
            flat[3] = bad
        transport.start(Bucket(0, flat)).wait()
        results.append(flat)
    empty = Bucket(0, words(rank, size), tail=TAIL)  # a last bucket that holds nothing but control words
    transport.start(empty).wait()
    transport.close()
    return [*results, empty.flat]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_gradient_that_is_not_finite_is_seen_by_all(name):
    for infinite, nan, tail in run_ranks(sum_nonfinite, 2, name):
        assert infinite[3] == float("inf") and nan[3].isnan()
        assert torch.equal(infinite[5:], torch.full((5,), 2.0))
        assert torch.equal(tail, words(0, 2) + words(1, 2))


def test_another_type_is_one_sentence():
    with pytest.raises(UsageError) as caught:
        CompressedSum((), "fp8")
    assert str(caught.value) == "compress='fp8' is no 16-bit type; there are bf16, fp16."
