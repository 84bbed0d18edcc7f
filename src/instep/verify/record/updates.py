"""Optimizer steps: gradients as they are used, parameters before and after, learning rates, buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instep.verify.record.forwards import WRAPPED
from instep.verify.record.gradients import Scaling, capture_reduced, wrapper_of
from instep.verify.record.patch import replace
from instep.verify.record.pieces import gather_whole, is_piece
from instep.verify.record.prints import digest, print_tensor
from instep.verify.record.state import Recording, digests_of, named, plain_name, prints_of, unwrap, users_line


class Steps:
    """The optimizer step that is open, and what is known of each optimizer."""

    def __init__(self) -> None:
        self.open: int | None = None
        self.facts: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}
        self.bits: dict[int, str] = {}  # of parameters after their last step, to notice a change by others
        self.in_scheduler = False


def record_updates(recording: Recording, scaling: Scaling) -> None:
    steps = Steps()

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if steps.open is None and not recording.closed and not recording.is_done:
            steps.open = id(
                optimizer
            )  # a step inside another one, as in ZeroRedundancyOptimizer, is no step of its own
            _before(recording, steps, scaling, optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if steps.open == id(optimizer):
            steps.open = None
            _after(recording, steps, optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    for kind in (lr_scheduler.LRScheduler, *_own_steps(lr_scheduler.LRScheduler)):
        replace((kind,), "step", lambda original: _wrap_schedule(recording, steps, original))


def _own_steps(kind: type) -> list[type]:
    """Scheduler classes that have a `step` of their own."""
    found = []
    for child in kind.__subclasses__():
        found += [child] if "step" in vars(child) else []
        found += _own_steps(child)
    return found


def _wrap_schedule(recording: Recording, steps: Steps, original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if steps.in_scheduler:
            return original(self, *args, **kwargs)
        steps.in_scheduler = True
        recording.step["scheduled"] += 1
        recording.step["scheduler_line"] = users_line()
        try:
            return original(self, *args, **kwargs)
        finally:
            steps.in_scheduler = False

    return step


def _before(recording: Recording, steps: Steps, scaling: Scaling, optimizer: torch.optim.Optimizer) -> None:
    parameters = named(recording, optimizer)
    is_first = id(optimizer) not in recording.optimizers
    if is_first:
        recording.optimizers.append(id(optimizer))
    changed = [n for n, p in parameters.items() if id(p) in steps.bits and steps.bits[id(p)] != digest(p)]
    capture_reduced(recording, parameters.values())
    factor = 1.0 / float(getattr(optimizer, "grad_scale", None) or 1.0)  # a fused optimizer unscales while it reads
    steps.arrays = _print_gradients(recording, parameters, factor)
    if is_first or changed:
        steps.arrays |= prints_of("start", parameters)
    is_scaled = not recording.uses_run and any(one["scale"] != 1.0 for one in recording.step["backwards"])
    gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None and not is_piece(p)}
    steps.facts = {
        "optimizer": recording.optimizers.index(id(optimizer)),
        "optimizer_kind": type(optimizer).__name__,
        "uses_run": recording.uses_run,
        "agreed_loss": _agreed_loss() if recording.uses_run else None,
        "line": users_line(2),
        "names": list(parameters),
        "model_names": [plain_name(name) for model in recording.models for name, _ in unwrap(model).named_parameters()],
        "shapes": [list(p.shape) for p in parameters.values()],
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()}),
        "rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
        "scale": scaling.factor if is_scaled else 1.0,
        "changed": changed,
        "gradient_bits": digests_of(gradients) if factor == 1.0 else {},
        **_describe_wrapping(recording, parameters),
    }


def _agreed_loss() -> float | None:
    """The loss of the global batch that the step of instep.Run has, which is running this optimizer."""
    frame = sys._getframe(1)
    while frame is not None:
        step = frame.f_locals.get("self")
        if type(step).__module__ == "instep.train.step":
            return step.loss  # type: ignore[union-attr]  # a Step
        frame = frame.f_back
    return None


def _print_gradients(
    recording: Recording, parameters: dict[str, torch.nn.Parameter], factor: float
) -> dict[str, numpy.ndarray[Any, Any]]:
    """`applied`: as the optimizer uses them; `reduced`: before clipping and unscaling; `local`: this rank's own."""
    arrays: dict[str, numpy.ndarray[Any, Any]] = {}
    for name, parameter in parameters.items():
        if is_piece(parameter):
            arrays[f"applied/{name}"] = print_tensor(gather_whole(parameter, parameter.grad)) * factor
        elif parameter.grad is not None:
            arrays[f"applied/{name}"] = print_tensor(parameter.grad) * factor
        if f"applied/{name}" in arrays:
            applied, taken = arrays[f"applied/{name}"], recording.reduced.get(id(parameter))
            # What instep.Run multiplies into a fused step is part of its gradient; a loss scale is not.
            arrays[f"reduced/{name}"] = applied if recording.uses_run or taken is None else taken
        if id(parameter) in recording.local:
            arrays[f"local/{name}"] = recording.local[id(parameter)]
    return arrays


