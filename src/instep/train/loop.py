"""`run.steps`: one Step after the other, from where the run stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from instep.errors import UsageError
from instep.train import seeds
from instep.train.agree import agree
from instep.train.call_arguments import show
from instep.train.data.loader import Epoch, Loader, MicroBatch
from instep.train.position import LoopPosition
from instep.train.slots import check_positive
from instep.train.step import Step
from instep.train.techniques.local_sgd import average_all

if TYPE_CHECKING:
    from instep.train.run import Run


def loop_steps(run: Run, loader: Loader | None, epochs: int | None, steps: int | None) -> Iterator[Step]:
    """Checks the arguments at the call, then yields lazily."""
    if loader is not None and not isinstance(loader, Loader):
        hint = f" Without data: run.steps(steps={loader})." if isinstance(loader, int) else ""
        raise UsageError(f"run.steps got {show(loader)}; it takes what run.loader(...) returns.{hint}")
    if (epochs is None) == (steps is None):
        given = (
            f"run.steps got epochs={epochs} and steps={steps}"
            if steps is not None
            else "run.steps got neither epochs= nor steps="
        )
        raise UsageError(f"{given}: give one of the two, as run.steps(loader, epochs=10).")
    check_positive("epochs" if steps is None else "steps", epochs if steps is None else steps)
    if loader is None and steps is None:
        raise UsageError("run.steps without a loader has no epochs: say how many steps, run.steps(steps=1000).")
    number = run._calls
    run._calls += 1
    position = run._position.loop(number)
    for earlier in run._position.loops[:number]:
        earlier.done = True  # a restart does not go back to it, though it may have been left by `break`
    if position.done:
        return iter(())
    if loader is None:
        assert steps is not None
        return _slot_steps(run, position, steps)
    return _data_steps(run, loader, position, epochs, steps)


def _data_steps(
    run: Run, loader: Loader, position: LoopPosition, epochs: int | None, steps: int | None
) -> Iterator[Step]:
    try:
        per_epoch = len(loader)
    except TypeError:
        per_epoch = None
    total = steps if steps is not None else epochs * per_epoch if epochs is not None and per_epoch is not None else None
    done = position.taken
    asked = {"epochs": epochs, "steps": steps, **loader.describe()}
    agree(asked, run._entered(), "run.steps", "data or another number of steps")
    run._observer.plan(total, done)
    while (epochs is None or position.epoch < epochs) and (steps is None or position.taken < steps):
        epoch = loader.start_epoch(position.epoch, position.step, position.streams, spread=run._spread_short_steps)
        position.streams = None
        try:
            yield from _epoch_steps(run, epoch, position, epochs, steps)
        finally:
            epoch.close()
    average_all(run, "the end of run.steps")


def _epoch_steps(
    run: Run, epoch: Epoch, position: LoopPosition, epochs: int | None, steps: int | None
) -> Iterator[Step]:
    number = position.epoch
    if run._spread_short_steps and epoch.num_steps is None:
        raise UsageError(
            "sync_batch_norm=True needs every rank to have samples in every step, which data whose streams end at different "
            "times do not give: use a map-style dataset, or leave sync_batch_norm out."
        )
    has_next = _any_rank_has(run, epoch)
    if not has_next and position.step == 0:
        raise UsageError(f"the data gave no sample in epoch {number}: a step needs at least one.")
    while has_next and position.epoch == number and (steps is None or position.taken < steps):
        batches = epoch.next_step()
        run._epoch = epoch
        has_next = _any_rank_has(run, epoch)
        step = Step(run, position, batches, ends_epoch=not has_next)
        yield from _one(run, step)
    if position.epoch == number and not has_next:  # resumed at the end of an epoch, or a step that had no update
        position.epoch, position.step = number + 1, 0


def _any_rank_has(run: Run, epoch: Epoch) -> bool:
    """Whether there is a next step. Streams end when all ranks' have, which they have to tell each other."""
    if epoch.num_steps is not None:
        return epoch.has_next()
    return any(run._entered().gather_objects(epoch.has_next(), "the next step of run.steps"))


def _slot_steps(run: Run, position: LoopPosition, steps: int) -> Iterator[Step]:
    run._observer.plan(steps, position.taken)
    agree({"steps": steps}, run._entered(), "run.steps", "numbers of steps")
    while position.taken < steps:
        slots = [MicroBatch(slot, run._slots.micro_batch, slot) for slot in run._slots.local]
        yield from _one(run, Step(run, position, slots, ends_epoch=False))
    average_all(run, "the end of run.steps")


def _one(run: Run, step: Step) -> Iterator[Step]:
    run._step = step
    run._observer.begin(step.index)
    seeds.set_generators(seeds.OUTSIDE, run._seed, step.index, 0)
    yield step
    step.end()


__all__: list[Any] = ["loop_steps"]
