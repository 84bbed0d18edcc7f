"""Sums in shared memory: the bits of the tree, whoever adds, and no endless wait for a rank that is gone."""

import contextlib
import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from instep.train.reduce import shared_memory, shared_region
from instep.train.reduce.bucket import Bucket
from instep.train.reduce.shared_memory import SharedSum, add_in_tree
from instep.train.reduce.shared_region import can_share_memory
from instep.train.world import World
from run_ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not can_share_memory(World(0, 2, 0, 2, torch.device("cpu"))), reason="this machine shares no memory this way"
)
SIZES = (1, 33, 4096, 100_001, 300_000)


def make_transport(rank: int, size: int) -> SharedSum:
    transport = SharedSum(dist.group.WORLD, World(rank, size, rank, size, torch.device("cpu")))
    assert transport.is_shared
    return transport


def values(rank: int, index: int, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + index)
    return (torch.randn(SIZES[index], generator=generator) * 10.0**rank).to(dtype)


def sum_steps(rank: int, size: int, dtype: torch.dtype) -> list[list[Tensor]]:
    transport = make_transport(rank, size)
    buckets = [Bucket(index, transport.allocate(numel, dtype)) for index, numel in enumerate(SIZES)]
    seen = []
    for step in range(3):
        for bucket in buckets:
            bucket.flat.copy_(values(rank, bucket.index, step, dtype))
        handles = [transport.start(bucket) for bucket in buckets]
        if rank == step % size:
            time.sleep(0.05)  # a rank that comes late
        for handle in handles:
            handle.wait()
            assert handle.is_completed()
        seen.append([bucket.flat.clone() for bucket in buckets])
    transport.close()
    return seen


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (3, torch.float64), (4, torch.float32), (2, torch.bfloat16)]
)
def test_each_rank_gets_the_bits_of_the_tree(size, dtype):
    ranks = run_ranks(sum_steps, size, dtype)
    for step in range(3):
        for index in range(len(SIZES)):
            expected = add_in_tree([values(rank, index, step, dtype) for rank in range(size)]).to(dtype)
            for seen in ranks:
                assert torch.equal(seen[step][index], expected)


def other_buckets_and_a_new_layout(rank: int, size: int):
    transport = make_transport(rank, size)
    first = Bucket(0, transport.allocate(1000, torch.float32))
    first.flat.fill_(rank + 1.0)
    fresh = Bucket(0, torch.full((1000,), 10.0 * (rank + 1)))
    handles = [transport.start(first), transport.start(fresh)]
    for handle in handles:
        handle.wait()
    results = [first.flat.unique().tolist(), fresh.flat.unique().tolist()]
    mapped = len(transport._regions)
    del first, handles, handle
    second = Bucket(0, transport.allocate(2000, torch.float32))
    second.flat.fill_(100.0 * (rank + 1))
    transport.start(second).wait()
    assert len(transport._regions) == mapped == 1
    left_open = [link for link in map(_link, os.listdir("/proc/self/fd")) if "instep" in link]
    transport.close()
    return [*results, second.flat.unique().tolist(), left_open]


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def test_a_bucket_outside_goes_through_the_group_and_a_new_layout_frees_the_old():
    for results in run_ranks(other_buckets_and_a_new_layout, 2):
        assert results == [[3.0], [30.0], [300.0], []]


def one_is_killed(rank: int, size: int) -> tuple[str, float]:
    transport = make_transport(rank, size)
    bucket = Bucket(7, transport.allocate(1000, torch.float32))
    transport.start(bucket).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        transport.start(bucket).wait()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def test_a_killed_rank_is_an_error_within_seconds():
    text, seconds = run_ranks(one_is_killed, 2, may_die=(1,))[0]
    assert text.startswith("rank 1 does not come to bucket 7: its process ") and text.endswith(" has ended")
    assert seconds < 10


