"""A loss that is not a number: what was finite when it appeared, and which operation made it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.wrapping import WRAPPERS

_MOST_NODES = 4000
_LATEST_BATCH: list[tuple[str, weakref.ref[torch.Tensor]]] = []
SCALED: dict[str, Any] = {"raw": None, "scaled": None}  # of the newest GradScaler.scale


def remember_batch(batch: Any) -> None:
    """Knows the tensors of the newest batch without keeping them alive."""
    _LATEST_BATCH[:] = [(place, weakref.ref(tensor)) for place, tensor in tensors_in(batch)]


def note_nonfinite(recorder: Recorder, loss: torch.Tensor, site: int, history: list[float]) -> int:
    """Notes the first losses that are not finite; returns how many notes were written."""
    raw = SCALED["raw"]
    if SCALED["scaled"] is loss and raw is not None and bool(torch.isfinite(raw.detach()).all()):
        return 0  # overflow of the scaled loss: what a loss scaler is there to find and skip
    _note(recorder, loss, site, history)
    return 1


@contained
def _note(recorder: Recorder, loss: torch.Tensor, site: int, history: list[float]) -> None:
    recorder.log.note(
        "nonfinite-loss",
        site=site,
        value=str(loss.item()),
        history=[float(f"{value:.6g}") for value in history],
        batch=_bad_leaves(),
        has_batch=any(reference() is not None for _, reference in _LATEST_BATCH),
        parameters=_bad_parameters(),
        operation=first_bad_operation(loss),
        batches=recorder.batches,
        half=loss.dtype in (torch.float16, torch.bfloat16),
    )


def _bad_leaves() -> list[dict[str, Any]]:
    """Tensors of the batch that hold NaN or infinity, and the first rows that do."""
    rows = []
    for place, reference in _LATEST_BATCH:
        tensor = reference()
        if tensor is not None and tensor.is_floating_point():
            bad = ~torch.isfinite(tensor)
            if bool(bad.any()):
                samples = bad.flatten(1).any(1).nonzero().flatten().tolist() if tensor.dim() > 1 else []
                rows.append({"place": place, "samples": samples[:8]})
    return rows


def tensors_in(value: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place or "batch", value
    elif depth < 3 and isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{place}[{key!r}]", depth + 1)
    elif depth < 3 and isinstance(value, (list, tuple)):
        for index, item in enumerate(value[:8]):
            yield from tensors_in(item, f"{place}[{index}]", depth + 1)


def _bad_parameters() -> list[str]:
    names = []
    for wrapped in WRAPPERS.all:
        model = wrapped.model()
        if model is not None:
            names += [n for n, p in model.module.named_parameters() if not bool(torch.isfinite(p.detach()).all())]
    return names[:20]


def first_bad_operation(loss: torch.Tensor) -> dict[str, Any] | None:
    """The operation nearest to the leaves whose saved inputs are finite and whose result is not.

    Only operations that keep what they need for backward can be judged; None when none of them shows it.
    """
    found: dict[str, Any] | None = None
    seen: set[Any] = set()
    queue = [loss.grad_fn]
    while queue and len(seen) < _MOST_NODES:  # breadth first from the loss: the last one found is the deepest
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        found = _judge(node) or found
        queue.extend(parent for parent, _ in node.next_functions)
    return found


def _judge(node: Any) -> dict[str, Any] | None:
    name = type(node).__name__
    saved = {key: getattr(node, key, None) for key in dir(node) if key.startswith("_saved_")}
    tensors = {key: value for key, value in saved.items() if isinstance(value, torch.Tensor)}
    inputs = {key: value for key, value in tensors.items() if "result" not in key}
    finite = all(bool(torch.isfinite(value).all()) for value in inputs.values() if value.is_floating_point())
    results = [value for key, value in tensors.items() if "result" in key]
    if finite and any(not bool(torch.isfinite(value).all()) for value in results if value.is_floating_point()):
        return {"name": name, "why": "finite inputs, result not finite"}
    if not finite:
        return None
    self_, other = inputs.get("_saved_self"), inputs.get("_saved_other")
    if name.startswith("Log") and name[3:].startswith(("Backward", "2Backward", "10Backward")) and self_ is not None:
        lowest = self_.min().item()
        return {"name": name, "why": f"logarithm of {lowest:g}"} if lowest <= 0 else None
    if name.startswith("DivBackward") and other is not None and bool((other == 0).any()):
        return {"name": name, "why": "division by 0"}
    exponent = saved.get("_saved_exponent")
    if name.startswith("PowBackward0") and self_ is not None:
        negative = isinstance(exponent, (int, float)) and exponent < 0
        if negative and bool((self_ == 0).any()):
            return {"name": name, "why": f"0 to the power of {exponent:g}"}
    return None
