"""PowerSGD in float64: exact where it has to be, and nothing is lost where it is not."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from instep.errors import UsageError
from instep.train.reduce.bucket import Bucket
from instep.train.reduce.power_sgd import PowerSGD
from run_ranks import run_ranks

SHAPES = ([(40, 30), (30,), (24, 3, 5, 5)], [(64, 50), (3, 3)], [(48, 36), (48,)])
TAIL = 5


def make_buckets(dtype: torch.dtype = torch.float64, channels_last: bool = True) -> list[Bucket]:
    """Three buckets; the convolution's gradient lies in channels_last order, the last one carries control words."""
    buckets = []
    for index, shapes in enumerate(SHAPES):
        tail = TAIL if index == len(SHAPES) - 1 else 0
        flat = torch.zeros(sum(torch.Size(shape).numel() for shape in shapes) + tail, dtype=dtype)
        views, offset = [], 0
        for shape in shapes:
            like = torch.empty(shape)
            if channels_last and len(shape) == 4:
                like = like.contiguous(memory_format=torch.channels_last)
            views.append(flat.as_strided(shape, like.stride(), offset))
            offset += like.numel()
        buckets.append(Bucket(index, flat, views, tail))
    return buckets


def fill(buckets: list[Bucket], rank: int, step: int, columns: int | None = None) -> None:
    """Gradients of this rank; matrices whose sum over ranks has rank `columns` when given."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    shared = torch.Generator().manual_seed(77)
    for bucket in buckets:
        for view in bucket.views:
            values = torch.randn(view.shape, generator=generator, dtype=torch.float64)
            if columns is not None and view.dim() > 1:
                rows, width = view.shape[0], view[0].numel()
                basis = torch.randn(rows, columns, generator=shared, dtype=torch.float64)
                mixed = torch.randn(columns, width, generator=generator, dtype=torch.float64)
                values = (basis @ mixed).view(view.shape)
            view.copy_(values)
        bucket.words.copy_(torch.arange(TAIL)[: bucket.tail] + 10 * rank)


def run_steps(
    transport: PowerSGD, rank: int, steps: range, columns: int | None = None, **options
) -> list[list[Tensor]]:
    seen = []
    for step in steps:
        buckets = make_buckets(**options)
        fill(buckets, rank, step, columns)
        for handle in [transport.start(bucket) for bucket in buckets]:  # all under way at once
            handle.wait()
        seen.append([bucket.flat for bucket in buckets])
    return seen


def exact_sum(size: int, step: int, columns: int | None = None, **options) -> list[Tensor]:
    ranks = []
    for rank in range(size):
        buckets = make_buckets(**options)
        fill(buckets, rank, step, columns)
        ranks.append([bucket.flat.double() for bucket in buckets])
    return [torch.stack(parts).sum(0) for parts in zip(*ranks)]


def matrices_and_rest(flats: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Splits results into compressed matrices and all else, by where they lie."""
    first, second, third = flats
    return [first[:1200], first[1230:], second[:3200], third[:1728]], [first[1200:1230], second[3200:], third[1728:]]


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def low_rank(rank: int, size: int, dtype: torch.dtype) -> list[list[Tensor]]:
    transport = PowerSGD(dist.group.WORLD, rank=2, uncompressed_steps=0)
    seen = run_steps(transport, rank, range(3), columns=2, dtype=dtype)
    transport.close()
    return seen


@pytest.mark.parametrize(("size", "dtype", "tolerance"), [(2, torch.float64, 1e-9), (3, torch.float32, 1e-3)])
def test_a_sum_of_low_rank_comes_out_whole_and_equal_on_all_ranks(size, dtype, tolerance):
    ranks = run_ranks(low_rank, size, dtype)
    close(ranks[0][0], exact_sum(size, 0, columns=2, dtype=dtype), tolerance)
    for step in range(3):
        for other in ranks[1:]:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(ranks[0][step], other[step]))


