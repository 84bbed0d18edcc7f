import pytest
import torch

from instep.train.reduce.shared_memory import add_in_tree, add_up_shard
from instep.train.reduce.shared_region import can_share_memory
from instep.train.world import World


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("numel", [1, 15, 64, 1000, 200_003])
def test_the_shards_make_up_the_whole(size, numel):
    generator = torch.Generator().manual_seed(numel)
    copies = [torch.randn(numel, generator=generator) for _ in range(size)]
    expected = add_in_tree([copy.clone() for copy in copies])
    for shard in reversed(range(size)):
        add_up_shard(copies, shard)
    assert all(torch.equal(copy, expected) for copy in copies)


def test_adds_in_pairs():
    parts = [torch.tensor([value], dtype=torch.float64) for value in (1e16, 1.0, -1e16, 1.0, 1.0)]
    expected = ((1e16 + 1.0) + (-1e16 + 1.0)) + 1.0
    assert add_in_tree(parts).item() == expected


def test_adds_16_bit_numbers_in_fp32():
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    assert add_in_tree(parts).item() == 259.0


@pytest.mark.parametrize(("size", "local_size", "device"), [(1, 1, "cpu"), (4, 2, "cpu"), (2, 2, "cuda")])
def test_is_not_tried_where_it_cannot_work(size, local_size, device):
    assert not can_share_memory(World(0, size, 0, local_size, torch.device(device)))
