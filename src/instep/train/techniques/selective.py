"""Selective recomputation: results of matrix products and attention are kept, all that is cheap runs again
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm")
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
)


def keep_products() -> tuple[Any, Any]:
    """A fresh pair of modes, for the first and the second run of a block."""
    return create_selective_checkpoint_contexts(choose)


def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operator in expensive_operators() and not draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def expensive_operators() -> frozenset[Any]:
    """Those that this version of torch has."""
    found = [getattr(torch.ops.aten, name, None) for name in (*PRODUCTS, *ATTENTION)]
    return frozenset(packet.default for packet in found if packet is not None and "default" in packet.overloads())


def draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention with dropout inside: were its result kept, the second run would not draw, and later masks would shift."""
    position = _dropout_position(operator)
    if position is None:
        return False
    return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


@cache
def _dropout_position(operator: Any) -> int | None:
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None
