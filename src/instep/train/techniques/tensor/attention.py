"""torch.nn.MultiheadAttention split by heads.

Its packed projections and its fast path do not work on DTensors, so the computation is written out here: each rank
projects to its heads, attends, and the output projection adds the ranks' contributions up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from instep.errors import UsageError
from instep.train.techniques.tensor.moves import add_up, enter, gather
from instep.train.techniques.tensor.regions import attention_weights
from instep.train.techniques.tensor.styles import Rows, Split, own_share

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class Heads(Split):
    """nn.MultiheadAttention by heads. memory_is_whole: where queries come in stretches, keys and values do not."""

    memory_is_whole = False

    def place(self, module: nn.Module) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        self._place_all(module, dict.fromkeys(("in_proj_weight", "in_proj_bias", *SEPARATE), Shard(0)))
        rows = Rows()
        rows.region = self.region
        rows.sequence_dim = None if self.sequence_dim is None else 0  # of what the heads give, lengths come first
        rows._apply(module.out_proj, self.mesh)

    def run(
        self,
        layer: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        is_batched = query.dim() == 3
        inputs = self._enter(_as_batches(layer, is_batched, query, key, value))
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as PyTorch's
        mask = _join_masks(layer, inputs, key_padding_mask, attn_mask)
        mask = mask if mask is None or mask.dim() < 4 or mask.shape[1] == 1 else self._own_heads(mask)
        mixed, weights = self._attend(layer, inputs, mask, need_weights)
        out = layer.out_proj(mixed)  # (length, batch, width), since dropout after it draws in the order of memory
        if weights is not None:
            weights = _report(weights, layer.num_heads, average_attn_weights, self.mesh)
        if not is_batched:
            return out[:, 0], None if weights is None else weights[0]
        return out.transpose(0, 1) if layer.batch_first else out, weights

    def _enter(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Each different input once."""
        dim = None if self.sequence_dim is None else 1
        memory_dim = None if self.memory_is_whole else dim
        query = enter(inputs[0], self.mesh, dim)
        key = query if inputs[1] is inputs[0] else enter(inputs[1], self.mesh, memory_dim)
        if inputs[2] is inputs[0] or inputs[2] is inputs[1]:
            return query, key, query if inputs[2] is inputs[0] else key
        return query, key, enter(inputs[2], self.mesh, memory_dim)

    def _own_heads(self, mask: Tensor) -> Tensor:
        count = mask.shape[1] // self.region.size
        return mask.narrow(1, self.region.rank * count, count)

    def _attend(
        self,
        module: nn.MultiheadAttention,
        inputs: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (self._split(module, x) for x in _project(module, self.mesh, inputs))
        p = module.dropout if module.training else 0.0
        if not need_weights and not p:
            mixed, weights = F.scaled_dot_product_attention(query, key, value, attn_mask=mask), None
        else:
            weights = attention_weights(query, key, attn_mask=mask)
            weights = self.region.dropout(weights, p) if p else weights
            mixed = weights @ value
        return mixed.permute(2, 0, 1, 3).flatten(2), weights if need_weights else None

    def _split(self, module: nn.MultiheadAttention, x: Tensor) -> Tensor:
        """(batch, length, share) -> (batch, own heads, length, width of a head)"""
        return x.view(*x.shape[:-1], -1, module.head_dim).transpose(1, 2)

    def __repr__(self) -> str:
        return "Heads()"


def check_attention(name: str, module: nn.MultiheadAttention) -> None:
    if module.bias_k is not None or module.add_zero_attn:
        raise UsageError(
            f"{name} is a MultiheadAttention with add_bias_kv or add_zero_attn, for which no way to split it by heads is "
            "built. Leave both out, or keep the layer whole: Parallel(tensor=..., plan={..., "
            f"{name!r}: 'whole'}})."
        )


def _as_batches(module: nn.MultiheadAttention, is_batched: bool, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, length, width), whatever the layer's convention; what is one tensor stays one."""
    if is_batched and module.batch_first:
        query, key, value = inputs
    else:
        query = inputs[0].transpose(0, 1) if is_batched else inputs[0][None]
        key = query if inputs[1] is inputs[0] else inputs[1].transpose(0, 1) if is_batched else inputs[1][None]
        value = key if inputs[2] is inputs[1] else inputs[2].transpose(0, 1) if is_batched else inputs[2][None]
    return query, key, value


def _project(
    module: nn.MultiheadAttention, mesh: DeviceMesh, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Queries, keys and values of this rank's heads."""
    if module.in_proj_weight is not None:
        weights = own_share(module.in_proj_weight, 0, 3, mesh).chunk(3)
    else:
        weights = [own_share(getattr(module, name), 0, 1, mesh) for name in SEPARATE]
    bias = module.in_proj_bias
    biases = (None, None, None) if bias is None else own_share(bias, 0, 3, mesh).chunk(3)
    return tuple(F.linear(x, weight, b) for x, weight, b in zip(inputs, weights, biases))


def _join_masks(
    module: nn.MultiheadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    padding: Tensor | None,
    mask: Tensor | None,
) -> Tensor | None:
    """One mask to add to the scores, (batch or 1, heads or 1, length, keys); None for none."""
    query, key, _ = inputs
    batch, length, keys = query.shape[0], query.shape[1], key.shape[1]
    joined: Tensor | None = None
    if mask is not None:
        mask = _to_add(mask, query.dtype)
        joined = mask.view(batch, module.num_heads, length, keys) if mask.dim() == 3 else mask.view(1, 1, length, keys)
    if padding is not None:
        padding = _to_add(padding, query.dtype).view(batch, 1, 1, keys)
        joined = padding if joined is None else joined + padding
    return joined


def _to_add(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))


def _report(weights: Tensor, num_heads: int, average: bool, mesh: DeviceMesh) -> Tensor:
    """The weights as the caller wants them: their mean over all heads, or those of all heads."""
    if average:
        return add_up(weights.sum(1) / num_heads, mesh)
    return gather(weights, mesh, 1)
