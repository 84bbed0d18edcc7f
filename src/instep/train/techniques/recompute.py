"""Recomputation of blocks (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016): a block keeps only its
inputs and runs a second time in backward, to the same numbers.

Only a block's own forward is replaced: what hooks do around it (gathering parameters, autocast) happens once, and the
object, its copies and its state_dict stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from instep.errors import UsageError
from instep.train.techniques.blocks import find_repeated, plain_forward
from instep.train.techniques.second_run import FirstRun, SecondRun
from instep.train.techniques.selective import keep_products


def read_recompute(value: object) -> int | str | None:
    """A `recompute=` argument: None, "selective", or k for every k-th block. Raises UsageError."""
    if value is None:
        return None
    if isinstance(value, str) and value in ("none", "blocks", "selective"):
        return {"none": None, "blocks": 1, "selective": "selective"}[value]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UsageError(
        f"recompute={value!r} is not possible. Allowed: 'blocks' (all), a whole number k (every k-th block), 'selective' "
        "(all, but matrix products and attention are kept), 'none', or None."
    )


def recompute_blocks(model: nn.Module, how: int | str) -> None:
    """how: as `read_recompute` gives it. Raises UsageError for a model in which no block repeats."""
    blocks = find_repeated(model)
    if not blocks:
        raise UsageError(
            f"recompute={how!r} found no block in {type(model).__name__}: blocks are members of a ModuleList, ModuleDict or "
            "Sequential that hold layers and occur at least twice as one class. Leave recompute out."
        )
    for block in blocks[:: how if isinstance(how, int) else 1]:
        recompute_block(block, selective=how == "selective")


def recompute_block(block: nn.Module, *, selective: bool = False) -> None:
    plain = plain_forward(block)
    written: dict[str, bool] = {}  # by buffer: whether forward writes it, learned in the first run

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(self, *args, **kwargs)
        args = tuple(map(_without_cache, args))
        kwargs = {key: key != "use_cache" and _without_cache(value) for key, value in kwargs.items()}
        contexts = partial(_contexts, self, written, selective)
        # Random generators are SecondRun's: checkpoint itself knows torch's, not Python's and numpy's.
        return checkpoint(
            partial(plain, self, **kwargs), *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    # As a bound method: copy.deepcopy binds it to the copy, and pickle finds the class's forward under its name.
    block.forward = MethodType(forward, block)


def _contexts(block: nn.Module, written: dict[str, bool], selective: bool) -> tuple[FirstRun, SecondRun]:
    modes: tuple[Any, Any] = keep_products() if selective else (None, None)
    first = FirstRun(block, written, modes[0])
    return first, SecondRun(first, modes[1])


def _without_cache(value: Any) -> Any:
    """None for the key-value cache that Hugging Face models hand to their blocks: a second run would add to it twice."""
    length: Callable[[], int] | None = getattr(value, "get_seq_length", None)
    if length is None or not hasattr(value, "update"):
        return value
    if length():
        raise UsageError(
            f"recompute runs blocks twice, and one got a {type(value).__name__} that holds {length()} positions already, "
            "which a second run would not find as they were. Leave recompute out, or train without past_key_values."
        )
    return None
