"""Which layers of a model are split along the tensor axis, and how.

A plan is a style by the layer's name, with `*` for any one part of it, as PyTorch's parallelize_module takes it. It comes
from the user, from the model (as those of transformers bring one), or from what is recognised here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from instep.errors import UsageError
from instep.train.techniques.tensor.attention import Heads, check_attention
from instep.train.techniques.tensor.styles import (
    BY_NAME,
    Columns,
    Rows,
    Vocabulary,
    is_linear,
    is_transposed,
    num_inputs,
    num_outputs,
)

Plan = dict[str, ParallelStyle]
ELEMENTWISE = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Mish, nn.Softplus, nn.Hardswish),
    *(nn.ReLU6, nn.SELU, nn.CELU, nn.Identity, nn.Dropout),
)
SMALL = (nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)


def find_plan(model: nn.Module, given: Mapping[str, Any] | None, degree: int) -> Plan:
    """Raises UsageError for a plan that does not fit the model, and for a layer of which nobody knows how to split it."""
    if given is not None:
        return read_plan(model, given, "Parallel(plan=...)")
    declared = declared_plan(model)
    if declared:
        plan = _only_even(model, read_plan(model, declared, f"the tp_plan of {type(model).__name__}"), degree)
    else:
        plan = recognise(model, degree)
    return plan


def read_plan(model: nn.Module, given: Mapping[str, Any], of: str) -> Plan:
    """Names and styles in full. Later entries win."""
    names = [name for name, _ in model.named_modules() if name]
    plan: Plan = {}
    for pattern, value in given.items():
        found = [name for name in names if fits(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, names, 3, 0.3)
            hint = f" Near it: {', '.join(near)}." if near else ""
            raise UsageError(f"{of} names {pattern!r}, and the model has no such module.{hint}")
        plan.update({name: _style(value, pattern, of) for name in found})
    return plan


def fits(name: str, pattern: str) -> bool:
    """`layers.*.attention.q` fits `layers.3.attention.q`: a star stands for one part of a name."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _style(value: Any, pattern: str, of: str) -> ParallelStyle:
    if isinstance(value, ParallelStyle):
        return value
    if isinstance(value, str) and value in BY_NAME:
        return BY_NAME[value]()
    raise UsageError(
        f"{of} has {pattern!r}: {value!r}, which is no way to split a layer. Allowed: a ParallelStyle of "
        f"torch.distributed.tensor.parallel, or one of {', '.join(BY_NAME)}."
    )


def declared_plan(model: nn.Module) -> dict[str, Any]:
    """What the model brings: `tp_plan` on a model of one's own, `_tp_plan` and its configuration's in transformers."""
    plan = getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None) or {}
    if plan and not any("*" in key for key in plan) and hasattr(model, "config"):
        base = getattr(model.config, "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        inside = hasattr(model, prefix)
        plan = {**{f"{prefix}.{key}" if inside else key: value for key, value in base.items()}, **plan}
    return dict(plan)


def _only_even(model: nn.Module, plan: Plan, degree: int) -> Plan:
    """Without the layers at the ends, embeddings and heads, whose vocabulary does not divide: those stay whole."""
    kept: Plan = {}
    for name, style in plan.items():
        layer = model.get_submodule(name)
        uneven = isinstance(style, Vocabulary) and _rows(layer) % degree
        uneven = uneven or (isinstance(style, Columns) and style.gathered and num_outputs(layer) % degree)
        if not uneven:
            kept[name] = style
    return kept


def _rows(layer: Any) -> int:
    return layer.num_embeddings


# -- what is recognised


def recognise(model: nn.Module, degree: int) -> Plan:
    """A plan for a model that brings none: pairs of layers where their roles are known, single layers elsewhere."""
    plan: Plan = {}
    for name, module in model.named_modules():
        for key, style in _known(name, module, degree).items():
            plan[".".join(filter(None, (name, key)))] = style
    inside = tuple(f"{name}." for name, style in plan.items() if isinstance(style, Heads))
    for name, module in model.named_modules():
        if name in plan or name.startswith(inside or ("\0",)):
            continue
        if is_linear(module) and num_outputs(module) % degree == 0:
            plan[name] = Columns(gathered=True)
        elif not is_linear(module):
            _check_whole(name, module)
    if not plan:
        raise UsageError(
            f"{type(model).__name__} has no layer that tensor={degree} could split: none of its linear layers has a number of "
            f"outputs that {degree} divides. Take another degree, or say how with Parallel(tensor={degree}, plan={{...}})."
        )
    _add_embeddings(model, plan, degree)
    return plan


def _known(name: str, module: nn.Module, degree: int) -> Plan:
    """Styles for the layers inside a module whose forward is known."""
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return {"linear1": Columns(), "linear2": Rows()} if module.linear1.out_features % degree == 0 else {}
    if isinstance(module, nn.MultiheadAttention):
        check_attention(name, module)
        return {"": Heads()}
    if isinstance(module, nn.Sequential):
        return dict(_pairs(module, degree))
    if is_transposed(getattr(module, "c_proj", None) or module):  # GPT-2
        return _gpt2(module, degree)
    return {}


def _gpt2(module: nn.Module, degree: int) -> Plan:
    if hasattr(module, "c_attn") and hasattr(module, "split_size") and not hasattr(module, "q_attn"):
        return {"c_attn": Columns(3), "c_proj": Rows()}
    c_fc = getattr(module, "c_fc", None)
    return {"c_fc": Columns(), "c_proj": Rows()} if c_fc is not None and num_outputs(c_fc) % degree == 0 else {}


def _pairs(sequence: nn.Sequential, degree: int) -> Iterator[tuple[str, ParallelStyle]]:
    """Linear, what works on each element alone, Linear: split by outputs, then by inputs."""
    first: str | None = None
    for key, layer in sequence.named_children():
        if isinstance(layer, nn.Linear):
            if first is not None and num_inputs(layer) % degree == 0:
                yield from ((first, Columns()), (key, Rows()))
                first = None
            else:
                first = key
        elif not isinstance(layer, ELEMENTWISE):
            first = None


def _check_whole(name: str, module: nn.Module) -> None:
    """Raises UsageError for parameters that would lie whole on every rank without anyone having said so."""
    if isinstance(module, SMALL) or not name:
        return
    large = [key for key, p in module.named_parameters(recurse=False) if p.dim() > 1 and min(p.shape) > 1]
    if large and not any(module.children()):
        raise UsageError(
            f"no way is known to split {name}, a {type(module).__name__}, along the tensor axis. Say how with "
            f"Parallel(tensor=..., plan={{{name!r}: ...}}), keep it whole on every rank with plan={{{name!r}: 'whole'}}, or "
            "take shard= instead."
        )


def _add_embeddings(model: nn.Module, plan: Plan, degree: int) -> None:
    """Token embeddings: those that share their weight with a head that is split, and a transformers model's own."""
    heads = {id(model.get_submodule(name).weight) for name, style in plan.items() if isinstance(style, Columns)}
    ask = getattr(model, "get_input_embeddings", None)
    own = ask() if callable(ask) else None
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and (id(module.weight) in heads or module is own):
            plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
            if plain and module.num_embeddings % degree == 0:
                plan[name] = Vocabulary()
