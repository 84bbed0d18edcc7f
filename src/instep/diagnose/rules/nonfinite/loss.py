"""The loss is not a number.

## What it sees
The first loss that is NaN or infinite, and what was finite at that moment: the batch, the parameters, and the first operation of the
forward pass whose inputs were numbers and whose result was not.

## Why it matters
From this step on every gradient and soon every parameter is NaN.

## What to do
It depends on what is named: a bad sample, a logarithm or division at 0, overflow in half precision, gradients that exploded, a learning
rate that is too high. The operation is kept with its inputs; `instep diagnose --replay RUN_DIR` does it again in wider precision.

## When it is wrong
Infinite losses that a loss scaler skips are not reported. On a GPU the loss is read a step later, so that the host need not wait: step,
rank, samples and the losses before are known then, the operation is not.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from instep.diagnose.naming import short
from instep.diagnose.nonfinite_source import find_operation, find_rate
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records import recording as layout
from instep.records.event import Event
from instep.records.finding import CallSite, Certainty, Finding

GROWTH = 100.0  # a loss that has grown so much over its smallest recent value has diverged
RAISED, RAISED_STEPS = 10.0, 4  # so many steps of a loss above so many times the smallest: it did not come at once
HUGE = 1e12  # no activation of a healthy model is so large
_FROM_OUTSIDE = "the result of what comes before"  # an input that no operation of the graph has made
EXPLODED = 100.0  # a gradient so many times larger than usual


@dataclass(frozen=True)
class Reason:
    cause: str
    fix: tuple[str, ...]
    where: CallSite | None
    certainty: Certainty = "likely"


def check(run: RunView) -> Iterator[Finding]:
    found = [(event.time, view, event) for view in run.ranks for event in view.named("nonfinite-loss")[:1]]
    if not found:
        return
    _, view, event = min(found, key=lambda row: (row[2].step, row[0]))
    here = view.site(event["site"])
    optimizers = view.named("optimizer")
    made = view.site(optimizers[0]["site"]) if optimizers else None
    reason = explain(event, here, find_forward(view, event.time), made)
    alone = len({one.rank for _, one, other in found if other.step == event.step}) == 1
    kept = view.named("replay-kept")
    yield Finding(
        id="nonfinite/loss",
        title=f"the loss became {event['value']} on rank {view.rank} in step {event.step + 1}",
        cause=reason.cause,
        fix=(*reason.fix, *(("instep diagnose --replay does the operation again in wider precision",) if kept else ())),
        evidence=(
            view.cite(f"loss {event['value']} at {short(here)}, batch {event['batches']}; before it: {_last(event)}"),
            *((view.cite(f"operation {_operation(event)}"),) if event["operation"] else ()),
        ),
        certainty=reason.certainty,
        ranks=(view.rank,)
        if event["batch"] or (alone and run.world_size > 1 and reason.certainty == "certain")
        else (),
        where=reason.where,
        explains=("numbers/*",),
    )


def _last(event: Event) -> str:
    return ", ".join(f"{value:.4g}" for value in event["history"][-4:]) or "nothing"


def _operation(event: Event) -> str:
    row = event["operation"]
    return f"{row['name']} {row['place']}: {row['why']}".replace("  ", " ")


def find_forward(view: RankView, before: float) -> CallSite | None:
    """Where the wrapped model was called with gradients, the last time before a moment."""
    calls = [mark for mark in view.marks if mark.kind == "enter-forward" and mark.when < before]
    trained = [mark for mark in calls if not mark.flags & layout.NO_GRAD]
    return view.site(trained[-1].site) if trained else None


def explain(
    event: Event, here: CallSite | None, called: CallSite | None = None, made: CallSite | None = None
) -> Reason:
    """From what is proven by the values themselves to what the steps before suggest. called: the line of the forward;
    made: that of the optimizer."""
    proven = _bad_batch(event, here) or _overflow(event, here)
    history = proven or diverged(event, here) or _grown(event, here)
    return (
        history
        or _bad_parameters(event, here, called, made)
        or _handed_over(event, called)
        or _operation_fault(event, here)
    )


def _bad_batch(event: Event, here: CallSite | None) -> Reason | None:
    if not event["batch"]:
        return None
    row = event["batch"][0]
    samples = f", samples {row['samples']} of the batch" if row["samples"] else ""
    indices = f", {row['indices']} of the data set" if row["indices"] else ""
    return Reason(
        f"The batch itself holds NaN or infinity (tensor {row['place']}{samples}{indices}).",
        ("mend or filter these samples in the data set",),
        here,
        "certain",
    )


def _overflow(event: Event, here: CallSite | None) -> Reason | None:
    row = event["operation"]
    if row is None or not row["overflow"]:
        return None
    where = find_operation(here, row["name"]) if not row["place"].startswith("in ") else None
    return Reason(
        f"Overflow in half precision: {row['why']} {row['place']}; in float32 the same operation is finite.",
        (
            "use bfloat16, which has the range of float32",
            f"or keep this part in float32, or scale it down ({row['place']})",
        ),
        where or here,
        "certain",
    )


def diverged(event: Event, here: CallSite | None) -> Reason | None:
    """The loss had grown over several steps, or a gradient had jumped in the last ones."""
    history, gradients = event["history"], [size for _, size in event.get("gradients", ())]
    lowest = min(history, default=0.0)
    grown = len(history) >= 3 and lowest > 0 and history[-1] > GROWTH * lowest
    raised = sum(value > RAISED * lowest for value in history) if lowest > 0 else 0
    usual = statistics.median(gradients) if len(gradients) >= 4 else 0.0
    jumped = usual > 0 and max(gradients[-2:]) > EXPLODED * usual
    if jumped and raised < RAISED_STEPS:
        sizes = ", ".join(f"{size:.3g}" for size in gradients[-4:])
        return Reason(
            f"The gradients exploded: their largest element went {sizes} over the last steps, while the loss was {_last(event)}.",
            ("clip gradients before the step: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",),
            here,
        )
    if grown:
        return Reason(
            f"The loss had grown from {lowest:.3g} to {history[-1]:.3g} before: training has diverged.",
            ("lower the learning rate, add warm-up, or clip gradients",),
            find_rate(here) or here,
        )
    return None


def _grown(event: Event, here: CallSite | None) -> Reason | None:
    """The values were so large that float32 came to its end, before the steps could show how they grew."""
    row = event["operation"]
    if row is None or not row["certain"] or row.get("largest", 0.0) < HUGE:
        return None
    sizes = ", ".join(f"{size:.3g} in step {step}" for step, size in event.get("gradients", ())[-3:])
    place = f" ({row['place']})" if row["place"] else ""
    return Reason(
        f"The values exploded: they had grown to {row['largest']:.3g} when {row['name']}{place} passed the end of float32"
        + (f". The largest sampled element of the gradients was {sizes}." if sizes else "."),
        (
            "clip gradients before the step: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            "lower the learning rate",
        ),
        here,
    )


def _bad_parameters(
    event: Event, here: CallSite | None, called: CallSite | None, made: CallSite | None
) -> Reason | None:
    if not event["parameters"]:
        return None
    if event.get("halves"):
        return Reason(
            f"Parameters that are float16 themselves were not finite before this step: {', '.join(event['parameters'][:3])}, while the gradients were. "
            "In float16 the small number that Adam adds below its fraction line (eps=1e-8) is 0, so an update divides by 0 where a gradient is 0.",
            (
                "keep the parameters in float32 and use torch.autocast for the forward, or make them bfloat16",
                "or pass eps=1e-4 to the optimizer",
            ),
            made or called or here,
        )
    return Reason(
        f"Parameters were not finite before this step: {', '.join(event['parameters'][:3])}. A gradient of the step before was not.",
        ("clip gradients, and look for a square root or norm whose derivative is infinite at 0",),
        here,
    )


def _handed_over(event: Event, called: CallSite | None) -> Reason | None:
    """The model's own input was bad: neither the batch that came from the loader, nor any operation with a graph."""
    row = event["operation"]
    if row is None or row["certain"] or _FROM_OUTSIDE not in row["why"] or called is None or not event["has_batch"]:
        return None
    return Reason(
        f"The model at {short(called)} was handed values that are not finite, while the batch of the data loader was finite: they arise in between.",
        (
            f"look at what the script does to the batch before {short(called)}: a standard deviation of a single sample, a division, a logarithm",
        ),
        called,
    )


