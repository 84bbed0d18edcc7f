"""What a stage receives and passes on, found by running the model's forward on tensors without numbers.

The forward is the user's, whole, in every stage. A module of an earlier stage gives a fake output at once; the fakes
among the arguments of the module that begins a stage are what that stage receives. So whatever the forward computes
from its inputs alone (positions, masks) is there in every stage, and nothing has to be written for a pipeline. What
forward holds in a variable and gives to each layer (an encoder's output to a decoder) goes along from stage to stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from instep.errors import UsageError
from instep.train.call_site import say_site, user_call_site
from instep.train.seeds import get_generators, restore_generators
from instep.train.techniques.pipeline.cut import Cuts
from instep.train.techniques.pipeline.fakes import (
    CannotCut,
    Mixed,
    Watch,
    explained,
    fake_like,
    has_fake,
    is_fake,
    modes_of,
    new_mode,
    with_short_graph,
    without_graph,
)
from instep.train.techniques.pipeline.generators import TORCH, find_drawn
from instep.train.techniques.pipeline.pieces import Piece, Pieces
from instep.train.techniques.pipeline.stage_times import StageClock

MOST_PLANS = 256  # shapes of inputs to remember


@dataclass(frozen=True)
class Carried:
    """A tensor that goes from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class Boundary:
    """places: which of the flattened arguments of the module that begins the stage come from the stage before."""

    places: list[int]
    carried: tuple[Carried, ...]
    fakes: list[Tensor]


@dataclass
class Plan:
    """For inputs of certain shapes. boundaries: of stages 1, 2, ...; outputs: of the units, in order of calls; borrowed: of
    parameters that forward may read outside of the modules that it calls, by their number in `_places`; draws: the generators
    that forward draws from; leaves, spec: of the model's output."""

    boundaries: list[Boundary] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    borrowed: dict[int, Tensor] = field(default_factory=dict)
    draws: tuple[str, ...] = ()
    leaves: list[Any] = field(default_factory=list)
    spec: TreeSpec | None = None

    @property
    def key(self) -> tuple[tuple[Carried, ...], ...]:
        """Plans with the same key move the same tensors between stages."""
        return tuple(boundary.carried for boundary in self.boundaries)


class Tracer:
    """Makes plans on a copy of the model that has no numbers. Make it before the model is cut; device: where stages run."""

    def __init__(self, model: nn.Module, cuts: Cuts, device: torch.device) -> None:
        memo: dict[int, Any] = {}
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        self._model = copy.deepcopy(model, memo)
        self._pieces = Pieces(self._model, cuts, frozenset(range(cuts.count)))
        self._cuts, self._device, self._kind = cuts, device, type(model).__name__
        self._plans: dict[Hashable, Plan] = {}
        self._modes: tuple[bool, ...] = ()
        self._pairs: list[tuple[nn.Module, nn.Module]] | None = None  # modules of the model, and their copies
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Takes up which modules of the model are in training mode. Before `plan`, when that may have changed."""
        if self._pairs is None:
            copies = dict(self._model.named_modules())
            self._pairs = [(module, copies[name]) for name, module in model.named_modules() if name in copies]
        modes = tuple([module.training for module, _ in self._pairs])
        if modes != self._modes:
            self._modes = modes
            for module, its_copy in self._pairs:
                its_copy.training = module.training

    def plan(self, args: Any, kwargs: Any) -> Plan:
        """Raises UsageError for a forward that cannot be cut there."""
        key = self._modes, _describe_inputs(args, kwargs)
        if key not in self._plans:
            if len(self._plans) == MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._make(args, kwargs)
        return self._plans[key]

    def _make(self, args: Any, kwargs: Any) -> Plan:
        generators = get_generators()
        names = ", ".join(map(repr, self._cuts.names))
        probe = Probe(self._cuts, self._device)
        places = _places(self._pieces)
        kept = [module._parameters[name] for module, name, _ in places]
        fakes = [probe.fake_of(stage, tensor) for tensor, (_, _, stage) in zip(kept, places) if tensor is not None]
        self._pieces.run = probe
        try:
            _put_parameters(places, fakes)
            with explained(f"{self._kind} cannot be cut before {names}"):
                with probe.watch:
                    output = self._model.forward(*args, **kwargs)
                plan = probe.finish(output)
            plan.draws += find_drawn(generators, get_generators())
        finally:
            self._pieces.run = None
            _put_parameters(places, kept)
            restore_generators(generators)
        called = {id(module) for unit in probe.called for module in unit.modules()}
        plan.borrowed = {i: fake for i, fake in enumerate(fakes) if id(places[i][0]) not in called}
        return plan


def _places(pieces: Pieces) -> list[tuple[nn.Module, str, int]]:
    """Where parameters are: module, name and stage."""
    return [*pieces.loose, *pieces.inner]


def _put_parameters(places: Sequence[tuple[nn.Module, str, int]], tensors: Sequence[Any]) -> None:
    for (module, name, _), tensor in zip(places, tensors, strict=True):
        module._parameters[name] = tensor


def _describe_inputs(args: Any, kwargs: Any) -> Hashable:
    leaves, spec = tree_flatten((args, kwargs))
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    found = [(v.shape, v.dtype, v.requires_grad) if isinstance(v, Tensor) else repr(v) for v in leaves]
    return repr((found, autocast)), str(spec), torch.is_grad_enabled()


class Passed:
    """What a stage received, by the objects that forward has in their place: its variables keep those of earlier stages."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Tensor]] = {}

    def enter(self, originals: list[Any], here: list[Tensor]) -> None:
        self._by_id = {id(one): (one, other) for one, other in zip(originals, here, strict=True)}

    def here(self, value: Any) -> Any:
        """The same with this stage's tensors."""
        return tree_map(lambda leaf: self._by_id[id(leaf)][1] if id(leaf) in self._by_id else leaf, value)