def _is_sharded(parameters: dict[str, torch.nn.Parameter]) -> bool:
    return any(hasattr(p, "full_tensor") or is_piece(p) for p in parameters.values())


def _describe_wrapping(recording: Recording, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Any]:
    """How gradients of these parameters come to be averaged, as far as it shows."""
    ids = {id(p) for p in parameters.values()}
    found = wrapper_of(ids, WRAPPED)
    sharded = [p for p in parameters.values() if hasattr(p, "device_mesh")]
    meshes = {tuple(p.device_mesh.shape) for p in sharded}  # type: ignore[union-attr]
    facts: dict[str, Any] = {
        "joined": dist.is_available() and dist.is_initialized(),
        "sharded": len(sharded) + sum(map(is_piece, parameters.values())),
        "mesh_axes": max((len(shape) for shape in meshes), default=0),
        "tensor_parallel": bool(sharded) and not any(map(_is_fsdp, recording.models)),
        "wrapped": found is not None,
    }
    if found is not None:
        model, then, line = found
        facts |= {
            "wrap_line": line,
            "broadcast_buffers": bool(model.will_sync_module_buffers()),
            "replaced": len({id(p) for p in model.module.parameters() if p.requires_grad} - then),
            "hook": _name_hook(model),
        }
    return facts


def _name_hook(model: Any) -> str | None:
    """The communication hook, which may compress gradients or keep them local; private, so unknown where it is not."""
    hooks = getattr(model, "_comm_hooks", None)
    return getattr(hooks[0][0], "__name__", "a communication hook") if hooks else None


def _is_fsdp(model: torch.nn.Module) -> bool:
    """Whether fully_shard has been applied to it or to a part of it."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(part, FSDPModule) for part in model.modules())


def _after(recording: Recording, steps: Steps, optimizer: torch.optim.Optimizer) -> None:
    parameters = named(recording, optimizer)
    buffers = {}
    for number, model in enumerate(recording.models):
        prefix = f"model{number}." if len(recording.models) > 1 else ""
        buffers |= {prefix + name: buffer for name, buffer in unwrap(model).named_buffers()}
    arrays = steps.arrays | prints_of("param", parameters) | prints_of("buffer", buffers)
    bits = digests_of({name: p for name, p in parameters.items() if not is_piece(p)})
    if not _is_sharded(parameters):  # a sharded one would have to be gathered, by all ranks
        steps.bits |= {id(p): bits[name] for name, p in parameters.items()}
    facts = {"parameter_bits": bits, "statistics": _statistics_of(recording)}
    recording.finish_update(steps.facts | facts, arrays)
    for parameter in parameters.values():
        recording.local.pop(id(parameter), None)
        recording.reduced.pop(id(parameter), None)


def _statistics_of(recording: Recording) -> list[str]:
    """Names of the buffers that batch norms keep."""
    found = []
    for number, model in enumerate(recording.models):
        prefix = f"model{number}." if len(recording.models) > 1 else ""
        for name, part in unwrap(model).named_modules():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                found += [f"{prefix}{name}.{key}".replace("..", ".") for key, _ in part.named_buffers(recurse=False)]
    return found
