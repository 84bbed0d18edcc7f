"""A model whose stages are on different ranks: what each rank does in a pass over its micro-batches, and in evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from instep.errors import UsageError
from instep.records.schedules import SCHEDULES
from instep.train.absent import is_absent
from instep.train.forward_backward import take_apart
from instep.train.precision import as_float32
from instep.train.reduce.stages import Tied
from instep.train.techniques.pipeline.carry import for_split_backward, pack, set_rng_state, with_state
from instep.train.techniques.pipeline.cut import Cuts
from instep.train.techniques.pipeline.last_stage import Result, weigh_loss
from instep.train.techniques.pipeline.pieces import Pieces
from instep.train.techniques.pipeline.schedule import StageModule, build_schedule, choose_schedule, place_stages
from instep.train.techniques.pipeline.trace import Carried, Plan, StageRun, Tracer, run_stage
from instep.train.world import World

if TYPE_CHECKING:
    from instep.train.techniques.pipeline.shard_stages import ShardedStages

MOST_SCHEDULES = 4  # kept, with the memory that they receive in


@dataclass
class Job:
    """One micro-batch of a pass."""

    plan: Plan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any
    begin: Callable[[], None]  # sets random generators and buffers for this micro-batch
    end: Callable[[], None]
    read_weight: Callable[[Any, Any], tuple[float, float]]  # (loss, weight) -> the weight, and the factor of the loss
    result: Result = field(default_factory=Result)


@dataclass(frozen=True)
class Order:
    """Who runs what and when. per_rank: stages; world, group: the ranks of the pipeline, and with the device's backend."""

    schedule: str
    per_rank: int
    world: World
    group: dist.ProcessGroup