class Probe:
    """A run in which no piece has numbers."""

    def __init__(self, cuts: Cuts, device: torch.device) -> None:
        self.plan, self.watch = Plan(), Watch()
        self._cuts, self._device = cuts, device
        self._modes = [new_mode() for _ in range(cuts.count)]
        self._stage, self._is_inside, self._passed = 0, False, Passed()
        self.called: list[nn.Module] = []  # units

    def fake_of(self, stage: int, tensor: Tensor) -> Tensor:
        return fake_like(self._modes[stage], tensor, self._device, tensor.requires_grad)

    def call(self, piece: Piece, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_inside:
            return original(*args, **kwargs)
        if piece.entry is not None:
            args, kwargs = self._enter(piece, args, kwargs)
        if piece.stage is None:
            return original(*args, **kwargs)
        if piece.stage != self._stage:
            raise CannotCut(
                f"{piece.name} is registered in stage {piece.stage} and runs in stage {self._stage}",
                "Create the model's modules in the order in which forward uses them, or name other cut points, as "
                "Parallel(cut=['layers.4']).",
            )
        self.called.append(piece.module)
        holder = _Holder(piece.module, original)
        fakes = {
            f"module.{name}": self.fake_of(self._stage, tensor)
            for held in (piece.module.named_parameters(), piece.module.named_buffers())
            for name, tensor in held
        }
        args, kwargs = self._passed.here((args, kwargs))
        self._check_stage((args, kwargs))
        self._is_inside = True
        try:
            with self._modes[self._stage], self.watch:
                output = with_short_graph(functional_call(holder, fakes, args, kwargs))
        finally:
            self._is_inside = False
        self.plan.outputs.append(without_graph(output))
        return output

    def _check_stage(self, value: Any) -> None:
        """Whether all that is no input of the model comes from this stage."""
        if modes_of(value) - {id(self._modes[self._stage])}:
            raise Mixed

    def _enter(self, piece: Piece, args: Any, kwargs: Any) -> Any:
        if piece.entry != self._stage + 1:
            order = "twice" if piece.entry is not None and piece.entry <= self._stage else "before an earlier cut point"
            raise CannotCut(
                f"forward calls {piece.name} {order}", "Name other cut points, or take 'zero3', which cuts no model."
            )
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if is_fake(leaf)]
        if not places:
            raise CannotCut(
                f"nothing that an earlier stage computes is an argument of {piece.name}",
                "Give it what the modules before it have computed, or name other cut points.",
            )
        originals = [leaves[i] for i in places]
        found = self._passed.here(originals)
        self._check_stage(found)
        self._stage += 1
        carried = tuple(Carried(tuple(t.shape), t.dtype, t.requires_grad) for t in found)
        fakes = [self.fake_of(self._stage, tensor) for tensor in found]
        self.plan.boundaries.append(Boundary(places, carried, without_graph(fakes)))
        begun = with_short_graph(fakes)
        self._passed.enter(originals, begun)
        return _put(leaves, spec, places, begun)

    def finish(self, output: Any) -> Plan:
        if self._stage != self._cuts.count - 1:
            raise CannotCut(f"forward does not call {self._cuts.names[self._stage]}", "Name other cut points.")
        output = self._passed.here(output)
        earlier = modes_of(output) - {id(self._modes[self._stage])}
        if earlier:
            stage = next(i for i, mode in enumerate(self._modes) if id(mode) in earlier)
            raise CannotCut(
                f"forward returns what stage {stage} computes and no later stage is given",
                "Leave it out of what forward returns, pass it on as an argument of the modules behind, or name other cut points.",
            )
        self.plan.leaves, self.plan.spec = tree_flatten(output)
        self.plan.draws = (TORCH,) if self.watch.draws else ()
        return self.plan


