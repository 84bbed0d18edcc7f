"""A model whose stages are on different ranks: what each rank does in a pass over its micro-batches, and in evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from instep.errors import InstepError, UsageError
from instep.records.schedules import SCHEDULES
from instep.train.absent import is_absent
from instep.train.precision import as_float32
from instep.train.reduce.stages import Tied
from instep.train.techniques.pipeline.carry import behind, for_split_backward, pack, with_states
from instep.train.techniques.pipeline.cut import Cuts
from instep.train.techniques.pipeline.evaluate_stages import evaluate_stages
from instep.train.techniques.pipeline.generators import write_states
from instep.train.techniques.pipeline.job import Call, Job, Result
from instep.train.techniques.pipeline.last_stage import weigh_loss
from instep.train.techniques.pipeline.pieces import Pieces
from instep.train.techniques.pipeline.schedule import StageModule, build_schedule, choose_schedule, place_stages
from instep.train.techniques.pipeline.stage_times import LOSS, StageClock
from instep.train.techniques.pipeline.trace import Plan, StageRun, Tracer, run_stage
from instep.train.world import World

if TYPE_CHECKING:
    from instep.train.techniques.pipeline.shard_stages import ShardedStages

MOST_SCHEDULES = 4  # kept, with the memory that they receive in


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
        self._splits_backward = SCHEDULES[order.schedule].splits_backward
        self.ranks = place_stages(order.schedule, order.world.size, order.per_rank)
        self.held = frozenset(stage for stage, rank in enumerate(self.ranks) if rank == order.world.rank)
        self._pieces = Pieces(model, cuts, self.held)
        self._forward = model.forward
        self._schedules: dict[Any, Callable[[], None]] = {}
        self._jobs: Sequence[Job] = ()
        self._newest: Job | None = None
        self._loss_fn: Callable[..., Any] | None = None
        self._failure: Exception | None = None
        self._answer: Callable[[Any, Any], Any] = functools.partial(evaluate_stages, self)
        self.num_evaluations = 0  # calls of the model from outside of a schedule
        self._clock: StageClock | None = None
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

    def held_modules(self) -> list[tuple[int, nn.Module]]:
        """The largest modules that lie in one stage, of the stages held here, each with its stage."""
        units = (piece for piece in self._pieces.all if piece.is_unit)
        return [(piece.stage, piece.module) for piece in units if piece.stage is not None and piece.stage in self.held]

    def loose_parameters(self) -> list[str]:
        """Names of those that belong to a module which lies in several stages."""
        places = {(id(module), name) for module, name, _ in self._pieces.loose}
        found = [(f"{p}.{n}".lstrip("."), (id(m), n)) for p, m in self.model.named_modules() for n in m._parameters]
        return [name for name, place in found if place in places]

    def _take_over(self) -> None:
        """The model itself, when called, is evaluated by all ranks of the pipeline together."""

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.num_evaluations += 1
            return self._answer(args, kwargs)

        self.model.forward = forward

    @contextmanager
    def answering(self, answer: Callable[[Any, Any], Any]) -> Iterator[None]:
        """The model, when called, gives what `answer` returns for its arguments."""
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before

    def _trained(self, stage: int) -> Iterator[nn.Parameter]:
        found = (module._parameters[name] for module, name in self._places[stage])
        return (parameter for parameter in found if parameter is not None and parameter.requires_grad)

    def plan(self, args: Any, kwargs: Any) -> Plan:
        """For inputs of these shapes, with modules in training or evaluation mode as they are."""
        self._tracer.follow(self.model)
        with self._autocast():
            return self._tracer.plan(args, kwargs)

    @contextmanager
    def timing(self) -> Iterator[StageClock]:
        """Times the parts of this rank's stages, as they run in forward."""
        self._clock = clock = StageClock(self.world.device)
        try:
            yield clock
        finally:
            self._clock = None

    # -- training

    def run_pass(
        self, calls: Sequence[Call], loss_fn: Callable[..., Any], job_of: Callable[[Call, Plan], Job]
    ) -> list[Result]:
        """All micro-batches forward and backward; gradients add up in param.grad. Every rank of the pipeline calls it.

        Returns what the last stage found.
        """
        self._check_frozen()
        jobs = [job_of(call, self.plan(call.args, call.kwargs)) for call in calls]
        for some in self._settle([list(some) for _, some in groupby(jobs, key=lambda j: (j.plan.key, j.plan.draws))]):
            self._run_alike(some, loss_fn)
        return self._share([job.result for job in jobs])

    def _settle(self, runs: list[list[Job]]) -> list[list[Job]]:
        """What goes through a schedule together, and parameters gathered as they have to be for that."""
        sharded = self.sharded
        if sharded is None or sharded.is_whole:
            return runs
        newest = [self._newest, *(job for some in runs for job in some)][-1]
        passes = None if sharded.stays_whole else sharded.agree([len(some) for some in runs], newest is not None)
        if passes is None or passes.is_whole:
            sharded.gather()
            return runs
        sharded.gather_by_block()
        self._newest = newest
        if passes.turns is None:
            return runs
        jobs = [job for some in runs for job in some]
        assert newest is not None
        return [[job] for job in [*jobs, *(newest.repeated() for _ in range(passes.turns - len(jobs)))]]

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
        except RuntimeError as error:  # torch's, around what happened in a stage
            if self._failure is not None:
                raise self._failure from None
            if isinstance(error.__cause__, Exception):  # in the backward of one
                self._say_where(error.__cause__, "backward of " + " or ".join(f"stage {s}" for s in sorted(self.held)))
                raise error.__cause__ from None
            raise
        finally:
            self._jobs, self._loss_fn, self._failure = (), None, None

    def _schedule_for(self, plan: Plan, count: int) -> Callable[[], None]:
        alike = (for_split_backward(carried) if self._splits_backward else carried for carried in plan.key)
        boundaries = tuple(with_states(carried, plan.draws, self.world.device) for carried in alike)
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
            self._say_where(error, f"stage {stage}")
            raise

    def _say_where(self, error: Exception, stage: str) -> None:
        """Below the error's text, where Python has notes (3.11); errors of ours say themselves what is meant."""
        add_note: Any = getattr(error, "add_note", None)
        if add_note is not None and not isinstance(error, InstepError):
            add_note(f"[in {stage} of {self.cuts.count} of the pipeline, which this rank holds]")

    def _stage(self, stage: int, job: Job, received: list[Tensor]) -> Any:
        job.begin()
        try:
            output = self.compute(stage, job.plan, received, job.call.args, job.call.kwargs)
            if stage < self.cuts.count - 1:
                if self._splits_backward:
                    output = behind(output, received)
                return pack(output, job.plan.boundaries[stage].carried, job.plan.draws, self.world.device)
            assert self._loss_fn is not None
            output = as_float32(output) if self._dtype is not None else output
            with nullcontext() if self._clock is None else self._clock.timing(LOSS):
                found = self._loss_fn(output, job.call.targets)
            return weigh_loss(found, job, lambda: self._roots_of_nothing(stage, received, output))
        finally:
            job.end()

    def _roots_of_nothing(self, stage: int, received: list[Tensor], output: Any) -> list[Tensor]:
        """What a loss of weight 0 sends zeros to: past this stage, unless other ranks gather blocks with this one."""
        tensors = tree_leaves(output) if self.sharded is not None and self.sharded.gathers_by_block else received
        return [t for t in tensors if isinstance(t, Tensor) and t.requires_grad] or [next(self._trained(stage))]

    def compute(self, stage: int, plan: Plan, received: list[Tensor], args: Any, kwargs: Any) -> Any:
        """One stage of a forward: what the next one gets, or the model's output. received: with the generators' states."""
        states = received.pop() if plan.draws and stage else None
        on_entry = (lambda: None) if states is None else functools.partial(write_states, plan.draws, states)
        run = StageRun(plan, stage, received, on_entry, self._clock)
        only: AbstractContextManager[None] = nullcontext() if self.sharded is None else self.sharded.only(stage)
        with self._autocast(), only:
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


def _places(model: nn.Module, cuts: Cuts, stage: int) -> list[tuple[nn.Module, str]]:
    """Where the parameters of a stage are found, each once. Looked up when needed: sharding puts others there."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and cuts.stages[f"{prefix}.{name}".lstrip(".")] == stage:
                found.setdefault(id(parameter), (module, name))
    return list(found.values())