def one_leaves_or_is_late(rank: int, size: int, leave: bool) -> list[str]:
    transport = make_transport(rank, size)
    bucket = Bucket(3, transport.allocate(1000, torch.float32))
    bucket.flat.fill_(1.0)
    texts = []
    if rank == 1:
        if leave:
            transport.close()
        else:
            time.sleep(0.5)
            transport.start(bucket).wait()
        return texts
    handle = transport.start(bucket)
    while True:
        try:
            handle.wait(timedelta(milliseconds=50) if not leave else None)
            return [*sorted(set(texts)), str(bucket.flat.unique().tolist())]
        except RuntimeError as error:
            texts.append(str(error))
            if leave:
                return texts


def test_a_rank_that_leaves_is_an_error():
    assert run_ranks(one_leaves_or_is_late, 2, True)[0] == ["rank 1 does not come to bucket 3: it has left the run"]


def test_waiting_can_be_given_up_and_taken_up_again():
    assert run_ranks(one_leaves_or_is_late, 2, False)[0] == ["bucket 3 timed out waiting for rank 1", "[2.0]"]


def not_allowed_on_one_rank(rank: int, size: int, where: str):
    if rank == (0 if where == "make_memory" else 1):
        setattr(shared_region, where, lambda *_: None)
    transport = SharedSum(dist.group.WORLD, World(rank, size, rank, size, torch.device("cpu")))
    bucket = Bucket(0, transport.allocate(10, torch.float32))
    bucket.flat.fill_(rank + 1.0)
    transport.start(bucket).wait()
    transport.close()
    return transport.is_shared, bucket.flat.unique().tolist()


@pytest.mark.parametrize("where", ["make_memory", "open_memory", "find_process"])
def test_where_one_rank_may_not_see_the_others_all_go_through_the_group(where):
    assert run_ranks(not_allowed_on_one_rank, 2, where) == [(False, [3.0])] * 2


def wait_in_turns(handle) -> None:
    while not handle.is_completed():
        with contextlib.suppress(RuntimeError):
            handle.wait(timedelta(seconds=0.4))
    handle.wait()


def one_comes_late(rank: int, size: int):
    shared_memory.ANNOUNCE_AFTER_SECONDS = 0.3
    transport = make_transport(rank, size)
    buckets = [Bucket(index, transport.allocate(100, torch.float32)) for index in range(2)]
    seen = []
    for step in range(4):
        if step == rank + 1:
            time.sleep(1.0)
        for bucket in buckets:
            bucket.flat.fill_(rank + 1.0)
        for handle in [transport.start(bucket) for bucket in buckets]:
            wait_in_turns(handle)
        seen += [bucket.flat.unique().tolist() for bucket in buckets]
    for handle, _ in transport._announcements:
        handle.wait()
    transport.close()
    return seen, transport._num_announced


def test_a_long_wait_is_announced_by_a_collective_in_which_all_take_part():
    for seen, num_announced in run_ranks(one_comes_late, 2):
        assert seen == [[3.0]] * 8
        assert num_announced == 2


def many_steps(rank: int, size: int, steps: int) -> int:
    """Sums of small whole numbers are exact, so each can be checked; ranks come early and late at random."""
    transport = make_transport(rank, size)
    buckets = [Bucket(index, transport.allocate(numel, torch.float32)) for index, numel in enumerate((3, 5000, 70_000))]
    chance = random.Random(rank)
    for step in range(steps):
        handles = []
        for bucket in buckets:
            bucket.flat.fill_(rank + step % 1000)
            if chance.random() < 0.2:
                time.sleep(chance.random() * 1e-3)
            handles.append(transport.start(bucket))
        expected = sum(range(size)) + size * (step % 1000)
        for handle, bucket in zip(handles, buckets):
            handle.wait()
            if not bool((bucket.flat == expected).all()):
                return step
    transport.close()
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_thousands_of_steps_with_ranks_that_come_at_any_time(size):
    assert run_ranks(many_steps, size, 4000, timeout_seconds=280) == [4000] * size
