"""Batch norm over all ranks against one process that has the whole batch, in float64."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from instep.train.techniques.sync_batch_norm import convert_sync_batch_norm
from run_ranks import run_ranks

SHAPES = {1: (5,), 2: (5, 4, 3), 3: (5, 2, 3, 2)}
KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def batches(dims: int, num_samples: int, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Inputs far from zero, so that a variance computed as a difference of squares would be wrong, and targets."""
    generator = torch.Generator().manual_seed(0)
    shape = (steps, num_samples, *SHAPES[dims])
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 1000
    return list(zip(inputs, torch.randn(shape, generator=generator, dtype=torch.float64)))


def build(dims: int, **options) -> nn.Module:
    layer = KINDS[dims](5, dtype=torch.float64, **options)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2, 5))
            layer.bias.copy_(torch.linspace(-1, 1, 5))
    return nn.Sequential(layer)


def train(model: nn.Module, share: slice, dims: int, num_samples: int) -> dict[str, Tensor]:
    """Outputs and gradients of this share of the samples; a loss whose gradient differs from sample to sample."""
    seen: dict[str, Tensor] = {}
    for step, (x, target) in enumerate(batches(dims, num_samples)):
        x = x[share].clone().requires_grad_()
        y = model(x)
        (y * target[share] + y.square() * target[share]).sum().backward()
        seen[f"y{step}"], seen[f"dx{step}"] = y.detach(), x.grad
    return seen


def share_of(rank: int, counts: tuple[int, ...]) -> slice:
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def on_rank(rank: int, size: int, dims: int, counts: tuple[int, ...], options: dict):
    model = build(dims, **options)
    convert_sync_batch_norm(model, dist.group.WORLD)
    seen = train(model, share_of(rank, counts), dims, sum(counts))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.eval()
    evaluated = model(batches(dims, sum(counts))[0][0])
    return seen, gradients, dict(model.state_dict()), evaluated.detach()


@pytest.mark.parametrize(
    ("dims", "counts", "options"),
    [
        (1, (3, 5), {}),
        (2, (4, 4), {"momentum": 0.3}),
        (2, (1, 6, 2), {"momentum": None}),
        (2, (5, 0), {}),
        (2, (1, 1), {"track_running_stats": False}),
        (3, (0, 3, 2), {"affine": False}),
    ],
)
def test_equals_one_process_with_the_whole_batch(dims, counts, options):
    whole = build(dims, **options)
    expected = train(whole, slice(None), dims, sum(counts))
    state = dict(whole.state_dict())
    whole.eval()
    evaluated = whole(batches(dims, sum(counts))[0][0])
    for rank, (seen, gradients, rank_state, rank_evaluated) in enumerate(
        run_ranks(on_rank, len(counts), dims, counts, options)
    ):
        for name, value in seen.items():
            torch.testing.assert_close(value, expected[name][share_of(rank, counts)], rtol=1e-9, atol=1e-9)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9)
        assert rank_state.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(rank_state[name], value, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(rank_evaluated, evaluated.detach(), rtol=1e-9, atol=1e-9)


def in_half_and_channels_last(rank: int, size: int):
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = nn.BatchNorm2d(5)
        convert_sync_batch_norm(model, dist.group.WORLD)
        x = batches(2, 8)[0][0].sub(1000).to(dtype)[4 * rank : 4 * rank + 4]
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        y = model(x)
        y.square().mul(torch.arange(4).view(-1, 1, 1, 1)).sum().backward()
        results.append((y.detach(), x.grad, y.is_contiguous(memory_format=torch.channels_last), model.running_var))
    return results


def test_low_precision_inputs_keep_their_type_and_their_layout():
    both = run_ranks(in_half_and_channels_last, 2)
    whole = nn.BatchNorm2d(5, dtype=torch.float64)
    x = batches(2, 8)[0][0].sub(1000).requires_grad_()
    y = whole(x)
    y.square().mul(torch.arange(4).repeat(2).view(-1, 1, 1, 1)).sum().backward()
    for number, (dtype, tolerance) in enumerate(
        {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}.items()
    ):
        outputs = torch.cat([results[number][0] for results in both])
        gradients = torch.cat([results[number][1] for results in both])
        assert outputs.dtype == gradients.dtype == dtype
        assert all(results[number][2] for results in both)
        torch.testing.assert_close(outputs.double(), y.detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradients.double(), x.grad, rtol=tolerance, atol=tolerance * 3)
        assert torch.equal(both[0][number][3], both[1][number][3])


def all_empty_then_one_value(rank: int, size: int):
    model = nn.BatchNorm1d(5)
    convert_sync_batch_norm(model, dist.group.WORLD)
    y = model(torch.zeros(0, 5))
    averages = model.running_mean.clone(), model.running_var.clone()
    try:
        model(torch.zeros(1 if rank == 0 else 0, 5))
    except ValueError as error:
        return y.shape, averages, str(error)
    return y.shape, averages, None


def test_a_batch_without_samples_moves_no_average_and_a_single_value_is_refused_on_all_ranks():
    for shape, (mean, variance), text in run_ranks(all_empty_then_one_value, 2):
        assert shape == (0, 5)
        assert torch.equal(mean, torch.zeros(5)) and torch.equal(variance, torch.ones(5))
        assert text is not None and text.startswith("Expected more than 1 value per channel when training, got 1")


def converted_twice_copied_and_saved(rank: int, size: int):
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.SyncBatchNorm(5), nn.GroupNorm(1, 5))
    names, state, layers = dict(model.named_parameters()), model.state_dict(), list(model)
    convert_sync_batch_norm(model, dist.group.WORLD)
    convert_sync_batch_norm(model, dist.group.WORLD)
    assert all(before is after for before, after in zip(layers, model))
    assert isinstance(model[1], nn.BatchNorm2d) and type(model[3]) is nn.GroupNorm
    assert dict(model.named_parameters()).keys() == names.keys() and model.state_dict().keys() == state.keys()
    assert repr(model) == repr(nn.Sequential(*layers))
    x = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(rank))
    twin = copy.deepcopy(model)
    assert torch.equal(model(x), twin(x)) and twin[1].running_mean is not model[1].running_mean
    assert torch.equal(twin[1].running_mean, model[1].running_mean)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    plain = torch.load(file, weights_only=False)
    assert type(plain[1]) is nn.BatchNorm2d and torch.equal(plain[1].running_var, model[1].running_var)
    return True


def test_the_model_stays_what_it_was():
    assert run_ranks(converted_twice_copied_and_saved, 2) == [True, True]


def test_one_process_is_left_alone():
    model = nn.Sequential(nn.BatchNorm2d(5))
    convert_sync_batch_norm(model, None)
    assert type(model[0]) is nn.BatchNorm2d
