"""One optimizer step: the micro-batches of this rank, backward, and the update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from instep.errors import UsageError
from instep.records.finding import CallSite
from instep.train import seeds
from instep.train.absent import show_gradients
from instep.train.agree import agree, describe_groups, digest_rates
from instep.train.call_arguments import read_weight, show
from instep.train.data.loader import MicroBatch, StepBatches
from instep.train.exact_rows import backward_exactly
from instep.train.forward_backward import check_functions, read_loss, take_apart
from instep.train.keeping import keep_step
from instep.train.position import LoopPosition
from instep.train.reduce.words import Table, number_call
from instep.train.rows import AllRows, backward_rows
from instep.train.step_checks import check_backward, check_first_update, check_loss, check_place, is_unreached
from instep.train.step_end import after_update, finish_step, note_finite
from instep.train.techniques.pipeline.rows_pass import backward_in_stages, begin_rows, check_one_loss
from instep.train.techniques.pipeline.train_pass import find_pipeline, train_pass
from instep.train.update import (
    Trained,
    clamp_gradients,
    clip_coefficient,
    scale_gradients,
    step_optimizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from instep.train.run import Run
    from instep.train.techniques.pipeline.pipeline import Pipeline


class Step:
    """Iterating gives this rank's micro-batches; again, the same ones with a new random stream."""

    def __init__(
        self, run: Run, position: LoopPosition, batches: StepBatches | Sequence[MicroBatch], *, ends_epoch: bool
    ) -> None:
        self.index, self.epoch, self.ends_epoch = run._position.next_index, position.epoch, ends_epoch
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.skipped = False
        self.num_samples: float | None = None  # of the global batch, when it was not the usual number
        self.finished = False
        self.update_calls = 0
        self._run, self._position, self._batches = run, position, batches
        self._current: MicroBatch | None = None
        self._pass = -1
        self._reduced: dict[int, tuple[Table, float]] = {}
        self._rows: list[AllRows] = []
        self.in_backward = False
        self.stray: CallSite | None = None  # a backward to rows that did not go through step.backward
        self._updates = 0
        self._updated_at: dict[int, tuple[int, int]] = {}  # pass and number of backwards of an optimizer's last update
        self._has_ended = False
        self._backwards = 0
        self._with_backward = 0  # micro-batches of this pass
        self._reference = run._first_reference if run._reference is None else run._reference
        for trained in run._trained:
            trained.begin_step(self._reference)

    def __iter__(self) -> Iterator[Any]:
        run = self._run
        self._begin_pass()
        first, last = run._slots.local.start, len(self._batches) - 1
        try:
            for position, batch in enumerate(self._batches):
                self._current = batch
                seeds.set_generators(seeds.FORWARD, run._seed, self.index, self._pass, batch.slot)
                run._buffers.begin(batch.slot)
                for trained in run._trained:
                    trained.reducer.begin_micro_batch(batch.slot - first, position == last)
                before = self._backwards
                try:
                    yield batch.data
                finally:
                    self._with_backward += self._backwards > before
                run._buffers.end()
        finally:
            self._current = None
            run._buffers.end()
            seeds.set_generators(seeds.OUTSIDE, run._seed, self.index, self._pass + 1)

    def _begin_pass(self) -> None:
        self._pass += 1
        self._with_backward = 0
        for trained in self._run._trained:
            if self._pass:
                trained.reducer.flush(self._name("the next pass over"))
                if self._updates:
                    trained.reducer.finish()  # gradients that no update took
                    trained.cleared = None
                    self._reduced.pop(id(trained), None)
            trained.reducer.begin_pass(self._pass in trained.passes)
            trained.reducer.plan_turns(len(self._batches), self._name("a pass over"))

    def _name(self, what: str = "step.update() of") -> str:
        return f"{what} step {self.index}"

    def backward(self, loss: Tensor, weight: Any = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Adds the gradients of a loss that is a mean over `weight` items (default: this micro-batch's samples).

        loss: shape (), with a graph. weight: a number or a tensor of shape (), at least 0; 0 adds nothing, even when
        the loss is NaN. optimizer: reaches only its parameters. Any rank may call it any number of times.
        Raises UsageError for a loss that is no scalar or has no graph.
        """
        run = self._run
        given = weight is not None
        value = self._read_weight(weight)
        chosen = run._choose(optimizer, "step.backward")
        if run._pipelines:
            check_one_loss(self, chosen)
        for trained in chosen:
            trained.check_kept()
        self._backwards += 1
        if value == 0:
            for trained in chosen:
                trained.reducer.lanes.open(None, given)
                trained.reducer.lanes.skip()
            return
        check_loss(loss)
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss  # of a split head: the same on all its ranks
        if run._exact and self._current is None and not self._rows:
            raise UsageError(
                "exact=True adds gradients in the order of micro-batches: call step.backward inside the inner loop, or leave "
                "exact out."
            )
        if self._reference is None:  # the first step: slot 0's, once the ranks have met
            self._reference = value if given else run._slots.micro_batch
        factor = value / self._reference * run._loss_scale.value
        inputs = [p for p in chosen[0].parameters() if p.requires_grad] if optimizer is not None else None
        if run._exact and self._current is None:
            backward_exactly(run, self, loss, value, given, factor, chosen, inputs)
            return
        for trained in chosen:
            trained.reducer.lanes.open(self._reference, given)
            trained.reducer.enter_backward()
        try:
            self._run_backward(loss if factor == 1.0 else loss * factor, inputs)
            # Each rank adds its own rows' share to a sum of which the mean over ranks is taken.
            share = float(run._grid.data.size)
            if run._pipelines:
                backward_in_stages(run, self, share, chosen)
            else:
                backward_rows(run, self._rows, self._batches, share, inputs, lambda *_: nullcontext())
        finally:
            for trained in chosen:
                trained.reducer.leave_backward()
        weighted = loss.detach() * value if loss.device.type != "cpu" else float(loss.detach()) * value
        for trained in chosen:
            trained.reducer.lanes.count(value, weighted)

    def _run_backward(self, scaled: Tensor, inputs: Sequence[Tensor] | None) -> None:
        self.in_backward = True
        try:
            scaled.backward(inputs=None if inputs is None else [*inputs, *(rows.anchor for rows in self._rows)])
        finally:
            self.in_backward = False

    def forward_backward(
        self, model: Any, loss_fn: Callable[..., Any], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """For each micro-batch of this step: the model's output, its loss, and backward. The same in every split.

        A micro-batch (inputs, targets) gives loss_fn(model(inputs), targets), where inputs may be a tuple or a mapping
        of several; a mapping gives loss_fn(model(**batch), batch) with the keys that forward names; anything else
        loss_fn(model(batch), batch). loss_fn returns the mean over the micro-batch's samples, or (mean, weight) as
        `backward` takes them. Every rank must call it; step.update() follows.
        """
        check_functions(model, loss_fn)
        pipeline = find_pipeline(self._run, model)
        if pipeline is not None:
            self._run_pipeline(pipeline, loss_fn, optimizer)
            return
        for batch in self:
            args, kwargs, targets = take_apart(model, batch)
            loss, weight = read_loss(loss_fn(model(*args, **kwargs), targets))
            self.backward(loss, weight, optimizer)

    def _run_pipeline(self, pipeline: Pipeline, loss_fn: Callable[..., Any], optimizer: Any) -> None:
        run = self._run
        chosen = run._choose(optimizer, "step.forward_backward")
        for trained in chosen:
            trained.check_kept()
        self._begin_pass()
        batches = list(self._batches)
        try:
            train_pass(run, self, pipeline, batches, loss_fn, chosen)
        finally:
            self._current = None
            seeds.set_generators(seeds.OUTSIDE, run._seed, self.index, self._pass + 1)
        self._backwards += len(batches)
        self._with_backward = len(batches)

    def check_weight(self, loss: Any, weight: Any) -> float:
        """A weight as `backward` takes it. Raises UsageError for it, and for a loss without a backward that counts."""
        value = self._read_weight(weight)
        if value:
            check_loss(loss)
        return value

    def _read_weight(self, weight: Any) -> float:
        if weight is None:
            return self._current.num_samples if self._current is not None else 1
        return read_weight("step.backward", weight, "loss")

    def all_rows(self, fn: Callable[..., Any]) -> Any:
        """fn's rows for the whole global batch, in sample order. Every rank must call it, outside the inner loop.

        fn gets a micro-batch as the inner loop would, unpacked when it takes as many arguments as the micro-batch has
        parts, and returns a tensor of shape (samples, ...) or a tuple of such. The backward of what comes back re-runs
        fn per micro-batch with the same random numbers, so that memory is that of one micro-batch
        (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021).
        """
        if not callable(fn):
            raise UsageError(
                f"step.all_rows got {show(fn)}; it takes a function of a micro-batch, such as the model, and calls "
                "it itself: rows = step.all_rows(model)."
            )
        if self._run._is_sharded:
            raise UsageError("step.all_rows does not reach sharded models yet: train with parallel='ddp'.")
        if self._run._pipelines:
            fn = begin_rows(self._run, fn)
        self._begin_pass()
        try:
            self._rows.append(AllRows(self._run, self, fn))
            return self._rows[-1].gather(self._batches)
        finally:
            self._current = None
            seeds.set_generators(seeds.OUTSIDE, self._run._seed, self.index, self._pass + 1)

    def reduce(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Makes `param.grad` final: averaged, unscaled, equal on all ranks. Every rank must call it; update() follows."""
        check_place(self, "step.reduce")
        for trained in self._run._choose(optimizer, "step.reduce"):
            table, factor = self._reduce(trained)
            scale_gradients(trained.reducer.gradients(), factor)
            self._reduced[id(trained)] = table, 1.0
            if self._run._pipelines:
                show_gradients(trained.ordered, are_final=True)

    def _reduce(self, trained: Trained) -> tuple[Table, float]:
        if id(trained) in self._reduced:
            return self._reduced[id(trained)]
        run = self._run
        trained.check_kept()
        check_backward(self, trained)
        if 0 < self._with_backward < len(self._batches):
            run._observer.say(
                "micro-batches without step.backward (after continue, or left by break) count with weight 0 (said once); "
                "leaving the loop by break makes the numbers depend on the number of processes"
            )
        call = number_call(self.index, self._updates, run._trained.index(trained))
        trained.reducer.rates = digest_rates(trained.optimizer)
        table = trained.reducer.reduce(call, run._stop_asked, self._name())
        if len(set(table.rates)) > 1:
            agree(describe_groups(trained.optimizer), trained.reducer.world, self._name(), "settings of the optimizer")
        run._buffers.combine(self._name())
        run._stop_agreed |= run._grid.agree(table.stop, self._name())
        factor = trained.reducer.final_factor(table) / run._loss_scale.value if table.counted else 1.0
        self._reduced[id(trained)] = table, factor
        return table, factor

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Reduces, clips, steps, clears gradients, schedules, logs, saves. Every rank must call it.

        optimizer: only that one, where several were prepared; may be called several times in a step.
        Raises UsageError for gradients that came past step.backward and for an update before any backward.
        """
        check_place(self, "step.update")
        for trained in self._run._choose(optimizer, "step.update"):
            check_first_update(self, trained)
            self._update(trained)
        after_update(self._run, self)

    def _update(self, trained: Trained) -> None:
        run = self._run
        table, factor = self._reduce(trained)
        del self._reduced[id(trained)]
        if run._pipelines:
            show_gradients(trained.ordered, are_final=False)
        self._updated_at[id(trained)] = (self._pass, self._backwards)
        trained.new_passes.add(self._pass)
        if not table.counted:
            self.skipped = True
            run._observer.say("a step had no micro-batch with a backward on any rank: skipped (said once)")
        elif is_unreached(self, trained, table):
            self.skipped = True
        else:
            gradients = trained.reducer.gradients()
            norm = trained.reducer.norm() * factor
            finite = math.isfinite(norm)
            self.loss = sum(loss / weight for loss, weight in zip(table.losses, table.weights) if weight)
            self.grad_norm, self.skipped = norm, not finite
            if finite:
                if run._clip_value is not None:
                    scale_gradients(gradients, factor)
                    clamp_gradients(gradients, run._clip_value)
                    factor = 1.0
                step_optimizer(trained, factor * clip_coefficient(norm, run._clip_norm), self._name())
            note_finite(run, self, trained, finite)
            if run._next_reference is None and table.weights[0]:
                run._next_reference = table.weights[0] / table.counted if table.given else run._slots.micro_batch
                if not table.given:
                    self.num_samples = self._rows[0].num_samples if self._rows else int(table.weights[0])
        trained.reducer.finish()
        self._updates += 1
        trained.updates += 1

    @property
    def num_passes(self) -> int:
        return self._pass + 1

    # -- for the loop

    def advance_position(self) -> None:
        """The run stands behind this step."""
        self._run._position.next_index = self.index + 1
        self._position.taken += 1
        if self.ends_epoch:
            self._position.epoch, self._position.step = self.epoch + 1, 0
        else:
            self._position.step += 1

    def end(self) -> None:
        """The loop goes on: ends what no update ended, and learns the pattern of updates for the next step."""
        run = self._run
        self._has_ended = True
        if self._backwards and not self._updates:
            run._observer.say("a step had step.backward but no step.update: its gradients are dropped (said once)")
        for trained in run._trained:
            trained.reducer.flush(self._name("the step after"))
            trained.reducer.finish()
            trained.learn_pattern()
        finish_step(run, self)
        run._usual_updates = self.update_calls
        if run._next_reference is not None:
            run._reference, run._next_reference = run._next_reference, None
        keep_step(run)
