"""The first operation of a forward pass that made a number out of which the loss became NaN or infinite.

Read from the graph of the loss, whose nodes keep what they need for backward; nothing is recorded before it happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from instep.launch.probe.operations import Saved, is_bad, is_there, judge, read_saved, short_name
from instep.launch.probe.wrapping import WRAPPERS

_MOST_NODES = 4000


@dataclass(frozen=True)
class Culprit:
    """name: of the operation, as `Log`; saved: what it kept; certain: its inputs were good and its result was not,
    otherwise it is the first whose input is bad already."""

    name: str
    why: str
    saved: Saved
    place: str
    overflow: bool
    certain: bool

    @property
    def largest(self) -> float:
        """Of the finite numbers that went into it."""
        kept = [value.detach() for value in self.saved.values() if isinstance(value, torch.Tensor)]
        finite = [value[torch.isfinite(value)].abs() for value in kept if value.is_floating_point()]
        return max((value.max().item() for value in finite if value.numel()), default=0.0)


def find_first_bad(loss: torch.Tensor) -> Culprit | None:
    nodes = _in_forward_order(loss.grad_fn)
    parameters = _parameter_names()
    seen_bad: Culprit | None = None
    for index, node in enumerate(nodes):
        saved = _with_operands(node, read_saved(node))
        name = short_name(node)
        found = judge(name, saved)
        if found is not None:
            return Culprit(name, found["why"], saved, _place(nodes, index, parameters), found["overflow"], True)
        if seen_bad is None and any(is_bad(value) for value in saved.values()):
            why = f"its input, the result of {_makers(node) or 'what comes before'}, is not finite already"
            seen_bad = Culprit(name, why, saved, _place(nodes, index, parameters), False, False)
    return seen_bad


def _in_forward_order(root: Any) -> list[Any]:
    """Nodes of the graph in the order in which the forward made them."""
    seen: set[Any] = set()
    queue = [root]
    while queue and len(seen) < _MOST_NODES:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [parent for parent, _ in node.next_functions]
    inner = [node for node in seen if not hasattr(node, "variable")]
    return sorted(inner, key=lambda node: node._sequence_nr())


def _with_operands(node: Any, saved: Saved) -> Saved:
    """A matrix product does not keep a factor whose partner needs no gradient: the weights of a first layer."""
    if short_name(node) == "Addmm" and not isinstance(saved.get("mat2"), torch.Tensor):
        weight = _leaf(node.next_functions[2][0])
        if weight is not None and is_there(weight):
            first = saved.get("mat1")
            dtype = first.dtype if isinstance(first, torch.Tensor) else weight.dtype  # autocast has cast the weights
            return saved | {"mat2": weight.detach().t().to(dtype)}
    return saved


def _leaf(node: Any) -> torch.Tensor | None:
    """The parameter behind a node, or behind its transposition or cast."""
    for _ in range(3):
        if node is None:
            return None
        if hasattr(node, "variable"):
            return node.variable
        if short_name(node) not in ("T", "Transpose", "ToCopy", "To"):
            return None
        node = node.next_functions[0][0]
    return None


def _makers(node: Any) -> str:
    names = [short_name(parent) for parent, _ in node.next_functions if parent is not None]
    return ", ".join(name for name in names if name not in ("AccumulateGrad", "T"))


def _parameter_names() -> dict[int, str]:
    names: dict[int, str] = {}
    for wrapped in WRAPPERS.all:
        model = wrapped.model()
        if model is not None:
            names |= {id(parameter): name for name, parameter in model.module.named_parameters()}
    return names


def _place(nodes: list[Any], index: int, names: dict[int, str]) -> str:
    """Where in the model: the module of its own parameters, else the modules before and after it."""
    own = _module_of(nodes[index], names)
    if own:
        return f"in {own}"
    before = next((found for node in reversed(nodes[:index]) if (found := _module_of(node, names))), None)
    after = next((found for node in nodes[index + 1 :] if (found := _module_of(node, names))), None)
    words = [f"after {before}" if before else "", f"before {after}" if after else ""]
    return ", ".join(word for word in words if word)


def _module_of(node: Any, names: dict[int, str]) -> str | None:
    for parent, _ in node.next_functions:
        leaf = _leaf(parent)
        if leaf is not None and id(leaf) in names:
            return names[id(leaf)].rpartition(".")[0] or names[id(leaf)]
    return None
