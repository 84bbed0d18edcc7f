"""A loss that is not a number: what was finite when it appeared, and which operation made it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from instep.launch.probe.first_bad import Culprit, find_first_bad
from instep.launch.probe.gradients import newest_sizes
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.replay import keep_operation
from instep.launch.probe.tensor_prints import tensors_in
from instep.launch.probe.wrapping import WRAPPERS

_LATEST_BATCH: list[tuple[str, weakref.ref[torch.Tensor]]] = []
_TENSORS = {torch.Tensor}
_PLACES = [f"[{index}]" for index in range(8)]
_LATEST_INDICES: list[int] = []  # in the data set, of the samples of that batch; empty where they are not known
SCALED: dict[str, Any] = {"raw": None, "scaled": None}  # of the newest GradScaler.scale


def remember_batch(batch: Any, indices: list[int]) -> None:
    """Knows the tensors of the newest batch without keeping them alive, and which samples they are made of."""
    if type(batch) in (list, tuple) and _TENSORS.issuperset(map(type, batch)):
        _LATEST_BATCH[:] = zip(_PLACES, map(weakref.ref, batch))  # the usual case
    else:
        _LATEST_BATCH[:] = [(place, weakref.ref(tensor)) for place, tensor in tensors_in(batch)]
    _LATEST_INDICES[:] = indices


@dataclass(frozen=True)
class SentLoss:
    """What is known of a loss that is read later. batch: its tensors in memory of the host, by their place."""

    step: int
    site: int
    batches: int
    batch: tuple[tuple[str, torch.Tensor], ...]
    indices: tuple[int, ...]
    has_batch: bool


def what_is_sent(recorder: Recorder, loss: torch.Tensor, site: int, keeps_batch: bool) -> tuple[torch.Tensor, SentLoss]:
    """The number to read for a loss, and what is to be known when it has come. Of a scaled loss that is the one before
    scaling, since overflow is what a loss scaler is there to find and skip. keeps_batch: holds its tensors meanwhile."""
    raw = SCALED["raw"]
    value = raw if SCALED["scaled"] is loss and raw is not None and raw.numel() == 1 else loss
    held = tuple((place, tensor) for place, tensor in _latest() if tensor.is_cpu) if keeps_batch else ()
    sent = SentLoss(recorder.num_steps, site, recorder.batches, held, tuple(_LATEST_INDICES[:512]), bool(held))
    return value, sent


@contained
def _note_late(recorder: Recorder, value: float, sent: SentLoss, history: list[float]) -> None:
    here = recorder.log.step
    recorder.log.step = sent.step  # the step whose loss it was
    recorder.log.note(
        "nonfinite-loss",
        site=sent.site,
        value=str(value),
        history=[float(f"{one:.6g}") for one in history],
        gradients=[row for row in newest_sizes() if row[0] <= sent.step],
        batch=_bad_leaves(sent.batch, sent.indices),
        has_batch=sent.has_batch,
        indices=list(sent.indices[:64]),
        parameters=[],  # they have been updated since
        operation=None,  # its graph is gone
        batches=sent.batches,
        late=True,
    )
    recorder.log.step = here


def note_late_nonfinite(recorder: Recorder, value: float, sent: SentLoss, history: list[float]) -> int:
    """As `note_nonfinite`, for a loss of a device that was read when its step was over."""
    _note_late(recorder, value, sent, history)
    return 1


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
        batch=_bad_leaves(_latest(), _LATEST_INDICES),
        has_batch=any(reference() is not None for _, reference in _LATEST_BATCH),
        indices=_LATEST_INDICES[:64],
        parameters=_bad_parameters(),
        halves=_are_halves(),
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
    left = keep_operation(recorder.replay_path, culprit, facts | {"indices": _LATEST_INDICES[:64]}, _latest())
    recorder.log.note("replay-kept", left_out=left)


def _latest() -> list[tuple[str, torch.Tensor]]:
    """The tensors of the newest batch that are still there."""
    return [(place, tensor) for place, reference in _LATEST_BATCH if (tensor := reference()) is not None]


def _bad_leaves(batch: Iterable[tuple[str, torch.Tensor]], known_indices: Sequence[int]) -> list[dict[str, Any]]:
    """Tensors of a batch that hold NaN or infinity, the first rows that do, and which samples of the data set."""
    rows: list[dict[str, Any]] = []
    for place, tensor in batch:
        if tensor.is_floating_point():
            bad = ~torch.isfinite(tensor)
            if bool(bad.any()):
                samples = bad.flatten(1).any(1).nonzero().flatten().tolist() if tensor.dim() > 1 else []
                known = len(known_indices) == tensor.shape[0] if tensor.dim() else False
                indices = [known_indices[row] for row in samples[:8]] if known else []
                rows.append({"place": place, "samples": samples[:8], "indices": indices})
    return rows


def _are_halves() -> bool:
    """Whether the optimizer works on parameters in float16 themselves."""
    return any(p.dtype is torch.float16 for wrapped in WRAPPERS.all for p in wrapped.parameters[:8])


def _bad_parameters() -> list[str]:
    names = []
    for wrapped in WRAPPERS.all:
        model = wrapped.model()
        if model is not None:
            names += [n for n, p in model.module.named_parameters() if not bool(torch.isfinite(p.detach()).all())]
    return names[:20]