class Pipeline:
    """tied: parameters that several ranks hold; dtype: of autocast, None without. Every rank of the pipeline makes the same
    calls."""

    sharded: ShardedStages | None = None  # where the stages' parameters are shared out as well

    def __init__(
        self,
        model: nn.Module,
        tracer: Tracer,
        cuts: Cuts,
        order: Order,
        tied: Sequence[Tied],
        dtype: torch.dtype | None,
    ) -> None:
        self.tied = tied
        self.model, self.cuts, self.world, self.group = model, cuts, order.world, order.group
        self._tracer, self._order, self._dtype = tracer, order, dtype
        self.ranks = place_stages(order.schedule, order.world.size, order.per_rank)
        self.held = frozenset(stage for stage, rank in enumerate(self.ranks) if rank == order.world.rank)
        self._pieces = Pieces(model, cuts, self.held)
        self._forward = model.forward
        self._schedules: dict[Any, Callable[[], None]] = {}
        self._jobs: Sequence[Job] = ()
        self._loss_fn: Callable[..., Any] | None = None
        self._failure: Exception | None = None
        self._places = {stage: _places(model, cuts, stage) for stage in self.held}
        self._modules = {s: StageModule(s, self._work, functools.partial(self._trained, s)) for s in self.held}
        self.note_frozen()
        self._take_over()

    def note_frozen(self) -> None:
        """Which of the parameters here are trained, from now on."""
        self._frozen = {n: (p, p.requires_grad) for n, p in self.model.named_parameters() if not is_absent(p)}

    def close(self) -> None:
        self._pieces.close()
        self.model.__dict__.pop("forward", None)

    def held_modules(self) -> list[nn.Module]:
        """The largest modules that lie in one stage, of the stages held here."""
        return [piece.module for piece in self._pieces.all if piece.is_unit and piece.stage in self.held]

    def loose_parameters(self) -> list[str]:
        """Names of those that belong to a module which lies in several stages."""
        places = {(id(module), name) for module, name, _ in self._pieces.loose}
        found = [(f"{p}.{n}".lstrip("."), (id(m), n)) for p, m in self.model.named_modules() for n in m._parameters]
        return [name for name, place in found if place in places]

    def _take_over(self) -> None:
        """The model itself, when called, is evaluated by all ranks of the pipeline together."""

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._evaluate(args, kwargs)

        self.model.forward = forward

    def _trained(self, stage: int) -> Iterator[nn.Parameter]:
        found = (module._parameters[name] for module, name in self._places[stage])
        return (parameter for parameter in found if parameter is not None and parameter.requires_grad)

    # -- training

    def run_pass(self, batches: Sequence[Any], loss_fn: Callable[..., Any], job_of: Callable[..., Job]) -> list[Result]:
        """All micro-batches forward and backward; gradients add up in param.grad. Every rank of the pipeline calls it.

        job_of: makes a Job of a micro-batch, its plan, arguments and targets. Returns what the last stage found.
        """
        self._check_frozen()
        self._tracer.follow(self.model)
        jobs = []
        for batch in batches:
            args, kwargs, targets = take_apart(self.model, batch.data)
            with self._autocast():
                plan = self._tracer.plan(args, kwargs)
            jobs.append(job_of(batch, plan, args, kwargs, targets))
        for _, some in groupby(jobs, key=lambda job: (job.plan.key, job.plan.draws)):
            self._run_alike(list(some), loss_fn)
        return self._share([job.result for job in jobs])

    def _check_frozen(self) -> None:
        """What goes between stages follows from which parameters are trained, and a stage sees its own only."""
        changed = [name for name, (p, trained) in self._frozen.items() if p.requires_grad is not trained]
        if changed:
            raise UsageError(
                f"{changed[0]} was {'frozen' if self._frozen[changed[0]][1] else 'unfrozen'} after run.prepare, which a pipeline "
                "cannot follow. Do it before, and go on from a checkpoint where it has to change."
            )

    def _run_alike(self, jobs: list[Job], loss_fn: Callable[..., Any]) -> None:
        """Micro-batches whose activations have the same shapes, through one schedule."""
        self._jobs, self._loss_fn = jobs, loss_fn
        run = self._schedule_for(jobs[0].plan, len(jobs))
        try:
            run()
        except RuntimeError:  # torch's, around what happened in a stage
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._jobs, self._loss_fn, self._failure = (), None, None

    def _schedule_for(self, plan: Plan, count: int) -> Callable[[], None]:
        splits = SCHEDULES[self._order.schedule].splits_backward
        alike = (for_split_backward(carried) if splits else carried for carried in plan.key)
        boundaries = tuple(with_state(carried, plan.draws, self.world.device) for carried in alike)
        key = (boundaries, count)
        if key not in self._schedules:
            if len(self._schedules) == MOST_SCHEDULES:
                self._schedules.pop(next(iter(self._schedules)))
            name = choose_schedule(self._order.schedule, self.world.size, self._order.per_rank, count)
            self._schedules[key] = build_schedule(name, self._modules, boundaries, count, self.world.device, self.group)
        return self._schedules[key]

    def _work(self, stage: int, number: int, received: Sequence[Tensor]) -> Any:
        """One stage of one micro-batch; called by torch's schedule."""
        try:
            return self._stage(stage, self._jobs[number], list(received))
        except Exception as error:
            self._failure = error  # torch raises one of its own in its place
            raise

    def _stage(self, stage: int, job: Job, received: list[Tensor]) -> Any:
        job.begin()
        try:
            output = self._compute(stage, job.plan, received, job.args, job.kwargs)
            if stage < self.cuts.count - 1:
                return pack(output, job.plan.boundaries[stage].carried, job.plan.draws, self.world.device)
            assert self._loss_fn is not None
            output = as_float32(output) if self._dtype is not None else output
            return weigh_loss(
                self._loss_fn(output, job.targets), job, received, functools.partial(self._trained, stage)
            )
        finally:
            job.end()

    def _compute(self, stage: int, plan: Plan, received: list[Tensor], args: Any, kwargs: Any) -> Any:
        state = received.pop() if plan.draws and stage else None
        run = StageRun(plan, stage, received, lambda: set_rng_state(state))
        with self._autocast():
            return run_stage(self._pieces, self._forward, run, plan, args, kwargs)

    def _autocast(self) -> Any:
        return torch.autocast(self.world.device.type, self._dtype, enabled=self._dtype is not None)

    def _share(self, results: list[Result]) -> list[Result]:
        """What the last stage found, on all ranks of the pipeline."""
        rows = torch.tensor([result.numbers() for result in results], dtype=torch.float64).reshape(-1, 3)
        last = self.ranks[-1]
        self.world.wait(
            dist.broadcast(rows, group_src=last, group=self.world.host_group, async_op=True), "step.forward_backward"
        )
        return [Result.of(row) for row in rows.tolist()]

    # -- evaluation

    def _evaluate(self, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                f"{type(self.model).__name__} is cut into {self.cuts.count} stages of a pipeline, so its output has no gradients: "
                "train it with step.forward_backward(model, loss_fn) in place of the inner loop. Called under torch.no_grad(), as "
                "in run.evaluate, it gives its output on every rank."
            )
        self._tracer.follow(self.model)
        plan = self._tracer.plan(args, kwargs)
        received: list[Tensor] = []
        output: Any = None
        for stage, rank in enumerate(self.ranks):
            if rank == self.world.rank:
                if stage and self.ranks[stage - 1] != rank:
                    received = self._receive(stage, plan)
                output = self._compute(stage, plan, received, args, kwargs)
                if stage < self.cuts.count - 1:
                    received = list(pack(output, plan.boundaries[stage].carried, plan.draws, self.world.device))
                    if self.ranks[stage + 1] != rank:
                        for tensor in received:
                            dist.send(tensor, group_dst=self.ranks[stage + 1], group=self.group)
        return self._spread(plan, output)

    def _receive(self, stage: int, plan: Plan) -> list[Tensor]:
        carried = with_state(plan.boundaries[stage - 1].carried, plan.draws, self.world.device)
        tensors = [torch.empty(each.shape, dtype=each.dtype, device=self.world.device) for each in carried]
        for tensor in tensors:
            dist.recv(tensor, group_src=self.ranks[stage - 1], group=self.group)
        return tensors

    def _spread(self, plan: Plan, output: Any) -> Any:
        """The last stage's output on every rank of the pipeline."""
        last, device = self.ranks[-1], self.world.device
        leaves = tree_flatten(output)[0] if last == self.world.rank else list(plan.leaves)
        for place, planned in enumerate(plan.leaves):
            if not isinstance(planned, Tensor):
                continue
            if last == self.world.rank:
                leaves[place] = leaves[place].to(device).contiguous()
            else:
                leaves[place] = torch.empty(planned.shape, dtype=planned.dtype, device=device)
            dist.broadcast(leaves[place], group_src=last, group=self.group)
        assert plan.spec is not None
        return tree_unflatten(leaves, plan.spec)


def _places(model: nn.Module, cuts: Cuts, stage: int) -> list[tuple[nn.Module, str]]:
    """Where the parameters of a stage are found, each once. Looked up when needed: sharding puts others there."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and cuts.stages[f"{prefix}.{name}".lstrip(".")] == stage:
                found.setdefault(id(parameter), (module, name))
    return list(found.values())


__all__ = ["Carried", "Job", "Pipeline", "Result"]
