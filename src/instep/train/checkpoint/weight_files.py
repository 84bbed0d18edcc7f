"""Weights in the formats that others write, opened as a Source. None of them runs code."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from instep.errors import CheckpointError
from instep.records.run_dir import CheckpointDir, RunDir
from instep.train.checkpoint.dcp_folder import DcpFolder
from instep.train.checkpoint.manifest import Damage, find_damage, read_manifest
from instep.train.checkpoint.shards import index_files
from instep.train.checkpoint.shelf import Shelf
from instep.train.checkpoint.source import InMemory, Source, some

SECTIONS = ("model", "state_dict", "model_state_dict", "module", "net", "weights")  # where scripts keep the weights


@dataclass(frozen=True)
class Weights:
    """same: keys that stand for another (tied weights); has_more: names outside the model's prefix are not weights."""

    source: Source
    same: Mapping[str, str]
    has_more: bool = False


def open_weights(path: Path, name: str | None = None, must_match: bool = False) -> Weights:
    """name: which model of an instep checkpoint; where it holds one, another name is an error only with `must_match`.
    Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if path.is_dir():
        return _open_folder(path, name, must_match)
    if path.suffix == ".safetensors":
        return Weights(index_files([path]), {})
    return Weights(InMemory(read_torch_file(path)), {})


def _open_folder(path: Path, name: str | None, must_match: bool) -> Weights:
    if CheckpointDir(path).complete.exists():
        return _open_ours(path, name, must_match)
    if RunDir(path).checkpoints.is_dir() or RunDir(path.parent).checkpoints == path:
        return _open_ours(_newest(path), name, must_match)
    for index in sorted(path.glob("*.index.json")):
        return _open_indexed(index)
    files = sorted(path.glob("*.safetensors"))
    if files:
        return Weights(index_files(files), {})
    if (path / ".metadata").exists():
        return Weights(DcpFolder(path), {}, has_more=True)
    files = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if len(files) == 1:
        return Weights(InMemory(read_torch_file(files[0])), {})
    raise CheckpointError(
        f"{path} holds no weights that instep knows: a checkpoint of instep, safetensors files, a Hugging Face index, "
        f"a folder of torch.distributed.checkpoint, or one torch.save file. It has {some(_listing(path))}."
    )


def _open_ours(path: Path, name: str | None, must_match: bool) -> Weights:
    try:
        manifest = read_manifest(path)
        problems = find_damage(path, manifest)
    except Damage as damage:
        problems, manifest = [str(damage)], None
    if problems or manifest is None:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {'; '.join(problems)}.")
    models = json.loads(CheckpointDir(path).values.read_bytes())["models"]
    if len(models) == 1 and not (must_match and name is not None):
        (name,) = models
    if name not in models:
        raise CheckpointError(f"{path} holds the models {', '.join(models)}; name the one that is meant.")
    index = index_files(path / file for file in manifest.files if file.endswith(".safetensors"))
    prefix = f"model/{name}/"
    return Weights(
        _Renamed(index, {n.removeprefix(prefix): n for n in index.described if n.startswith(prefix)}),
        models[name]["same"],
    )


def _newest(path: Path) -> Path:
    run_dir = RunDir(path if RunDir(path).checkpoints.is_dir() else path.parent)
    complete, problems = Shelf(run_dir).list_complete()
    if not complete:
        raise CheckpointError(f"there is no whole checkpoint in {run_dir.checkpoints}. {'; '.join(problems)}".rstrip())
    return complete[0][0].root


def _open_indexed(index: Path) -> Weights:
    """A Hugging Face index: {"weight_map": {name: file}}."""
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of weights: {error!r}.") from None
    absent = [file for file in files if not (index.parent / file).is_file()]
    if absent or any("/" in file for file in files):
        raise CheckpointError(f"{index} names files that are not beside it: {some(absent or files)}.")
    if all(file.endswith(".safetensors") for file in files):
        return Weights(index_files(index.parent / file for file in files), {})
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(read_torch_file(index.parent / file))
    return Weights(InMemory(tensors), {})


def read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a torch.save file, in host memory. Raises CheckpointError when that would run code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about formats of older files, which the result does not depend on
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, and reading that would run code from the file ({_reason(error)}). Save "
            "the weights alone: torch.save(model.state_dict(), path)."
        ) from None
    except Exception as error:  # noqa: BLE001 - the unpickler fails with nearly anything on what is no pickle
        raise CheckpointError(f"{path} is not a whole torch.save file: {_reason(error)}.") from None
    return _find_weights(content, path)


def _find_weights(content: Any, path: Path) -> dict[str, torch.Tensor]:
    """A dict of tensors, at the top or in the section that scripts usually keep it in."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dict of tensors by name.")
    if any(isinstance(value, torch.Tensor) for value in content.values()):
        return {str(key): value for key, value in content.items() if isinstance(value, torch.Tensor)}
    sections = {
        str(key): value
        for key, value in content.items()
        if isinstance(value, Mapping) and any(isinstance(each, torch.Tensor) for each in value.values())
    }
    chosen = next((name for name in SECTIONS if name in sections), None)
    if chosen is None and len(sections) == 1:
        chosen = next(iter(sections))
    if chosen is None:
        raise CheckpointError(
            f"{path} has no section of weights that instep knows ({', '.join(SECTIONS)}); it has: "
            f"{some([str(key) for key in content])}. Save model.state_dict() alone."
        )
    return _find_weights(sections[chosen], path)


class _Renamed:
    """A Source under other names. names: the new one -> the one inside."""

    def __init__(self, inner: Source, names: Mapping[str, str]) -> None:
        self._inner, self._names = inner, names
        self.described = {new: inner.described[old] for new, old in names.items()}

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        self._inner.read({self._names[name]: target for name, target in targets.items()})


def _listing(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line]
    text = lines[0] if lines else (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text[:200].rstrip(". ") if any(map(str.isalpha, text)) else "it begins like none"
