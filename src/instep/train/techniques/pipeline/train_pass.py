"""`step.forward_backward` on a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from instep.errors import UsageError
from instep.train import seeds
from instep.train.reduce.stage_reducer import StageReducer
from instep.train.reduce.stage_shard_reducer import StageShardReducer
from instep.train.techniques.pipeline.pipeline import Job, Pipeline

if TYPE_CHECKING:
    from instep.train.run import Run
    from instep.train.step import Step
    from instep.train.update import Trained


def find_pipeline(run: Run, model: Any) -> Pipeline | None:
    """Of the model, None where it is not cut. Raises UsageError for another model while one is cut."""
    found = next((pipeline for pipeline in run._pipelines if pipeline.model is model), None)
    if found is None and run._pipelines:
        raise UsageError(
            f"step.forward_backward got a {type(model).__name__} that run.prepare has not cut; it takes the "
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
    reducers = [trained.reducer for trained in chosen]
    assert all(isinstance(reducer, (StageReducer, StageShardReducer)) for reducer in reducers)
    reference = step._reference
    assert reference is not None
    for reducer in reducers:
        reducer.begin_schedule()  # type: ignore[union-attr]
    try:
        results = pipeline.run_pass(batches, loss_fn, lambda *found: _job(run, step, reference, *found))
    finally:
        for reducer in reducers:
            reducer.end_schedule()  # type: ignore[union-attr]
    first = run._slots.local.start
    for batch, result in zip(batches, results, strict=True):
        for reducer in reducers:
            reducer.note(batch.slot - first, reference, result)  # type: ignore[union-attr]


def _job(run: Run, step: Step, reference: float, batch: Any, plan: Any, args: Any, kwargs: Any, targets: Any) -> Job:
    number = step._pass

    def begin() -> None:
        seeds.set_generators(seeds.FORWARD, run._seed, step.index, number, batch.slot)
        run._buffers.begin(batch.slot)

    def read_weight(loss: Any, weight: Any) -> tuple[float, float]:
        step._current = batch
        value = step.check_weight(loss, weight)
        return value, value / reference * run._loss_scale.value

    return Job(plan, args, kwargs, targets, begin, run._buffers.end, read_weight)