class _Holder(nn.Module):
    """Runs a module's own forward with other tensors in the place of its parameters, and without its hooks."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _put(leaves: list[Any], spec: TreeSpec, places: list[int], values: list[Tensor]) -> Any:
    for place, value in zip(places, values):
        leaves[place] = value
    return tree_unflatten(leaves, spec)


# -- a stage with numbers


class _Left(BaseException):
    """The forward has come to the next stage. No Exception, so that a forward that catches those lets it pass."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors


class StageRun:
    """Runs one stage. received: what `plan` says that this stage receives; on_entry: called when the stage begins; clock:
    times its parts."""

    def __init__(
        self,
        plan: Plan,
        stage: int,
        received: list[Tensor],
        on_entry: Callable[[], None],
        clock: StageClock | None = None,
    ) -> None:
        self._plan, self._target, self._received, self._on_entry = plan, stage, received, on_entry
        self._clock = clock
        self._stage, self._outputs, self._is_inside, self.passed = 0, iter(plan.outputs), False, Passed()

    def call(self, piece: Piece, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_inside:
            return original(*args, **kwargs)
        if piece.entry is not None:
            args, kwargs = self._enter(piece, piece.entry, args, kwargs)
        if piece.stage is None:
            return original(*args, **kwargs)
        if self._stage < self._target:
            return next(self._outputs)
        if has_fake((args, kwargs)):
            args, kwargs = self.passed.here((args, kwargs))
        if piece.stage != self._stage or has_fake((args, kwargs)):
            raise _changed(piece)
        self._is_inside = True
        try:
            with nullcontext() if self._clock is None else self._clock.timing(piece.name):
                return original(*args, **kwargs)
        finally:
            self._is_inside = False

    def _enter(self, piece: Piece, entry: int, args: Any, kwargs: Any) -> Any:
        boundary = self._plan.boundaries[entry - 1]
        leaves, spec = tree_flatten((args, kwargs))
        originals = [leaves[place] for place in boundary.places]
        if entry > self._target:
            leaving = self.passed.here(originals)
            if has_fake(leaving):
                raise _changed(piece)
            raise _Left(leaving)
        self._stage = entry
        if entry < self._target:
            return _put(leaves, spec, boundary.places, boundary.fakes)
        self._on_entry()
        mine = [t.clone() if t.requires_grad else t for t in self._received]  # a module may write its input in place
        self.passed.enter(originals, mine)
        return _put(leaves, spec, boundary.places, mine)


def _changed(piece: Piece) -> UsageError:
    return UsageError(
        f"{piece.name} got other arguments{say_site(user_call_site())} than forward has given it for inputs of the same shapes: "
        "in a pipeline forward must do the same for every micro-batch."
    )


def run_stage(pieces: Pieces, forward: Callable[..., Any], run: StageRun, plan: Plan, args: Any, kwargs: Any) -> Any:
    """The model's output in the last stage, else the list of tensors for the next."""
    places = _places(pieces)
    others = [(places[i], fake) for i, fake in plan.borrowed.items() if places[i][2] != run._target]
    borrowing, fakes = [place for place, _ in others], [fake for _, fake in others]
    kept = [module._parameters[name] for module, name, _ in borrowing]
    pieces.run = run
    try:
        _put_parameters(borrowing, fakes)
        return run.passed.here(forward(*args, **kwargs))
    except _Left as left:
        return left.tensors
    finally:
        pieces.run = None
        _put_parameters(borrowing, kept)
