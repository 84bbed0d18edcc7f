"""Where a model is cut into stages: before which of its modules.

What a module list or sequence holds runs one after the other, so each member may begin a stage. Everything else belongs
to the stage that stands before it in the order in which modules are registered, which is the order of use in nearly
every model; `trace` checks that it is.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from instep.errors import UsageError

ALLOWED_MOST = 12  # candidates to show in a message
MEMORY_WEIGHT = (
    0.25  # of a parameter's memory beside its work: the slowest stage sets the pace, the fullest one only has to fit
)


@dataclass(frozen=True)
class Cuts:
    """names: of the modules that begin stages 1, 2, ...; stages: by the name of each parameter and buffer."""

    names: tuple[str, ...]
    stages: dict[str, int]

    @property
    def count(self) -> int:
        return len(self.names) + 1


def cut_model(model: nn.Module, num_stages: int, cut: Sequence[str] | None, asked: str, *, per_rank: int = 1) -> Cuts:
    """asked, per_rank: the split and a rank's stages, for messages. Raises UsageError for a model with too few parts, and for names it does not have."""
    names = _check_names(model, cut) if cut is not None else _choose(model, num_stages, asked, per_rank)
    return Cuts(names, stages_of(model, names))


def stages_of(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """The stage of each parameter and buffer, by name (a tied one has several). In the order of registration."""
    stages: dict[str, int] = {}
    stage = 0
    for prefix, module in model.named_modules(remove_duplicate=False):
        if prefix in names:
            stage = names.index(prefix) + 1
        for name, _ in _own_tensors(module):
            stages[f"{prefix}.{name}".lstrip(".")] = stage
    return stages


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, object]]:
    for held in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in held.items() if tensor is not None)


def _check_names(model: nn.Module, cut: Sequence[str]) -> tuple[str, ...]:
    order = {name: i for i, (name, _) in enumerate(model.named_modules()) if name}
    for name in cut:
        if name not in order:
            raise UsageError(
                f"Parallel(cut={list(cut)}): {type(model).__name__} has no module {name!r}. {_say_where(model, name)}"
            )
    return tuple(sorted(cut, key=order.__getitem__))


def _say_where(model: nn.Module, wanted: str) -> str:
    """Where it may be cut: the places with names like the one that was wanted, if there are some."""
    found = find_candidates(model)
    alike = difflib.get_close_matches(wanted, found, n=ALLOWED_MOST, cutoff=0.8)
    near = [name for name in found if name in alike] or found[:ALLOWED_MOST]
    return f"It may be cut before {', '.join(map(repr, near))}." if near else "Take names of named_modules()."


# -- candidates


def find_candidates(model: nn.Module) -> list[str]:
    """Names of the modules that may begin a stage, in order."""
    found = [name for name, _ in _chain(model, "")]
    return found if _holds_before(model, found) else found[1:]


def _holds_before(model: nn.Module, found: Sequence[str]) -> bool:
    """Whether something stands before the first of them, for a stage of its own."""
    return bool(found) and 0 in stages_of(model, found).values()


def _chain(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """Parts of a module that run one after the other."""
    children = [(f"{prefix}{name}", child) for name, child in module.named_children() if _has_parameters(child)]
    if isinstance(module, nn.Sequential):
        return [part for name, child in children for part in _chain_or_self(name, child)]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        kinds = Counter(type(child) for _, child in children)
        return children if children and max(kinds.values()) > 1 else []
    found: list[tuple[str, nn.Module]] = []
    for name, child in children:
        inner = _chain(child, f"{name}.") if _may_hold_chain(child) else []
        if len(inner) > 1:
            found += inner
        elif found:
            found.append((name, child))  # what comes after the first chain, as a head
    return found


def _chain_or_self(name: str, child: nn.Module) -> list[tuple[str, nn.Module]]:
    inner = _chain(child, f"{name}.") if isinstance(child, (nn.Sequential, nn.ModuleList)) else []
    return inner if len(inner) > 1 else [(name, child)]


def _may_hold_chain(module: nn.Module) -> bool:
    return any(isinstance(each, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) for each in module.modules())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


# -- where


def _choose(model: nn.Module, num_stages: int, asked: str, per_rank: int) -> tuple[str, ...]:
    candidates = find_candidates(model)
    if len(candidates) < num_stages - 1:
        raise UsageError(_too_few(model, candidates, num_stages, asked, per_rank))
    costs = _costs(model, candidates)
    bounds = split_evenly(costs, num_stages)
    return tuple(candidates[bound - 1] for bound in bounds)


def _too_few(model: nn.Module, candidates: list[str], num_stages: int, asked: str, per_rank: int) -> str:
    kind = type(model).__name__
    if not candidates:
        return (
            f"{asked} needs {num_stages} stages, but no parts of {kind} that run one after the other were found: it has no "
            "nn.Sequential, and no nn.ModuleList of one kind of blocks. Name the modules that begin a stage, as "
            "Parallel(pipeline=2, cut=['decoder'])."
        )
    most = len(candidates) + 1
    ways = [f"take pipeline={most // per_rank} at most"] if most // per_rank > 1 else []
    if per_rank > 1 and num_stages // per_rank <= most:
        ways.append("take schedule='1f1b', which has one stage per rank")
    ways += ["name other cut points with Parallel(cut=[...])", "take 'zero3', which cuts no model"]
    per = f" ({per_rank} per rank)" if per_rank > 1 else ""
    return (
        f"{asked} needs {num_stages} stages{per}, and {kind} can be cut into {most} at most: before "
        f"{', '.join(map(repr, candidates[:ALLOWED_MOST]))}. Either {', or '.join(ways)}."
    )


def _costs(model: nn.Module, candidates: Sequence[str]) -> list[float]:
    """Of what stands before the first candidate, and of each candidate with what follows it.

    A matrix counts for the time it works and a little for the memory it takes; a table of embeddings and a vector for memory
    only.
    """
    stages = stages_of(model, candidates)
    costs = [0.0] * (len(candidates) + 1)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        works = parameter.dim() > 1 and (id(parameter) not in tables or id(parameter) in seen)
        is_new = id(parameter) not in seen
        costs[stages[name]] += parameter.numel() * (MEMORY_WEIGHT * is_new + works)
        seen.add(id(parameter))
    return costs


def split_evenly(costs: Sequence[float], parts: int) -> list[int]:
    """Where parts 1, 2, ... begin, so that the dearest part is as cheap as can be, and then the squares add up to least."""
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[list[tuple[float, float, int]]] = [[(math.inf, math.inf, 0)] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = (0.0, 0.0, 0)
    for part in range(1, parts + 1):
        for end in range(part, count - (parts - part) + 1):
            best[part][end] = min(
                (max(most, sums[end] - sums[begin]), squares + (sums[end] - sums[begin]) ** 2, begin)
                for begin, (most, squares, _) in enumerate(best[part - 1][:end])
            )
    bounds, end = [], count
    for part in range(parts, 1, -1):
        end = best[part][end][2]
        bounds.append(end)
    return bounds[::-1]
