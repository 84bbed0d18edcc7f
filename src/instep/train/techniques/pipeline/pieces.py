"""The parts of a model that a stage runs or leaves out as a whole, with their forward under control."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from instep.errors import UsageError
from instep.train.call_site import say_site, user_call_site
from instep.train.techniques.pipeline.cut import Cuts


@dataclass(frozen=True)
class Piece:
    """stage: whose module this is, None for one that has parts in several; entry: the stage that begins with it; is_unit: no
    module around it lies in one stage as well."""

    name: str
    module: nn.Module
    stage: int | None
    entry: int | None = None
    is_unit: bool = False


class Run(Protocol):
    """One run of the model's forward, of which only some pieces are computed."""

    def call(self, piece: Piece, original: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


class Pieces:
    """Takes over the forward of a model's pieces. While no run is under way they work as before.

    held: the stages whose parameters are here. loose, inner: where parameters are, outside of units and in them.
    """

    def __init__(self, model: nn.Module, cuts: Cuts, held: frozenset[int]) -> None:
        self.run: Run | None = None
        self._held = held
        self.all = find_pieces(model, cuts)
        self.loose = find_loose(model, cuts, {id(piece.module) for piece in self.all if piece.stage is not None})
        self.inner = [place for piece in self.all if piece.is_unit for place in _parameters_of(piece)]
        self._before = [piece.module.__dict__.get("forward") for piece in self.all]
        for piece in self.all:
            self._take_over(piece)

    def close(self) -> None:
        for piece, before in zip(self.all, self._before):
            piece.module.__dict__.pop("forward", None)
            if before is not None:
                piece.module.forward = before

    def _take_over(self, piece: Piece) -> None:
        original = piece.module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.run is not None:
                return self.run.call(piece, original, args, kwargs)
            if piece.stage is not None and piece.stage not in self._held:
                raise UsageError(
                    f"{piece.name} is called{say_site(user_call_site())}, and it is in stage {piece.stage} of the pipeline, which this "
                    "rank does not hold. Call the whole model, which all ranks of the pipeline do together."
                )
            return original(*args, **kwargs)

        piece.module.forward = forward


def find_pieces(model: nn.Module, cuts: Cuts) -> list[Piece]:
    """The modules that lie in one stage, with those inside them, and the modules that begin one."""
    entries = {name: number + 1 for number, name in enumerate(cuts.names)}
    found: dict[int, Piece] = {}

    def visit(module: nn.Module, name: str, inside: bool) -> None:
        if id(module) in found:
            return
        begins = [key for key in entries if key.startswith(f"{name}.")] if name else list(entries)
        stages = {cuts.stages[key] for key in _tensor_names(module, name)}
        is_whole = len(stages) == 1 and not begins and _has_state(module) and _is_callable(module)
        if is_whole or name in entries:
            stage = stages.pop() if is_whole else None
            found[id(module)] = Piece(name, module, stage, entries.get(name), is_whole and not inside)
        for child, each in module.named_children():
            visit(each, f"{name}.{child}".lstrip("."), inside or is_whole)

    visit(model, "", False)
    return list(found.values())


def _is_callable(module: nn.Module) -> bool:
    """Lists of modules have no forward, and are never called."""
    return type(module).forward is not nn.Module.forward


def find_loose(model: nn.Module, cuts: Cuts, units: set[int]) -> list[tuple[nn.Module, str, int]]:
    """Parameters that belong to no unit, as those of the model itself: module, name and stage."""
    found: list[tuple[nn.Module, str, int]] = []

    def visit(module: nn.Module, prefix: str) -> None:
        if id(module) in units:
            return
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.append((module, name, cuts.stages[f"{prefix}{name}"]))
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.")

    visit(model, "")
    return found


def _parameters_of(piece: Piece) -> list[tuple[nn.Module, str, int]]:
    assert piece.stage is not None
    modules = piece.module.modules()
    return [(m, name, piece.stage) for m in modules for name, held in m._parameters.items() if held is not None]


def _tensor_names(module: nn.Module, prefix: str) -> list[str]:
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    return [f"{prefix}.{name}".lstrip(".") for name in names]


def _has_state(module: nn.Module) -> bool:
    """Parameters, or statistics that forward writes. Constant buffers alone, as of rotary embeddings, are for all stages."""
    return any(True for _ in module.parameters()) or any(isinstance(each, _NormBase) for each in module.modules())