def in_bfloat16(rank: int, size: int):
    """The same numbers in bf16 and in fp32 buckets."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        transport = PowerSGD(dist.group.WORLD, rank=2, uncompressed_steps=0)
        buckets, source = make_buckets(dtype), make_buckets(torch.bfloat16)
        fill(source, rank, 0)
        for bucket, other in zip(buckets, source):
            bucket.flat.copy_(other.flat)
            transport.start(bucket).wait()
        transport.close()
        results.append([bucket.flat for bucket in buckets])
    return results


def test_bfloat16_gradients_are_worked_on_in_fp32():
    for half, single in run_ranks(in_bfloat16, 2):
        assert all(torch.equal(one, other.to(torch.bfloat16)) for one, other in zip(half, single, strict=True))


def full_rank(rank: int, size: int, steps: int):
    transport = PowerSGD(dist.group.WORLD, rank=2, uncompressed_steps=2)
    seen = run_steps(transport, rank, range(steps))
    transport.close()
    return seen, transport.state()


@pytest.mark.parametrize("size", [2, 3])
def test_what_was_sent_and_what_is_remembered_add_up_to_all_gradients(size):
    steps = 6
    ranks = run_ranks(full_rank, size, steps)
    exact = [exact_sum(size, step) for step in range(steps)]
    sent = ranks[0][0]
    for step in range(2):
        close(sent[step], exact[step], 1e-9)
    for step in range(2, steps):
        close(matrices_and_rest(sent[step])[1], matrices_and_rest(exact[step])[1], 1e-9)
        assert not torch.allclose(sent[step][0], exact[step][0], rtol=0.1)
    errors = [
        [error.reshape(-1) for index in range(3) for error in state["buckets"][index]["errors"]] for _, state in ranks
    ]
    remembered = [torch.stack(parts).sum(0) for parts in zip(*errors)]
    for number, left in enumerate(remembered):
        total = sum(matrices_and_rest(exact[step])[0][number] for step in range(steps))
        given = sum(matrices_and_rest(sent[step])[0][number] for step in range(steps))
        torch.testing.assert_close(given + left, total, rtol=1e-9, atol=1e-9)


def stop_and_go_on(rank: int, size: int, states: list | None):
    transport = PowerSGD(dist.group.WORLD, rank=2, uncompressed_steps=1)
    if states is None:
        run_steps(transport, rank, range(3))
        saved = transport.state()
        return saved, run_steps(transport, rank, range(3, 5))
    transport.load_state(states[0], states[rank::size])
    assert transport.state()["buckets"].keys() == states[0]["buckets"].keys()
    return None, run_steps(transport, rank, range(3, 5))


def test_goes_on_from_a_saved_state_with_the_same_bits_and_on_fewer_ranks_with_the_same_memory():
    before = run_ranks(stop_and_go_on, 2, None)
    states = [state for state, _ in before]
    for (_, went_on), (_, resumed) in zip(before, run_ranks(stop_and_go_on, 2, states)):
        assert all(torch.equal(*pair) for step in zip(went_on, resumed) for pair in zip(*step))
    single = PowerSGD(FakeGroup(), rank=2)
    single.load_state(states[0], states)
    both = [state["buckets"][0]["errors"][0] for state in states]
    assert torch.equal(single.state()["buckets"][0]["errors"][0], both[0] + both[1])


class FakeGroup:
    """One rank, for what needs no collective."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def not_finite_once(rank: int, size: int):
    transport = PowerSGD(dist.group.WORLD, rank=2, uncompressed_steps=0)
    run_steps(transport, rank, range(2))
    before = transport.state()["buckets"][0]
    before = [tensor.clone() for tensor in before["errors"] + before["factors"]]
    bucket = make_buckets()[0]
    if rank == 1:
        bucket.views[0][3, 4] = float("nan")
    transport.start(bucket).wait()
    after = transport.state()["buckets"][0]
    kept = all(torch.equal(*pair) for pair in zip(before[:1] + before[2:3], after["errors"][:1] + after["factors"][:1]))
    later = run_steps(transport, rank, range(2, 3))
    second_helping = Bucket(0, torch.full((4,), 1.0 + rank))
    transport.start(second_helping).wait()
    transport.close()
    return bool(bucket.views[0].isnan().any()), kept, bool(later[0][0].isfinite().all()), second_helping.flat


def test_a_step_that_is_not_finite_is_seen_by_all_and_leaves_the_memory_alone():
    for seen, kept, finite_again, helping in run_ranks(not_finite_once, 2):
        assert seen and kept and finite_again
        assert torch.equal(helping, torch.full((4,), 3.0))


def train(rank: int, size: int) -> tuple[float, float]:
    """A regression on half of the data each; the loss over all data before and after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(256, 20)
    y = torch.sin(x.sum(1, keepdim=True))
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    views = [
        part.view_as(p) for part, p in zip(flat.split([p.numel() for p in model.parameters()]), model.parameters())
    ]
    for parameter, view in zip(model.parameters(), views):
        parameter.grad = view
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    transport = PowerSGD(dist.group.WORLD, rank=2, uncompressed_steps=3)
    before = nn.functional.mse_loss(model(x), y).item()
    for _ in range(300):
        nn.functional.mse_loss(model(x[rank::size]), y[rank::size]).div(size).backward()
        transport.start(Bucket(0, flat, views)).wait()
        optimizer.step()
        flat.zero_()
    transport.close()
    return before, nn.functional.mse_loss(model(x), y).item()


def test_trains():
    (before, after), other = run_ranks(train, 2)
    assert (before, after) == other
    assert after < 0.15 * before


def test_a_rank_below_one_is_one_sentence():
    with pytest.raises(UsageError) as caught:
        PowerSGD(FakeGroup(), rank=0)
    assert str(caught.value) == "PowerSGD(rank=0) has to be a whole number of at least 1."
