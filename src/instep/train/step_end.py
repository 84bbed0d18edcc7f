"""What follows an update: the loss scale, a look at skipped steps, schedules and the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.errors import InstepError
from instep.train.techniques.local_sgd import average_when_due
from instep.train.update import Trained

if TYPE_CHECKING:
    from instep.train.run import Run
    from instep.train.step import Step


def note_finite(run: Run, step: Step, trained: Trained, finite: bool) -> None:
    """Takes up whether the gradients of one optimizer's update were finite."""
    scale = run._loss_scale.value
    run._loss_scale.update(finite)
    if run._loss_scale.value != scale:
        for each in run._trained:
            each.reducer.transport.rescale(run._loss_scale.value / scale)
    if finite:
        trained.skips.note_good()
        return
    why = f"its gradients are not finite (loss {step.loss})"
    if run._loss_scale.enabled:
        why = f"gradients overflowed in fp16; loss scale {scale:g} -> {run._loss_scale.value:g}"
    if trained.skips.note_skipped(step.index, why):
        _check_parameters(run, trained)


def _check_parameters(run: Run, trained: Trained) -> None:
    """Raises InstepError when no step can be finite any more. Every rank must call it."""
    for broken in run._entered().gather_objects(trained.name_nonfinite(run._models), "a look at the parameters"):
        if broken is not None:
            raise InstepError(
                f"training has diverged: {broken} holds numbers that are not finite, so every further step would be "
                "skipped. Go back to a checkpoint, and lower the learning rate or set clip_norm."
            )


def after_update(run: Run, step: Step) -> None:
    """Ends the step after its usual number of updates; a loop with more of them ends it when it goes on."""
    step.update_calls += 1
    if run._usual_updates:
        is_last = step.update_calls == run._usual_updates
    else:
        is_last = step.num_passes <= 1 and all(trained.updates for trained in run._trained)
    if is_last:
        finish_step(run, step)


def finish_step(run: Run, step: Step) -> None:
    """Schedules and logs: once per step."""
    if step.finished:
        return
    step.finished = True
    rate = run._trained[0].optimizer.param_groups[0]["lr"] if run._trained else None
    for trained in run._trained:
        trained.schedule(step)
    average_when_due(run, step.index)
    step.advance_position()
    run._observer.step(
        step.index,
        step.epoch,
        step.loss,
        step.grad_norm,
        None if rate is None else float(rate),
        run._arguments.global_batch if step.num_samples is None else step.num_samples,
        step.skipped,
    )
