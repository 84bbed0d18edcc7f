"""A model's parameters and buffers by plain name, and back in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from instep.errors import UsageError
from instep.train.absent import is_absent
from instep.train.checkpoint.encode import JSON, decode_state, encode_state, tensor_names
from instep.train.checkpoint.file_image import is_storable
from instep.train.checkpoint.names import plain_name, unwrap
from instep.train.checkpoint.source import Differences, Source


def capture_model(name: str, model: nn.Module) -> tuple[dict[str, torch.Tensor], JSON]:
    """Live tensors as `model/<name>/<key>`, and what else belongs to them: keys that are another name for one of
    them (tied weights), and the extra state of modules that have some. What other ranks hold is left to them."""
    tensors: dict[str, torch.Tensor] = {}
    same: dict[str, str] = {}
    extra: dict[str, JSON] = {}
    first: dict[int, str] = {}
    for key, value in _entries(model).items():
        full = f"model/{name}/{key}"
        if not isinstance(value, torch.Tensor):
            found, extra[key] = encode_state(value, full)
            tensors.update(found)
        elif id(value) in first:
            same[key] = first[id(value)]
        else:
            first[id(value)] = key
            if not is_absent(value):
                check_storable(full, value)
                tensors[full] = value.detach()
    return tensors, {"same": same, "extra": extra}


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raises UsageError for kinds of tensors that safetensors files cannot hold."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UsageError(f"{name} is a {kind} tensor, which a checkpoint cannot hold; keep it dense, or leave it out.")
    if tensor.is_meta:
        raise UsageError(f"{name} has no numbers yet (device meta); load or initialise the model before saving.")
    if not is_storable(tensor.dtype):
        raise UsageError(
            f"{name} has type {tensor.dtype}, which a checkpoint cannot hold; it holds real numbers and complex64."
        )


class ModelTarget:
    """A live model that is to take what was saved."""

    def __init__(self, name: str, model: nn.Module, saved: JSON, source: Source) -> None:
        self.name, self.model, self.saved, self.source = name, unwrap(model), saved, source
        self._state = self.model.state_dict(keep_vars=True)
        self._keys = {plain_name(key): key for key in self._state}

    def compare(self) -> Differences:
        found = Differences(f"model {self.name!r}")
        described, prefix = self.source.described, f"model/{self.name}/"
        extra_tensors = {each for value in self.saved["extra"].values() for each in tensor_names(value)}
        names = {name.removeprefix(prefix) for name in described if name.startswith(prefix)}
        known = {name for name in names if prefix + name not in extra_tensors}
        known |= {*self.saved["same"], *self.saved["extra"]}
        found.missing = sorted(set(self._keys) - known)
        found.unexpected = sorted(known - set(self._keys))
        taken_by: dict[int, str] = {}
        for key, target in self._tensors().items():
            full = self._saved_name(key)
            if full in described:
                found.compare(key, described[full], target)
                other = taken_by.setdefault(id(target), full)
                if other != full:
                    found.other.append(f"{key} and {other.removeprefix(prefix)} are one tensor here and two there")
        return found

    def targets(self) -> dict[str, list[torch.Tensor]]:
        """For each saved tensor the live ones that take it; two where weights were tied then and are not now."""
        found: dict[str, list[torch.Tensor]] = {}
        for key, target in self._tensors().items():
            if is_absent(target):
                continue
            takers = found.setdefault(self._saved_name(key), [])
            if all(target is not taker for taker in takers):
                takers.append(target)
        return found

    def finish(self, read_extra: Mapping[str, torch.Tensor]) -> None:
        """Hands the filled tensors to `load_state_dict`, so that hooks and extra state see them too."""
        for key, value in self.saved["extra"].items():
            self._state[self._keys[key]] = decode_state(value, read_extra)
        self.model.load_state_dict(self._state)  # the same object: it carries the versions of the modules

    def extra_names(self) -> list[str]:
        return [name for value in self.saved["extra"].values() for name in tensor_names(value)]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            plain: self._state[key] for plain, key in self._keys.items() if isinstance(self._state[key], torch.Tensor)
        }

    def _saved_name(self, key: str) -> str:
        return f"model/{self.name}/{self.saved['same'].get(key, key)}"


def _entries(model: nn.Module) -> dict[str, Any]:
    return {plain_name(key): value for key, value in unwrap(model).state_dict(keep_vars=True).items()}
