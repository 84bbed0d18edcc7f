"""Optimizers: the line that made each, whether its parameters ever get gradients, and parameters that no
DistributedDataParallel averages: whether the script averages their gradients itself, and whether the ranks stay equal."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from instep.launch.probe.fingerprints import is_early, print_tensors
from instep.launch.probe.memory import user_frames
from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.wrapping import TRAFFIC, WRAPPERS

_COUNTED_STEPS = 40  # steps of an optimizer in which averages by hand are followed
_COMPARED_STEPS = 6  # of which a gradient before and after is compared
_LAST_PRINTED, _NEVER = 4096, 1 << 60
_MOST_PARAMETERS = 400
_AVERAGE_UNSEEN = ("instep.train.run", "deepspeed", "horovod")  # by shared memory or collectives of their own


class Followed:
    """One optimizer. plain: its parameters outside of all wrapped models, by name."""

    def __init__(self, number: int, site: int, names: dict[int, str], is_sharded: bool) -> None:
        self.number, self.site, self.names, self.is_sharded = number, site, names, is_sharded
        self.steps = self.empty_steps = 0  # steps: up to the last that was looked at
        self.next_step = 1
        self.plain: list[tuple[str, torch.Tensor]] = []
        self.by_size: dict[int, list[int]] = {}
        self.total = 0
        self.is_described = self.is_alone = False
        self.sharded_ranks = 0  # that share one model by fully_shard
        self.begin_step()

    def begin_step(self) -> None:
        self.reduced: set[int] = set()
        self.reduced_at = self.backwards_then = 0
        self.before: tuple[int, list[float]] | None = None  # a parameter, and its gradient before the ranks join it

    def describe(self, optimizer: Any, wrapped_ids: set[int]) -> None:
        """After the first steps, when models have been wrapped and gradients are there."""
        self.is_described = True
        parameters = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor)]
        self.is_alone = not any(id(p) in wrapped_ids for p in parameters)
        meshes = [mesh for p in parameters if (mesh := getattr(p, "device_mesh", None)) is not None]
        if meshes:  # sharded: the ranks rightly hold different parts
            self.sharded_ranks = meshes[0].size() if self.is_sharded and meshes[0].ndim == 1 else 0
            return
        outside = [p for p in parameters if id(p) not in wrapped_ids][:_MOST_PARAMETERS]
        self.plain = [(self.names.get(id(p), f"parameter {index}"), p) for index, p in enumerate(outside)]
        for index, (_, parameter) in enumerate(self.plain):
            self.by_size.setdefault(parameter.numel(), []).append(index)
        self.total = sum(p.numel() for _, p in self.plain)

    def note_traffic(self, tensor: torch.Tensor, site: int, backwards: int) -> None:
        """Looks whether a collective's tensor is the gradient of a parameter, or a flat copy of a good part of them."""
        pointer, elements = tensor.data_ptr(), tensor.numel()
        found = [
            index
            for index in self.by_size.get(elements, ())
            if (gradient := self.plain[index][1].grad) is not None and gradient.data_ptr() == pointer
        ]
        if not found and 4 * elements >= self.total > 64 and tensor.is_floating_point():
            owned = any(p.data_ptr() == pointer for _, p in self.plain)
            found = [] if owned else list(range(len(self.plain)))
        if not found:
            return
        self.reduced.update(found)
        self.reduced_at, self.backwards_then = site, backwards
        if len(found) == 1 and self.before is None and self.steps < _COMPARED_STEPS:
            sample = sample_of(tensor)
            self.before = (found[0], sample) if any(sample) else None


