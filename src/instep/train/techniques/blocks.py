"""The blocks that a model repeats: what is recomputed, compiled or sharded one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn


def find_repeated(model: nn.Module) -> list[nn.Module]:
    """Members of a list, dictionary or sequence that occur there at least twice as one class; none inside another."""
    blocks: list[nn.Module] = []
    for parent in model.modules():
        if not isinstance(parent, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        if any(parent is inner for block in blocks for inner in block.modules()):
            continue
        children = list(parent.children())
        kinds = Counter(type(child) for child in children)
        blocks += [child for child in children if kinds[type(child)] > 1 and _has_depth(child)]
    return blocks


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Those that can be a unit of their own in sharding.

    A block that shares a parameter with something outside stays with the root, since two units cannot own one tensor.
    """
    owners = Counter(id(p) for unit in _uses(model) for p in unit)
    return [block for block in find_repeated(model) if all(owners[id(p)] == 1 for p in block.parameters())]


def plain_forward(block: nn.Module) -> Callable[..., Any]:
    """The block's forward as a function of the block and its arguments."""
    own = block.__dict__.get("forward")  # set on the object, as some libraries do
    if own is None:
        return type(block).forward
    if getattr(own, "__self__", None) is block:
        return own.__func__
    return lambda _, *args, **kwargs: own(*args, **kwargs)


def _has_depth(module: nn.Module) -> bool:
    """A block is made of layers; single layers are too small to be worth a gather of their own."""
    return any(True for child in module.children()) and any(True for _ in module.parameters())


def _uses(model: nn.Module) -> list[list[nn.Parameter]]:
    return [[p for p in module._parameters.values() if p is not None] for module in model.modules()]
