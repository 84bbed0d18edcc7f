"""What a step refuses: calls in the wrong place or order, and losses that cannot be trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from instep.errors import UsageError
from instep.train.call_arguments import show
from instep.train.reduce.words import Table
from instep.train.update import Trained

if TYPE_CHECKING:
    from instep.train.step import Step


def check_loss(loss: object) -> None:
    """Raises UsageError for what has no backward."""
    if not isinstance(loss, Tensor):
        raise UsageError(f"step.backward got {show(loss)}; it takes the loss, a tensor of shape ().")
    if loss.numel() != 1:
        raise UsageError(
            f"step.backward got a loss of shape {tuple(loss.shape)}; it has to be a scalar, a mean over the samples: loss.mean()."
        )
    if loss.is_complex():
        raise UsageError(
            f"step.backward got a complex loss ({str(loss.dtype).removeprefix('torch.')}), which has no least value. Give it a "
            "real number: loss.abs(), or loss.real."
        )
    if not loss.requires_grad:
        raise UsageError(
            "step.backward got a loss without a graph: it depends on no parameter that requires a gradient. Compute it "
            "from the model's output outside torch.no_grad(), or pass weight=0 when this micro-batch has nothing to say."
        )


def check_place(step: Step, call: str) -> None:
    """Raises UsageError for a call from inside the inner loop, or from behind the outer one."""
    if step._has_ended:
        raise UsageError(
            f"{call}() came when step {step.index} had ended already, so its gradients are gone. Call it inside the loop over "
            "run.steps, after the loop over the step's micro-batches."
        )
    if step._current is not None:
        raise UsageError(
            f"{call}() of step {step.index} was called inside the loop over the step's micro-batches, of which each rank has "
            "some. Call it once, after that loop: one level less of indentation."
        )


def is_unreached(step: Step, trained: Trained, table: Table) -> bool:
    """Whether backward ran and no parameter of this optimizer got a gradient, on any rank."""
    reached = not table.counted or not table.used.size or bool(table.used.any())
    trained.reached |= bool(table.counted) and reached
    if reached:
        return False
    name = type(trained.optimizer).__name__
    if not trained.reached and len(step._run._trained) == 1:
        raise UsageError(
            f"no parameter of {name} got a gradient in step {step.index}: the loss does not come from the model that "
            "run.prepare took. Call that model, not a copy of it or the one before a change of its parameters."
        )
    step._run._observer.say(f"no parameter of {name} got a gradient in a step, so its update does nothing (said once)")
    return True


def check_first_update(step: Step, trained: Trained) -> None:
    """Raises UsageError when there is nothing new since this optimizer's last update."""
    if step._updated_at.get(id(trained)) == (step._pass, step._backwards):
        raise UsageError(
            f"step.update() of step {step.index} came a second time without a step.backward in between. Call it once, after the "
            "loop over the step's micro-batches; with several optimizers name each: step.update(optimizer)."
        )


def check_backward(step: Step, trained: Trained) -> None:
    """Raises UsageError when gradients came another way than by step.backward, or not at all."""
    stray = trained.reducer.stray or step.stray
    if stray is not None:
        raise UsageError(
            f"loss.backward() at {stray} went past step.backward(loss), so its gradients would not be averaged as "
            f"the step's are. Write step.backward(loss) there: {stray.source}"
        )
    if not step._backwards and step._pass < 0:
        raise UsageError(
            f"step.update() of step {step.index} came before any backward. Iterate the step and call "
            "step.backward(loss) for its micro-batches first."
        )
