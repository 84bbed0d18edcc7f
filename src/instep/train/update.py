"""One optimizer's update: the gradient norm, clipping, the step itself, and what hangs on an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from instep.errors import UsageError
from instep.records.finding import CallSite
from instep.train.call_site import user_call_site
from instep.train.local_step import on_parts
from instep.train.reduce.reducer import SMALL_BYTES, Reducer
from instep.train.reduce.shard_reducer import ShardReducer
from instep.train.skips import Skips
from instep.train.techniques.optimizer_shares import OptimizerShares


@dataclass
class Scheduler:
    """A learning-rate scheduler. every: "step", "epoch" or "value" (ReduceLROnPlateau, through run.schedule)."""

    scheduler: Any
    every: str
    count: int | None = 0  # of our calls of scheduler.step, to notice the user's own

    def advance(self, *args: float) -> None:
        self.check()
        self.scheduler.step(*args)
        self.count = count_steps(self.scheduler)

    def check(self) -> None:
        if count_steps(self.scheduler) != self.count:
            raise UsageError(
                f"{type(self.scheduler).__name__}.step() was called by the script as well: step.update() calls it once per "
                f"{self.every}. Take the call out of the script, or do not give the scheduler to run.prepare."
            )


def count_steps(scheduler: Any) -> int | None:
    """How often it was stepped; None when it does not say, as torch's ChainedScheduler."""
    return getattr(scheduler, "last_epoch", None)


@dataclass
class Trained:
    """An optimizer that `run.prepare` took, with its reducer and schedulers."""

    optimizer: torch.optim.Optimizer
    reducer: Reducer | ShardReducer
    ordered: list[nn.Parameter]  # rank 0's order
    skips: Skips
    schedulers: list[Scheduler] = field(default_factory=list)
    updating: bool = False
    passes: frozenset[int] = frozenset()  # of the step before: after which passes an update came
    new_passes: set[int] = field(default_factory=set)
    updates: int = 0  # in this step
    reached: bool = False  # whether one of its parameters ever got a gradient
    cleared: CallSite | None = None  # where the script cleared gradients that no update had used
    guard: Any = None
    shares: OptimizerShares | None = None  # where ranks share out the optimizer's state

    def begin_step(self, reference: float | None) -> None:
        self.updates, self.cleared = 0, None
        self.reducer.begin_step(self.parameters(), reference)

    def parameters(self) -> list[nn.Parameter]:
        """All of them, in an order that is the same on all ranks; new ones (add_param_group) at the end."""
        groups = self.optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != len(self.ordered):
            known = {id(p) for p in self.ordered}
            here = [p for group in groups for p in group["params"]]
            kept = {id(p) for p in here}
            self.ordered = [p for p in self.ordered if id(p) in kept] + [p for p in here if id(p) not in known]
        return self.ordered

    def learn_pattern(self) -> None:
        self.passes, self.new_passes = frozenset(self.new_passes), set()

    def schedule(self, step: Any) -> None:
        """Once per step that was not skipped, and once per epoch."""
        for scheduler in self.schedulers:
            scheduler.check()
            if (scheduler.every == "step" and not step.skipped) or (scheduler.every == "epoch" and step.ends_epoch):
                scheduler.advance()

    def close(self) -> None:
        self.reducer.finish()
        self.reducer.close()
        self.reducer.transport.close()
        if self.guard is not None:
            self.guard.remove()
        vars(self.optimizer).pop("zero_grad", None)

    def check_kept(self) -> None:
        """Raises UsageError when gradients of this update are gone."""
        if self.cleared is None and not self.reducer.has_lost_gradients():
            return
        at = f"at {self.cleared}" if self.cleared is not None else "from the script (as by model.zero_grad())"
        raise UsageError(
            f"zero_grad() {at} has cleared gradients that step.backward had added and no step.update() had used. "
            "step.update() clears them itself; take the call out."
        )

    def name_nonfinite(self, models: Sequence[nn.Module]) -> str | None:
        """The first parameter (this rank's part of it) that holds NaN or infinity."""
        names = {id(p): name for model in models for name, p in model.named_parameters()}
        for parameter in self.ordered:
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not own.is_meta and not bool(torch.isfinite(own).all()):
                return names.get(id(parameter), "a parameter")
        return None

    def guard_zero_grad(self) -> None:
        """Notes where the script clears gradients in the middle of a step. By an attribute of the object: copies, pickles
        and state_dict of an optimizer leave it out."""
        clear = self.optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if self.reducer.lanes.all and self.cleared is None:
                self.cleared = user_call_site()
            clear(*args, **kwargs)

        self.optimizer.zero_grad = zero_grad

    def guard_step(self) -> None:
        """Makes `optimizer.step()` from the script an error, since it would step with local gradients."""

        def check(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not self.updating:
                raise UsageError(
                    f"{type(self.optimizer).__name__}.step() was called by the script. step.update() does it, after the "
                    "gradients are averaged over ranks; take the call out."
                )

        self.guard = self.optimizer.register_step_pre_hook(check)


def clip_coefficient(norm: float, clip_norm: float | None) -> float:
    """As torch.nn.utils.clip_grad_norm_."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


def clamp_gradients(gradients: Sequence[Tensor], clip_value: float | None) -> None:
    if clip_value is not None:
        for gradient in gradients:
            gradient.clamp_(-clip_value, clip_value)


def step_optimizer(trained: Trained, factor: float, what: str) -> None:
    """Steps with gradients times `factor`; a fused optimizer multiplies while it reads them."""
    optimizer, gradients = trained.optimizer, trained.reducer.gradients()
    shares = nullcontext() if trained.shares is None else trained.shares.stepping(trained.parameters(), what)
    trained.updating = True
    try:
        with shares, on_parts(optimizer):
            _step(optimizer, gradients, factor)
    finally:
        trained.updating = False


def _step(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], factor: float) -> None:
    if factor != 1.0 and _scales_itself(optimizer, gradients):
        optimizer.grad_scale = torch.full((), 1.0 / factor, device=gradients[0].device)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.zeros((), device=gradients[0].device)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    else:
        scale_gradients(gradients, factor)
        optimizer.step()


def _scales_itself(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> bool:
    """The seam that torch.amp.GradScaler uses. Not worth it for gradients in cache, and fp32 only: the scale is fp32."""
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        and all(gradient.dtype == torch.float32 for gradient in gradients)
        and sum(gradient.numel() * 4 for gradient in gradients) > SMALL_BYTES
    )
