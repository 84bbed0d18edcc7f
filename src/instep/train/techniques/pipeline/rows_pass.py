"""`step.all_rows` on a pipeline: the rows' gradients go back through the stages as a pass of their own.

The rows were made by calling the model without gradients, which gives its output on every rank. In the pass the function
runs once more behind the last stage, with the output of that stage in the place of the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.errors import UsageError
from instep.train import seeds
from instep.train.rows import AllRows, call_fn, statistics_kept
from instep.train.techniques.pipeline.job import Call, Job
from instep.train.techniques.pipeline.pipeline import Pipeline
from instep.train.techniques.pipeline.trace import Plan
from instep.train.techniques.pipeline.train_pass import run_schedules

if TYPE_CHECKING:
    from instep.train.run import Run
    from instep.train.step import Step
    from instep.train.update import Trained


def begin_rows(run: Run, fn: Callable[..., Any]) -> Callable[[Any], Any]:
    """fn of a micro-batch, held to one call of a model that is cut into stages. Every rank must call it."""
    for pipeline in run._pipelines:
        if pipeline.sharded is not None:
            pipeline.sharded.gather()  # up to the update: ranks with fewer micro-batches make fewer calls

    def checked(data: Any) -> Any:
        before = sum(pipeline.num_evaluations for pipeline in run._pipelines)
        rows = call_fn(fn, data)
        calls = sum(pipeline.num_evaluations for pipeline in run._pipelines) - before
        if calls != 1:
            raise UsageError(
                f"step.all_rows(fn): fn called a model that is cut into stages {calls} times, and a pipeline runs one call at a "
                "time. Call step.all_rows once for each call of the model."
            )
        return rows

    return checked


def check_one_loss(step: Step, chosen: Sequence[Trained]) -> None:
    """Raises UsageError for a second loss over rows, and for one beside step.forward_backward."""
    if step._rows and any(trained.reducer.lanes.next for trained in chosen):
        raise UsageError(
            "a pipeline takes one loss per step over the rows of step.all_rows: add the losses up, and call step.backward once, "
            "without step.forward_backward beside it."
        )


def backward_in_stages(run: Run, step: Step, factor: float, chosen: Sequence[Trained]) -> None:
    """After the backward of a loss over rows: what came to them, times `factor`, on to the parameters of all stages."""
    for rows in step._rows:
        if rows.gradients is not None:
            with statistics_kept(run):
                _send_back(run, rows, list(step._batches), factor, chosen)
            rows.end_backward()


def _send_back(run: Run, rows: AllRows, batches: list[Any], factor: float, chosen: Sequence[Trained]) -> None:
    found = [_find_call(run, rows, batch) for batch in batches]
    calls = [Call(batch, each.args, each.kwargs, place) for place, (batch, each) in enumerate(zip(batches, found))]
    pipeline = found[0].pipeline if found else run._pipelines[0]

    def loss_of(output: Any, place: int) -> Tensor:
        with pipeline.answering(lambda _args, _kwargs: output):
            pairs = rows.pair(place, rows.make(batches[place].data), factor)
        return torch.stack([(row * gradient).sum() for row, gradient in pairs]).sum()

    def job_of(call: Call, plan: Plan) -> Job:
        def begin() -> None:
            seeds.restore_generators(found[call.targets].generators)
            run._buffers.begin(call.batch.slot)

        discard = run._buffers.discard
        return Job(plan, call, begin, discard, discard, lambda _loss, _weight: (1.0, 1.0))

    run_schedules(chosen, lambda: pipeline.run_pass(calls, loss_of, job_of))


class _Called(BaseException):
    """A model was called; generators: as they stood. No Exception, so that a function that catches those lets it pass."""

    def __init__(self, pipeline: Pipeline, args: Any, kwargs: Any) -> None:
        self.pipeline, self.args, self.kwargs = pipeline, args, kwargs  # type: ignore[assignment]
        self.generators = seeds.get_generators()


def _find_call(run: Run, rows: AllRows, batch: Any) -> _Called:
    """What the function calls a model with."""

    def stop(pipeline: Pipeline, args: Any, kwargs: Any) -> Any:
        raise _Called(pipeline, args, kwargs)

    with ExitStack() as stack:
        for pipeline in run._pipelines:
            stack.enter_context(pipeline.answering(partial(stop, pipeline)))
        try:
            rows.run_fn(batch)
        except _Called as called:
            return called
        finally:
            run._buffers.discard()
    raise AssertionError("the function called a model when the rows were made")
