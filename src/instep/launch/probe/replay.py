"""The operation that made the first bad number, kept with its inputs, and done again later from the file.

The file holds tensors, numbers and text only; it is read with `weights_only`, so that no code in it can run.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from instep.launch.probe.first_bad import Culprit
from instep.launch.probe.operations import redo

MOST_BYTES = 64 << 20
_WIDER = (torch.float32, torch.float64)


def keep_operation(path: Path, culprit: Culprit, facts: dict[str, Any], batch: list[tuple[str, torch.Tensor]]) -> str:
    """Writes the file; says what was left out for its size, if anything. facts: step, rank, batch number, indices."""
    saved = {key: _plain(value) for key, value in culprit.saved.items()}
    left, kept, room = [], dict[str, Any](), MOST_BYTES
    for key, value in saved.items():
        room -= value.nbytes if isinstance(value, torch.Tensor) else 0
        if room < 0:
            left.append(key)
        else:
            kept[key] = value
    inputs: dict[str, torch.Tensor] = {}
    for place, tensor in batch:
        room -= tensor.nbytes
        if room >= 0:
            inputs[place] = tensor.detach().cpu().clone()
    content = {"operation": culprit.name, "why": culprit.why, "place": culprit.place, "facts": facts}
    torch.save(content | {"saved": kept, "batch": inputs, "left_out": left}, path)
    return ", ".join(left)


def _plain(value: Any) -> Any:
    """Tensors, numbers, text and lists of them; anything else as text."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)


def replay(path: Path) -> str:
    """What the kept operation gives when it is done again, in its own precision and in wider ones.

    Raises OSError, and ValueError for a file that is not one of ours.
    """
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        saved, facts = content["saved"], content["facts"]
        lines = [f"{_headline(content, facts)}", f"  {content['why']}"]
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"{path} is not an operation kept by `instep run`: {error}".splitlines()[0]) from None
    lines += [f"  kept  {key}: {_describe(value)}" for key, value in saved.items() if isinstance(value, torch.Tensor)]
    lines += [f"  kept  {place} of the batch: {_describe(tensor)}" for place, tensor in content["batch"].items()]
    lines += [f"  left out for its size: {', '.join(content['left_out'])}"] if content["left_out"] else []
    return "\n".join(lines + _again(content["operation"], saved)) + "\n"


def _headline(content: dict[str, Any], facts: dict[str, Any]) -> str:
    place = f" {content['place']}" if content["place"] else ""
    samples = f", samples {facts['indices']}" if facts.get("indices") else ""
    return f"rank {facts['rank']}, step {facts['step']}, batch {facts['batch']}{samples}: {content['operation']}{place}"


def _describe(tensor: torch.Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if not tensor.is_floating_point() or not tensor.numel():
        return kind
    good = tensor[torch.isfinite(tensor)]
    span = f", from {good.min().item():.4g} to {good.max().item():.4g}" if good.numel() else ""
    bad = tensor.numel() - good.numel()
    return f"{kind}{span}" + (f", {bad} not finite" if bad else "")


def _again(name: str, saved: dict[str, Any]) -> list[str]:
    own = next((value.dtype for value in saved.values() if isinstance(value, torch.Tensor)), torch.float32)
    first = redo(name, saved)
    if first is None:
        return [f"  {name} cannot be done again from what it keeps; its kept values are above"]
    lines = [f"  again in {str(own).removeprefix('torch.')}: {_first_bad(first, saved)}"]
    for dtype in _WIDER:
        wide = redo(name, saved, dtype)
        if dtype != own and wide is not None:
            lines.append(f"  again in {str(dtype).removeprefix('torch.')}: {_first_bad(wide, saved)}")
    return lines


def _first_bad(result: torch.Tensor, saved: dict[str, Any]) -> str:
    bad = ~torch.isfinite(result)
    if not bool(bad.any()):
        largest = result.abs().max().item() if result.numel() else 0.0
        return f"all finite, largest {largest:.6g}"
    at = tuple(bad.nonzero()[0].tolist())
    given = [
        f"{key} = {value[at].item():g}"
        for key, value in saved.items()
        if isinstance(value, torch.Tensor) and value.shape == result.shape and "result" not in key
    ]
    because = f" from {', '.join(given)}" if given else ""
    return f"{int(bad.sum())} of {bad.numel()} not finite, first at {list(at)}: {result[at].item()}{because}"
