"""Dropout inside a split layer draws the mask that one process would draw, of which each rank takes its part.

Between a layer that is split by outputs and the one that is split by inputs, a rank holds its share of the features or
heads. A mask drawn for that share alone would be the same on all ranks, and none that one process draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from instep.train.techniques.blocks import plain_forward

HEADS_DIM = 1  # of (batch, heads, length, width)


class Region:
    """Where this rank stands on the tensor axis. inside: whether activations are shares at this moment; stretched_dim: along
    which dim they are stretches of sequences otherwise."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.inside = False
        self.stretched_dim: int | None = None
        self.guarded: dict[Callable[..., Any], Callable[..., Any]] = {}  # see guard_region
        self._entered: tuple[Tensor, bool, Tensor] | None = None

    def enter_once(self, x: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
        """Layers side by side that take the same input share its entry, so backward adds over ranks once."""
        if self._entered is None or self._entered[0] is not x or self._entered[1] != torch.is_grad_enabled():
            self._entered = x, torch.is_grad_enabled(), enter(x)
        return self._entered[2]

    def note_entered(self, x: Tensor) -> None:
        """Layers that take this input take it as it is."""
        self._entered = x, torch.is_grad_enabled(), x

    def leave(self) -> None:
        self.inside, self._entered = False, None

    def dropout(self, x: Tensor, p: float) -> Tensor:
        dim = HEADS_DIM if x.dim() == 4 else x.dim() - 1
        return x * self.mask(x, p, dim)

    def mask(self, like: Tensor, p: float, dim: int) -> Tensor:
        """This rank's part of the mask, which holds 0 and 1 / (1 - p). PyTorch draws in the order of memory."""
        shape = [*like.shape]
        shape[dim] *= self.size
        order = sorted(range(like.dim()), key=lambda d: -like.stride(d))  # outermost in memory first
        ones = torch.ones([shape[d] for d in order], dtype=like.dtype, device=like.device)
        whole = torch.dropout(ones, p, True).permute([order.index(d) for d in range(like.dim())])
        return whole.narrow(dim, self.rank * like.shape[dim], like.shape[dim])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, p: float, **options: Any) -> Tensor:
        """scaled_dot_product_attention with dropout on the weights; its kernels cannot take a mask of ours."""
        weights = attention_weights(query, key, **options)
        if options.get("enable_gqa"):
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        return self.dropout(weights, p) @ value


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As the reference in PyTorch's documentation of scaled_dot_product_attention."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_flag = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf")) if is_flag else scores + attn_mask
        empty = (scores == float("-inf")).all(-1, keepdim=True)  # rows that may look at nothing give zeros
        return scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return scores.softmax(-1)


class _Dropouts(TorchFunctionMode):
    """Takes over the calls that draw, while activations are shares."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and (self._region.inside or self._region.stretched_dim is not None):
            return self._dropout(*args, **kwargs)
        if self._region.inside and func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p > 0:
            return input
        if self._region.inside:
            return self._region.dropout(input, p)
        assert self._region.stretched_dim is not None
        return input * self._region.mask(input, p, self._region.stretched_dim)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        options = {**options, "attn_mask": attn_mask, "is_causal": is_causal}
        if dropout_p > 0:
            return self._region.attend(query, key, value, dropout_p, **options)
        return F.scaled_dot_product_attention(query, key, value, **options)


def guard_region(module: nn.Module, region: Region) -> None:
    """Makes the module's own forward draw whole masks, where it draws any; in place."""
    if not draws(module):
        return
    plain = plain_forward(module)
    if plain not in region.guarded:  # one function for all blocks of a class, so that a compiler meets it once
        region.guarded[plain] = _guard(plain, region)
    module.forward = MethodType(region.guarded[plain], module)


def _guard(plain: Callable[..., Any], region: Region) -> Callable[..., Any]:
    @wraps(plain)
    def guarded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            if not module.training:
                return plain(module, *args, **kwargs)
            with _Dropouts(region):
                return plain(module, *args, **kwargs)
        finally:
            region.leave()

    return guarded


def draws(module: nn.Module) -> bool:
    """Whether dropout is set to something, as a layer or as a number that its forward passes on."""
    layers = any(isinstance(inner, nn.Dropout) and inner.p > 0 for inner in module.modules())
    return layers or any("drop" in name and isinstance(p, float) and p > 0 for name, p in vars(module).items())
