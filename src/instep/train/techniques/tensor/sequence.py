"""Between split layers, each rank holds a stretch of every sequence (Korthikanti et al., 2022).

Norms, residual sums and dropout are then done once, not on every rank, and their activations take a share of the memory.
The sums after a split pair leave each rank its stretch, and the next pair brings the stretches together: as many bytes as
the sums alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from instep.errors import UsageError
from instep.train.techniques.blocks import find_blocks, plain_forward
from instep.train.techniques.tensor.attention import Heads
from instep.train.techniques.tensor.known import is_of_transformers
from instep.train.techniques.tensor.moves import bring_together, gather, take_part
from instep.train.techniques.tensor.plan import Plan
from instep.train.techniques.tensor.regions import Region, guard_region
from instep.train.techniques.tensor.styles import Columns, OnShares, Rows, Whole

MEMORY = "multihead_attn"  # of nn.TransformerDecoderLayer: its keys and values are the encoder's outputs


def find_stacks(model: nn.Module, plan: Plan) -> list[list[str]]:
    """Names of blocks that follow each other and hold split layers. Raises UsageError where there are none."""
    names = {id(module): name for name, module in model.named_modules()}
    stacks: dict[str, list[str]] = {}
    for block in find_blocks(model):
        name = names[id(block)]
        if any(key.startswith(f"{name}.") for key in plan):
            stacks.setdefault(name.rpartition(".")[0], []).append(name)
    if not stacks:
        raise UsageError(
            f"sequence=True works on blocks that the model repeats, one after another, and {type(model).__name__} has none that "
            "are split. Leave it out."
        )
    return list(stacks.values())


def plan_sequence(model: nn.Module, plan: Plan, stacks: list[list[str]]) -> None:
    """Adds to the plan what lies between the split layers of each block. Raises UsageError for what is not known."""
    for name in (name for stack in stacks for name in stack):
        block = model.get_submodule(name)
        dim = sequence_dim(block)
        for key, module in block.named_modules():
            full = f"{name}.{key}".rstrip(".")
            style = plan.get(full)
            if isinstance(style, Columns) and style.gathered:
                raise UsageError(
                    f"sequence=True needs pairs of split layers, and {full} is split alone, since its neighbours are not known. Give "
                    "a plan, Parallel(plan=...), or leave sequence out."
                )
            if isinstance(style, (Rows, Heads)) or (isinstance(style, Columns) and "." not in key):
                style.sequence_dim = dim
                if isinstance(style, Heads):
                    style.memory_is_whole = key == MEMORY and isinstance(block, nn.TransformerDecoderLayer)
            elif isinstance(style, Whole) or (style is None and _is_norm(module)):
                plan[full] = OnShares()
            elif style is None and _holds_parameters(module) and not _is_inside(full, plan):
                raise UsageError(
                    f"sequence=True does not know what {full}, a {type(module).__name__}, does with a stretch of a sequence. Leave "
                    "sequence out."
                )


def sequence_dim(block: nn.Module) -> int:
    """Sequences come first in PyTorch's own layers, unless they say otherwise."""
    attention = getattr(block, "self_attn", None)
    return 0 if isinstance(attention, nn.MultiheadAttention) and not attention.batch_first else 1


def _is_norm(module: nn.Module) -> bool:
    """A layer whose parameters meet each position alike."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(module.children()) and all(p.dim() == 1 for p in own)


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _is_inside(name: str, plan: Plan) -> bool:
    return any(name.startswith(f"{key}.") and isinstance(style, Heads) for key, style in plan.items())


def spread_sequences(
    model: nn.Module, stacks: list[list[str]], owners: list[str], mesh: DeviceMesh, region: Region
) -> None:
    """Makes the blocks of each stack hand on stretches, in place. owners: modules around split pairs."""
    for stack in stacks:
        for i, name in enumerate(stack):
            block = model.get_submodule(name)
            for owner in owners:
                if owner.startswith(f"{name}."):
                    _bring_input_together(model.get_submodule(owner), mesh, sequence_dim(block), region)
            if name not in owners:
                guard_region(block, region)
            _run_on_stretch(block, name, mesh, region, (i == 0, i == len(stack) - 1))


def _bring_input_together(module: nn.Module, mesh: DeviceMesh, dim: int, region: Region) -> None:
    """What the module gets is whole; its split layers take it as it is, and backward leaves each rank its stretch."""

    def bring(x: Tensor) -> Tensor:
        whole = bring_together(x, mesh, dim)
        region.note_entered(whole)
        return whole

    plain = plain_forward(module)

    @wraps(plain)
    def on_whole(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_first(bring, args, kwargs)
        return plain(self, *args, **kwargs)

    module.forward = MethodType(on_whole, module)


def _run_on_stretch(block: nn.Module, name: str, mesh: DeviceMesh, region: Region, ends: tuple[bool, bool]) -> None:
    """ends: whether it is the first of its stack, and the last."""
    dim = sequence_dim(block)
    plain = plain_forward(block)

    def cut(x: Tensor) -> Tensor:
        check_length(x.shape[dim], mesh.size())
        return take_part(x, mesh, dim)

    @wraps(plain)
    def on_stretch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if ends[0]:
            args, kwargs = _with_first(cut, args, kwargs)
        region.stretched_dim = dim
        try:
            out = plain(self, *args, **kwargs)
        finally:
            region.stretched_dim = None
        rest: tuple[Any, ...] | None = None
        if not isinstance(out, Tensor):
            out, rest = _first_of(out, name, self)
        out = gather(out, mesh, dim) if ends[1] else out
        return out if rest is None else (out, *rest)

    block.forward = MethodType(on_stretch, block)


def _with_first(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another first tensor: the activation, which what comes after it (masks, tables) accompanies."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    key = "hidden_states" if "hidden_states" in kwargs else next(k for k, v in kwargs.items() if isinstance(v, Tensor))
    return args, {**kwargs, key: change(kwargs[key])}


def _first_of(out: Any, name: str, block: nn.Module) -> tuple[Tensor, tuple[Any, ...]]:
    """In transformers a block's output comes before what belongs to its attention, which saw the whole sequence."""
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor) and is_of_transformers(block):
        return out[0], out[1:]
    raise UsageError(
        f"sequence=True needs blocks that hand on one tensor, and {name}, a {type(block).__name__}, returned a "
        f"{type(out).__name__}, of which it is not known what lies in stretches. Leave sequence out."
    )


def check_length(length: int, degree: int) -> None:
    if length % degree:
        raise UsageError(
            f"a sequence of {length} cannot be cut in {degree} equal stretches, as sequence=True does with tensor={degree}. Pad to a "
            f"multiple of {degree}, such as {-(-length // degree) * degree}, or leave sequence out."
        )
