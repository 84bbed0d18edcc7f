"""Batch norm over the global batch: each layer's mean and variance are those of the samples of all ranks.

torch's own SyncBatchNorm runs on GPUs only. This one is made of plain operations, runs on any device, takes uneven
numbers of samples (none at all, too) and leaves the model as it was: the same modules, names and state dict.
"""

from __future__ import annotations

import copy
import copyreg
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def convert_sync_batch_norm(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Makes the batch-norm layers of `model` take their statistics over the ranks of `group`, in place.

    One all-gather of 2 numbers per channel in a layer's forward, one all-reduce of as many in its backward: every rank
    must run both, and `group` has to be one in which nothing else is sent meanwhile. None, one process, changes
    nothing. Layers with a forward of their own are left alone. Evaluation uses the running averages, sends nothing.
    """
    if group is None or group.size() == 1:
        return
    kinds: dict[type, type] = {}
    for module in model.modules():
        plain = type(module)
        if isinstance(module, KINDS) and plain.forward in [kind.forward for kind in KINDS]:
            if plain not in kinds:
                kinds[plain] = _synced_kind(plain, group)
            module.__class__ = kinds[plain]


def _synced_kind(plain: type, group: dist.ProcessGroup) -> type:
    """A subclass of `plain` that differs in `forward`. Pickled it is `plain` again: a file must not need our groups."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return _forward(self, x, group) if self.training else plain.forward(self, x)  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        # what pickle itself writes for a plain object in its first protocols, so every version reads it
        return copyreg._reconstructor, (plain, object, None), self.__dict__  # type: ignore[attr-defined]

    def deep_copy(self: Any, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    own = {
        "is_synchronised": True,
        "forward": forward,
        "__reduce_ex__": reduce,
        "__deepcopy__": deep_copy,
        "__module__": plain.__module__,
    }
    return type(plain.__name__, (plain,), own)


def is_synchronised(module: nn.Module) -> bool:
    """Whether the layer was converted, so that its running averages are equal on all ranks by themselves."""
    return getattr(type(module), "is_synchronised", False)


def _forward(module: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    module._check_input_dim(x)
    y, mean, variance, count = _Normalize.apply(x, module.weight, module.bias, module.eps, group)  # type: ignore[misc]
    if module.running_mean is not None:
        module.num_batches_tracked.add_(1)
        factor = 1.0 / module.num_batches_tracked.to(mean.dtype) if module.momentum is None else module.momentum
        _move_averages(module.running_mean, module.running_var, mean, variance, count, factor)
    return y


@torch.no_grad()
def _move_averages(
    running_mean: Tensor, running_variance: Tensor, mean: Tensor, variance: Tensor, count: Tensor, factor: Any
) -> None:
    """Moves them by `factor` towards the batch's, and not at all when no rank had a sample."""
    factor = (count > 0).to(mean.dtype) * factor
    unbiased = variance * (count / (count - 1).clamp(min=1))
    running_mean.lerp_(mean.to(running_mean.dtype), factor.to(running_mean.dtype))
    running_variance.lerp_(unbiased.to(running_variance.dtype), factor.to(running_variance.dtype))


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any) -> Any:
        mean, variance, count = _global_statistics(x, group)
        if count.device.type == "cpu" and count == 1:  # elsewhere the look at the number would stop the device
            raise ValueError(f"Expected more than 1 value per channel when training, got 1 over all ranks ({x.shape})")
        if x.numel():
            wide_weight, wide_bias = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
            y = batch_norm(x, mean, variance, wide_weight, wide_bias, False, 0.0, eps)
        else:
            y = torch.empty_like(x)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return y, mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        x, weight, mean, inverse, count = ctx.saved_tensors
        wide = mean.dtype
        centered = x.to(wide) - _by_channel(mean, x)
        dy_wide = dy.to(wide)
        local = torch.stack([_sum(dy_wide), _sum(dy_wide * centered)])  # (2, channels)
        dx = None
        if ctx.needs_input_grad[0]:
            total = local.clone()
            dist.all_reduce(total, group=ctx.group)
            total /= count.clamp(min=1)
            scale = inverse if weight is None else inverse * weight.to(wide)
            dx = dy_wide - _by_channel(total[0], x)
            dx -= centered.mul_(_by_channel(total[1] * inverse.square(), x))
            dx = dx.mul_(_by_channel(scale, x)).to(x.dtype)
        if weight is None:
            return dx, None, None, None, None
        return dx, (local[1] * inverse).to(weight.dtype), local[0].to(weight.dtype), None, None


def _global_statistics(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel and the number of values, over all ranks; the same bits on each."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    num_channels, count = x.size(1), x.numel() // max(1, x.size(1))
    mine = wide.new_zeros(2 * num_channels + 1)
    mine[-1] = count
    if count:
        mean = _sum(wide) / count
        mine[:num_channels] = mean
        mine[num_channels:-1] = _sum((wide - _by_channel(mean, x)).square_())
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    return _combine(torch.stack(rows))


def _combine(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows: (ranks, 2 * channels + 1): mean, sum of squared deviations and count (Chan, Golub and LeVeque, 1979)."""
    means, squares = rows[:, :-1].chunk(2, dim=1)
    counts = rows[:, -1:]
    count = counts.sum()
    mean = (means * counts).sum(0) / count.clamp(min=1)
    deviation = (means - mean).square() * counts
    return mean, (squares + deviation).sum(0) / count.clamp(min=1), count


def _sum(x: Tensor) -> Tensor:
    return x.sum([dim for dim in range(x.dim()) if dim != 1])


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))
