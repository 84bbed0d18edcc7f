"""Which layers of a model are split along the tensor axis, and how.

A plan is a style by the layer's name, with `*` for any one part of it, as PyTorch's parallelize_module takes it. It comes
from the user, from the model (as those of transformers bring one), or from what is recognised here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from instep.errors import UsageError
from instep.train.techniques.tensor.attention import Heads
from instep.train.techniques.tensor.known import known_styles
from instep.train.techniques.tensor.styles import (
    BY_NAME,
    Columns,
    Vocabulary,
    Whole,
    is_linear,
    num_outputs,
)

Plan = dict[str, ParallelStyle]
SMALL = (nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)


def find_plan(model: nn.Module, given: Mapping[str, Any] | None, degree: int) -> Plan:
    """Raises UsageError for a plan that does not fit the model, and for a layer of which nobody knows how to split it."""
    named = read_plan(model, given or {}, "Parallel(plan=...)")
    if given is not None and says_all(given):
        return named
    plan: Plan = {}
    declared = declared_plans(model)
    for name, styles in declared.items():
        inner = model.get_submodule(name)
        found = _only_even(inner, read_plan(inner, styles, f"the tp_plan of {type(inner).__name__}"), degree)
        plan.update({f"{name}.{key}".lstrip("."): style for key, style in found.items()})
    plan = _without(plan, list(named))
    if "" not in declared:
        plan.update(recognise(model, degree, [*named, *declared]))
    if not any(not isinstance(style, Whole) for style in plan.values()):
        raise UsageError(
            f"{type(model).__name__} has no layer that tensor={degree} could split: none of its linear layers has a number of "
            f"outputs that {degree} divides. Take another degree, or say how with Parallel(tensor={degree}, plan={{...}})."
        )
    return plan | named


def says_all(given: Mapping[str, Any]) -> bool:
    """Whether a plan says how to split; one that only keeps layers whole leaves the others to what is known of the model."""
    return not given or any(not isinstance(_style(value, key, "the plan"), Whole) for key, value in given.items())


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


def declared_plans(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By name of a module, "" for the model itself, what it brings; of modules inside each other the outer one's."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        if not any(other == "" or name.startswith(f"{other}.") for other in found) and (plan := _declared(module)):
            found[name] = plan
    return found


def _declared(module: nn.Module) -> dict[str, Any]:
    """`tp_plan` on a class of one's own, `_tp_plan` and its configuration's in transformers."""
    plan = getattr(module, "_tp_plan", None) or getattr(module, "tp_plan", None) or {}
    if not isinstance(plan, Mapping):  # a method or a layer of that name
        return {}
    if plan and not any("*" in key for key in plan) and hasattr(module, "config"):
        base = getattr(module.config, "base_model_tp_plan", None) or {}
        prefix = getattr(module, "base_model_prefix", "")
        inside = hasattr(module, prefix)
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


def _without(plan: Plan, whole: list[str]) -> Plan:
    """Without what stays whole, and without its partners: layers of one module that work on shares do so together."""
    parted = {name.rpartition(".")[0] for name in plan if _touches(name, whole)}
    alone = (Vocabulary, Whole)
    return {
        name: style
        for name, style in plan.items()
        if not _touches(name, whole)
        and (name.rpartition(".")[0] not in parted or isinstance(style, alone) or getattr(style, "gathered", False))
    }


def _touches(name: str, whole: list[str]) -> bool:
    """Whether one of them is this module, around it or inside it."""
    return any(name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.") for other in whole)


# -- what is recognised


def recognise(model: nn.Module, degree: int, whole: list[str]) -> Plan:
    """A plan for a model that brings none: pairs of layers where their roles are known, single layers elsewhere.

    whole: names of modules that stay so.
    """
    plan: Plan = {}
    modules = [(name, module) for name, module in model.named_modules() if not _is_in(name, whole)]
    for name, module in modules:
        found = {
            ".".join(filter(None, (name, key))): style for key, style in known_styles(name, module, degree).items()
        }
        if not any(_touches(key, whole) for key in found):
            plan.update(found)
    inside = tuple(f"{name}." for name, style in plan.items() if isinstance(style, Heads))
    for name, module in modules:
        if name in plan or name.startswith(inside or ("\0",)):
            continue
        if is_linear(module) and num_outputs(module) % degree == 0:
            plan[name] = Columns(gathered=True)
        elif not is_linear(module):
            _check_whole(name, module)
    _add_embeddings(model, plan, degree)
    return plan


def _is_in(name: str, whole: list[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in whole)


def _check_whole(name: str, module: nn.Module) -> None:
    """Raises UsageError for parameters that would lie whole on every rank without anyone having said so."""
    if isinstance(module, SMALL) or not name or _embeds_patches(module):
        return
    large = [key for key, p in module.named_parameters(recurse=False) if p.dim() > 1 and min(p.shape) > 1]
    if large and not any(module.children()):
        raise UsageError(
            f"no way is known to split {name}, a {type(module).__name__}, along the tensor axis. Say how with "
            f"Parallel(tensor=..., plan={{{name!r}: ...}}), keep it whole on every rank with plan={{{name!r}: 'whole'}}, or "
            "take shard= instead."
        )


def _embeds_patches(module: nn.Module) -> bool:
    """A convolution whose windows do not meet is a small table of embeddings, as at the start of a ViT."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return isinstance(module, convolutions) and module.kernel_size == module.stride and max(module.stride) > 1


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
