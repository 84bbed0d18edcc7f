"""A loss that is not a number: what was finite when it appeared, and which operation made it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from instep.launch.probe.first_bad import Culprit, find_first_bad
from instep.launch.probe.gradients import newest_sizes
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.replay import keep_operation
from instep.launch.probe.tensor_prints import tensors_in
from instep.launch.probe.wrapping import WRAPPERS

_LATEST_BATCH: list[tuple[str, weakref.ref[torch.Tensor]]] = []
_PLACES = [f"[{index}]" for index in range(8)]
_LATEST_INDICES: list[int] = []  # in the data set, of the samples of that batch; empty where they are not known
SCALED: dict[str, Any] = {"raw": None, "scaled": None}  # of the newest GradScaler.scale


def remember_batch(batch: Any, indices: list[int]) -> None:
    """Knows the tensors of the newest batch without keeping them alive, and which samples they are made of."""
    if type(batch) in (list, tuple) and all(isinstance(part, torch.Tensor) for part in batch):
        _LATEST_BATCH[:] = [(place, weakref.ref(tensor)) for place, tensor in zip(_PLACES, batch)]  # the usual case
    else:
        _LATEST_BATCH[:] = [(place, weakref.ref(tensor)) for place, tensor in tensors_in(batch)]
    _LATEST_INDICES[:] = indices


def note_nonfinite(recorder: Recorder, loss: torch.Tensor, site: int, history: list[float]) -> int:
    """Notes the first losses that are not finite; returns how many notes were written."""
    raw = SCALED["raw"]
    if SCALED["scaled"] is loss and raw is not None and bool(torch.isfinite(raw.detach()).all()):
        return 0  # overflow of the scaled loss: what a loss scaler is there to find and skip
    _note(recorder, loss, site, history)
    return 1


@contained
def _note(recorder: Recorder, loss: torch.Tensor, site: int, history: list[float]) -> None:
    culprit = find_first_bad(loss)
    recorder.log.note(
        "nonfinite-loss",
        site=site,
        value=str(loss.item()),
        history=[float(f"{value:.6g}") for value in history],
        gradients=newest_sizes(),
        batch=_bad_leaves(),
        has_batch=any(reference() is not None for _, reference in _LATEST_BATCH),
        indices=_LATEST_INDICES[:64],
        parameters=_bad_parameters(),
        operation=_describe(culprit) if culprit is not None else None,
        batches=recorder.batches,
    )
    if culprit is not None:
        _keep(recorder, culprit)


def _describe(culprit: Culprit) -> dict[str, Any]:
    row = {"name": culprit.name, "why": culprit.why, "place": culprit.place}
    largest = float(f"{culprit.largest:.4g}")
    return row | {"overflow": culprit.overflow, "certain": culprit.certain, "largest": largest}


@contained
def _keep(recorder: Recorder, culprit: Culprit) -> None:
    if recorder.replay_path is None or recorder.replay_path.exists():
        return
    facts = {"rank": recorder.rank, "step": recorder.num_steps + 1, "batch": recorder.batches}
    batch = [(place, tensor) for place, reference in _LATEST_BATCH if (tensor := reference()) is not None]
    left = keep_operation(recorder.replay_path, culprit, facts | {"indices": _LATEST_INDICES[:64]}, batch)
    recorder.log.note("replay-kept", left_out=left)


def _bad_leaves() -> list[dict[str, Any]]:
    """Tensors of the batch that hold NaN or infinity, the first rows that do, and which samples of the data set."""
    rows: list[dict[str, Any]] = []
    for place, reference in _LATEST_BATCH:
        tensor = reference()
        if tensor is not None and tensor.is_floating_point():
            bad = ~torch.isfinite(tensor)
            if bool(bad.any()):
                samples = bad.flatten(1).any(1).nonzero().flatten().tolist() if tensor.dim() > 1 else []
                known = len(_LATEST_INDICES) == tensor.shape[0] if tensor.dim() else False
                indices = [_LATEST_INDICES[row] for row in samples[:8]] if known else []
                rows.append({"place": place, "samples": samples[:8], "indices": indices})
    return rows


def _bad_parameters() -> list[str]:
    names = []
    for wrapped in WRAPPERS.all:
        model = wrapped.model()
        if model is not None:
            names += [n for n, p in model.module.named_parameters() if not bool(torch.isfinite(p.detach()).all())]
    return names[:20]