def _operation_fault(event: Event, here: CallSite | None) -> Reason:
    row = event["operation"]
    if row is None and event.get("late"):
        clean = "Its batch was finite. " if event["has_batch"] else ""
        return Reason(
            f"{clean}The loss lies on a device and was read when its step was over, so that the operation that made it is not known.",
            (
                "run the step again under torch.autograd.detect_anomaly()",
                "or for a few steps on the CPU, where the operation is named",
            ),
            here,
            "possible",
        )
    if row is None:
        return Reason(
            "Batch and parameters were finite, so an operation in the forward or the loss made it.",
            ("run the step again under torch.autograd.detect_anomaly()",),
            here,
            "possible",
        )
    where = find_operation(here, row["name"]) or here
    place = f" ({row['place']})" if row["place"] else ""
    if not row["certain"]:
        return Reason(
            f"The first value that is not finite goes into {row['name']}{place}: {row['why']}.",
            ("look at what comes just before it", "run the step again under torch.autograd.detect_anomaly()"),
            where,
            "possible",
        )
    return Reason(
        f"{row['why'][:1].upper()}{row['why'][1:]} in {row['name'].lower()}{place} at {short(where)}, with finite inputs and parameters.",
        (f"keep the argument away from there at {short(where)}: clamp it, or add a small number",),
        where,
        "certain",
    )
