"""`step.forward_backward` on a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from instep.errors import UsageError
from instep.train import seeds
from instep.train.call_arguments import show
from instep.train.forward_backward import take_apart
from instep.train.reduce.stage_reducer import StageReducer
from instep.train.reduce.stage_shard_reducer import StageShardReducer
from instep.train.techniques.pipeline.job import Call, Job, Result
from instep.train.techniques.pipeline.pipeline import Pipeline
from instep.train.techniques.pipeline.stage_times import advise_on_cut
from instep.train.techniques.pipeline.trace import Plan

if TYPE_CHECKING:
    from instep.train.run import Run
    from instep.train.step import Step
    from instep.train.update import Trained

TIMED = (2, 0)  # the step and the pass of it whose parts are timed: caches are warm by then


def find_pipeline(run: Run, model: Any) -> Pipeline | None:
    """Of the model, None where it is not cut. Raises UsageError for another model while one is cut."""
    found = next((pipeline for pipeline in run._pipelines if pipeline.model is model), None)
    if found is None and run._pipelines:
        raise UsageError(
            f"step.forward_backward got {show(model)} that run.prepare has not cut; it takes the "
            f"{type(run._pipelines[0].model).__name__} itself, as run.prepare returned it."
        )
    return found


def train_pass(
    run: Run,
    step: Step,
    pipeline: Pipeline,
    batches: Sequence[Any],
    loss_fn: Callable[..., Any],
    chosen: Sequence[Trained],
) -> None:
    """One pass over this data rank's micro-batches. Every rank of the pipeline must call it."""
    reference, number = step._reference, step._pass
    assert reference is not None
    calls = [Call(batch, *take_apart(pipeline.model, batch.data)) for batch in batches]

    def job_of(call: Call, plan: Plan) -> Job:
        def begin() -> None:
            seeds.set_generators(seeds.FORWARD, run._seed, step.index, number, call.batch.slot)
            run._buffers.begin(call.batch.slot)

        def read_weight(loss: Any, weight: Any) -> tuple[float, float]:
            step._current = call.batch
            value = step.check_weight(loss, weight)
            return value, value / reference * run._loss_scale.value

        return Job(plan, call, begin, run._buffers.end, run._buffers.discard, read_weight)

    def run_pass() -> list[Result]:
        return pipeline.run_pass(calls, loss_fn, job_of)

    is_timed = (step.index, number) == TIMED
    results = run_schedules(chosen, partial(_time_pass, run, pipeline, run_pass) if is_timed else run_pass)
    first = run._slots.local.start
    for batch, result in zip(batches, results, strict=True):
        for trained in chosen:
            trained.reducer.note(batch.slot - first, reference, result)  # type: ignore[union-attr]


def _time_pass(run: Run, pipeline: Pipeline, run_pass: Callable[[], list[Result]]) -> list[Result]:
    """Says where the model had better be cut, if the parts' times tell. Every rank of the pipeline must call it."""
    with pipeline.timing() as clock:
        results = run_pass()
    seconds: dict[str, float] = {}
    for found in pipeline.world.gather_objects(clock.read(), "step.forward_backward"):
        seconds.update(found)
    advice = advise_on_cut(pipeline.model, pipeline.cuts, seconds)
    if advice is not None:
        run._observer.say(advice)
    return results


def run_schedules(chosen: Sequence[Trained], run_pass: Callable[[], list[Result]]) -> list[Result]:
    """A pass in which reducers take up the gradients of schedules."""
    reducers = [trained.reducer for trained in chosen]
    assert all(isinstance(reducer, (StageReducer, StageShardReducer)) for reducer in reducers)
    for reducer in reducers:
        reducer.begin_schedule()  # type: ignore[union-attr]
    try:
        return run_pass()
    finally:
        for reducer in reducers:
            reducer.end_schedule()  # type: ignore[union-attr]