class Optimizers:
    """The optimizers of this rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.known: weakref.WeakKeyDictionary[Any, Followed] = weakref.WeakKeyDictionary()
        self.made = 0
        self._left: dict[int, int] = {}  # by optimizer: steps until it is looked at again

    def is_busy(self) -> bool:
        """Whether parameters are still to be compared in certain steps."""
        return any(one.plain and one.next_step < _NEVER for one in self.known.values())

    def is_turn(self, key: int) -> bool:
        """Whether to look at this optimizer, by its id, before this step of it."""
        left = self._left.get(key, 0)
        if left:
            self._left[key] = left - 1
        return not left

    @contained
    def add(self, optimizer: Any, site: int) -> None:
        self.made += 1
        groups = optimizer.param_groups
        modules = [row for _, values in user_frames(sys._getframe(3)) for row in _modules_in(values)]
        names, is_sharded = _names_of(modules, groups), any(_is_sharded(module) for _, module in modules)
        self.known[optimizer] = Followed(self.made, site, names, is_sharded)
        self._left.pop(id(optimizer), None)  # of one that has gone
        self._recorder.wake()

    @contained
    def before_step(self, optimizer: Any) -> None:
        followed = self.known.get(optimizer)
        if followed is None or self._recorder.world_size < 2:
            self._left[id(optimizer)] = _NEVER
            return
        followed.steps = step = followed.next_step
        followed.next_step = next_turn(step)
        self._left[id(optimizer)] = followed.next_step - step - 1
        if step == 1:
            followed.describe(optimizer, {i for one in WRAPPERS.all for i in one.ids})
            self._note_made(followed)
            if followed.sharded_ranks:
                self._recorder.log.note("sharded", ranks=followed.sharded_ranks, site=followed.site)
        if step <= _COUNTED_STEPS:
            self._look_at_gradients(followed, optimizer)
        if followed.plain and is_printed(step):
            values = print_tensors([p for _, p in followed.plain])
            self._recorder.log.note("plain-print", optimizer=followed.number, count=step, values=values)

    def _note_made(self, followed: Followed) -> None:
        rows = [(name, list(p.shape)) for name, p in followed.plain]
        self._recorder.log.note(
            "optimizer",
            optimizer=followed.number,
            site=followed.site,
            alone=followed.is_alone,
            names=[name for name, _ in rows],
            shapes=[shape for _, shape in rows],
            unseen=[name for name in _AVERAGE_UNSEEN if name in sys.modules],
        )

    def _look_at_gradients(self, followed: Followed, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(getattr(p, "grad", None) is None for p in parameters):
            followed.empty_steps += 1
            trained = any(p.grad is not None for one in WRAPPERS.all for p in one.present_parameters()[:8])
            if followed.empty_steps == followed.steps and followed.steps in (8, _COUNTED_STEPS):
                self._recorder.log.note("empty-steps", optimizer=followed.number, steps=followed.steps, trained=trained)
        if followed.plain:
            self._note_average(followed)
        followed.begin_step()

    def _note_average(self, followed: Followed) -> None:
        with_gradient = [index for index, (_, p) in enumerate(followed.plain) if p.grad is not None]
        missed = [followed.plain[index][0] for index in with_gradient if index not in followed.reduced]
        before = followed.before
        self._recorder.log.note(
            "average-by-hand",
            optimizer=followed.number,
            site=followed.reduced_at,
            reduced=len(followed.reduced),
            missed=missed[:20],
            of=len(with_gradient),
            later_backwards=self._recorder.backwards - followed.backwards_then if followed.reduced else 0,
            before=before[1] if before is not None else [],
            used=sample_of(followed.plain[before[0]][1].grad) if before is not None else [],
        )

    @contained
    def note_traffic(self, tensor: torch.Tensor, site: int) -> None:
        """Before a collective with this tensor."""
        for one in self.known.values():
            if one.plain and one.steps <= _COUNTED_STEPS:
                one.note_traffic(tensor, site, self._recorder.backwards)


def is_printed(step: int) -> bool:
    return step <= 2 or (step >= 4 and is_early(step))


def next_turn(step: int) -> int:
    """Number of the next step that is looked at, counted from 1."""
    if step <= _COUNTED_STEPS:
        return step + 1
    return next((later for later in range(step + 1, _LAST_PRINTED + 1) if is_printed(later)), _NEVER)


def watch_plain_models(recorder: Recorder) -> None:
    optimizers = Optimizers(recorder)
    recorder.keeps_awake.append(optimizers.is_busy)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not recorder.only_counts and optimizers.is_turn(id(optimizer)):
            optimizers.before_step(optimizer)

    replace(Optimizer, "__init__", lambda original: _wrap_made(recorder, optimizers, original))
    register_optimizer_step_pre_hook(before)
    TRAFFIC.append(optimizers.note_traffic)


def _wrap_made(recorder: Recorder, optimizers: Optimizers, original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        site = recorder.sites.here(1)
        original(self, *args, **kwargs)
        optimizers.add(self, site)

    return __init__


def sample_of(tensor: torch.Tensor | None) -> list[float]:
    if tensor is None or not tensor.is_cpu or not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return []
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 8)][:8].tolist()


def _names_of(modules: list[tuple[str, torch.nn.Module]], groups: list[dict[str, Any]]) -> dict[int, str]:
    """Names of parameters, from modules in the variables of the script's frames: an optimizer is given none."""
    wanted = {id(p) for group in groups for p in group["params"]}
    names: dict[int, str] = {}
    for word, module in modules:
        names = {id(p): f"{word}.{name}" for name, p in module.named_parameters() if id(p) in wanted} | names
    return names


def _is_sharded(module: torch.nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def _modules_in(values: dict[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    for word, value in values.items():
        if isinstance(value, torch.nn.Module):
            yield word, value
        elif word == "self" and hasattr(value, "__dict__"):
            yield from ((f"self.{key}", one) for key, one in vars(value).items() if isinstance(one, torch.nn.Module))
