"""The pieces of the recorder: prints of tensors, hashes of samples, what autograd and DataLoader keep."""

from __future__ import annotations

import inspect
import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, dataloader
from torch.utils.data._utils import fetch

from instep.verify.record.forwards import has_local_batch_norm
from instep.verify.record.generators import drawing_by, random_state
from instep.verify.record.gradients import find_divisor
from instep.verify.record.options import Options
from instep.verify.record.prints import BUCKETS, digest, print_tensor
from instep.verify.record.samples import Samples, split_rows
from instep.verify.record.state import plain_name


def test_small_tensors_are_their_own_print() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert print_tensor(tensor).tolist() == [0, 1, 2, 3, 4, 5]
    assert print_tensor(torch.ones(40000)).size == 40000, "vectors are kept whole for longer"


@pytest.mark.parametrize("elements", [100_000, 3_000_000])
def test_a_print_has_the_length_of_its_tensor_and_adds(elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(2, elements // 2, generator=generator) for _ in range(2))
    prints = print_tensor(one), print_tensor(other)
    assert prints[0].size == BUCKETS
    assert numpy.linalg.norm(prints[0]) == pytest.approx(float(one.norm()), rel=0.15)
    numpy.testing.assert_allclose(print_tensor(one.double() + 2 * other.double()), prints[0] + 2 * prints[1], rtol=1e-9)
    moved = one.clone()
    moved[1, -1] += 1000.0  # one element, in the last chunk
    assert numpy.linalg.norm(print_tensor(moved) - prints[0]) == pytest.approx(1000.0, rel=1e-3)


def test_bits_are_told_apart() -> None:
    tensor = torch.ones(3)
    other = torch.nextafter(tensor, torch.full((3,), 2.0))
    assert digest(tensor) == digest(torch.ones(3))
    assert digest(tensor) != digest(other)


def test_samples_do_not_depend_on_the_batch_they_came_in() -> None:
    x, y = torch.randn(8, 3), torch.arange(8)
    whole = split_rows((x, y))[0]
    parts = split_rows({"x": x[:4], "y": y[:4]})[0] + split_rows([x[4:], y[4:]])[0]
    assert whole == parts
    assert len(set(whole)) == 8
    assert split_rows((x, y + 1))[0] != whole, "targets belong to a sample"


def test_inputs_of_a_model_are_recognised_as_samples() -> None:
    samples = Samples()
    x, y = torch.randn(4, 3), torch.arange(4)
    samples.fetch((x, y))
    assert samples.enter((x.clone(),)) == 4
    samples.enter((torch.randn(4, 3),))  # noise for a generator is no sample
    assert samples.take() == ("loader", split_rows((x, y))[0])
    assert samples.take() == ("inputs", []), "each step has its own"


def test_equal_inputs_with_other_targets_are_other_samples() -> None:
    samples = Samples()
    x, y = torch.zeros(3, 2), torch.arange(3)
    samples.fetch((x, y))
    samples.enter((x,))
    assert samples.take()[1] == split_rows((x, y))[0]


def test_inputs_made_from_a_batch_count_as_the_batch() -> None:
    samples = Samples()
    batch = torch.randint(0, 9, (4, 6))
    samples.fetch((batch,))
    samples.enter((batch[:, :-1],))
    assert samples.take() == ("loader", split_rows((batch,))[0])


def test_without_a_loader_the_inputs_are_the_samples() -> None:
    samples = Samples()
    x = torch.randn(4, 3, requires_grad=True)
    samples.enter(((x.detach(),), {"computed": x * 2}))
    assert samples.take() == ("inputs", split_rows(x)[0])


def test_the_divisor_of_a_loss() -> None:
    """Reads `_saved_other` of autograd's nodes, which is private: fails when torch keeps something else."""
    loss = torch.ones(3, requires_grad=True).sum()
    assert find_divisor(loss / 4) == 4
    assert find_divisor(loss * 0.25) == 4
    assert find_divisor(loss / 4 * torch.tensor(1024.0), scale=1024.0) == 4
    assert find_divisor(loss) is None
    assert find_divisor(loss * torch.tensor(2.0, requires_grad=True)) is None


def test_draws_by_sample_leave_the_generators_alone() -> None:
    state = random_state()
    with drawing_by(7):
        first = random.random(), float(torch.rand(())), float(numpy.random.random())
    assert random_state() == state
    random.random()
    assert random_state() != state
    with drawing_by(7):
        assert (random.random(), float(torch.rand(())), float(numpy.random.random())) == first
    with drawing_by(8):
        assert random.random() != first[0]


def test_the_parts_of_dataloader_that_are_wrapped_are_there() -> None:
    assert list(inspect.signature(fetch._MapDatasetFetcher.fetch).parameters) == ["self", "possibly_batched_index"]
    assert "__next__" in vars(dataloader._BaseDataLoaderIter)
    fetcher = next(iter(DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)))
    assert fetcher[0].shape == (2, 1)


def test_batch_norm_that_sees_one_rank() -> None:
    norm = torch.nn.BatchNorm1d(3)
    assert has_local_batch_norm(torch.nn.Sequential(norm))
    norm.eval()
    assert not has_local_batch_norm(torch.nn.Sequential(norm))
    assert not has_local_batch_norm(torch.nn.LayerNorm(3))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod.0.weight", "0.weight"),
        ("_forward_module.module.0.weight", "0.weight"),
        ("_fsdp_wrapped_module.head._checkpoint_wrapped_module.bias", "head.bias"),
    ],
)
def test_names_without_what_wrappers_put_into_them(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_options_travel_as_text() -> None:
    options = Options("folder", 3, keep_random=True, divide_loaders=True, loader_batches=(32, None))
    assert Options.from_text(options.as_text()) == options
