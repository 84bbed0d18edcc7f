"""Weights from elsewhere into a model, and a model's weights for elsewhere."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from instep.errors import CheckpointError, InstepError, UsageError
from instep.train.absent import is_absent
from instep.train.checkpoint.durable_file import sync_directory
from instep.train.checkpoint.names import plain_name, unwrap
from instep.train.checkpoint.pieces import is_dtensor
from instep.train.checkpoint.source import Differences, refuse
from instep.train.checkpoint.weight_files import Weights, open_weights
from instep.train.world import World


def load_weights(
    model: nn.Module,
    path: Path | str,
    world: World | None = None,
    *,
    strict: bool = True,
    name: str | None = None,
    say: Callable[[str], None] = print,
) -> Differences:
    """Fills the model in place, each rank the part that it holds, and returns what did not fit.

    path: a torch.save file, safetensors, a Hugging Face or torch.distributed.checkpoint folder, a checkpoint or a run
    directory of instep; prefixes such as `module.` do not matter. With `strict` anything that does not fit raises
    CheckpointError before the model is touched; without, it is said. Every rank must call it; all raise if one does.
    """
    try:
        found, failure = _load(model, Path(path), strict, name), None
    except InstepError as error:
        found, failure = Differences(str(path)), error
    except OSError as error:
        found, failure = Differences(str(path)), CheckpointError(f"{path} cannot be read: {error.strerror or error}.")
    failures = [failure] if world is None else world.gather_objects(failure, "run.load_weights")
    first = next((each for each in failures if each is not None), None)
    if first is not None:
        raise first
    if found and (world is None or world.is_main):
        say(f"weights loaded in part: {found}.")
    return found


def _load(model: nn.Module, path: Path, strict: bool, name: str | None) -> Differences:
    weights = open_weights(path, name)
    state = unwrap(model).state_dict(keep_vars=True)
    live = {plain_name(key): value for key, value in state.items() if isinstance(value, torch.Tensor)}
    names = match_names(live, weights)
    found = Differences(str(path))
    targets: dict[str, torch.Tensor] = {}
    for key, target in live.items():
        if key in names:
            count = len(found.other)
            found.compare(key, weights.source.described[names[key]], target, with_type=False)
            if len(found.other) == count and not is_absent(target):
                targets[names[key]] = target
    filled = {id(target) for key, target in live.items() if key in names}
    found.missing = [key for key, target in live.items() if key not in names and id(target) not in filled]
    found.unexpected = _unexpected(weights, set(names.values()), names, live)
    if strict:
        refuse("the weights do not fit the model", [found], "Pass strict=False to take what fits.")
    weights.source.read(targets)
    unwrap(model).load_state_dict(state)  # itself into itself, so that hooks on loading run
    return found


def match_names(live: Iterable[str], weights: Weights) -> dict[str, str]:
    """The model's names -> the file's, under the prefix that fits most of them; none at all is preferred."""
    plain: dict[str, str] = {}
    for name in weights.source.described:
        plain.setdefault(plain_name(name), name)
    keys = list(live)
    prefixes = Counter({"": 1})
    ends = set(keys)
    for name in plain:
        parts = name.split(".")
        prefixes.update(
            "".join(f"{part}." for part in parts[:i]) for i in range(len(parts)) if ".".join(parts[i:]) in ends
        )
    prefix = max(prefixes, key=lambda each: (prefixes[each], -len(each)))
    found = {key: plain[prefix + key] for key in keys if prefix + key in plain}
    for key, other in weights.same.items():
        if key in ends and key not in found and prefix + other in plain:
            found[key] = plain[prefix + other]
    return found


def _unexpected(weights: Weights, used: set[str], names: dict[str, str], live: dict[str, torch.Tensor]) -> list[str]:
    left = [name for name in weights.source.described if name not in used]
    if weights.has_more and names:
        key = next(iter(names))
        prefix = plain_name(names[key]).removesuffix(key)
        left = [name for name in left if prefix and plain_name(name).startswith(prefix)]
    return left


def export(model: nn.Module, path: Path | str, world: World) -> None:
    """One safetensors file with plain names and whole tensors, whatever the split. Every rank must call it.

    Tied weights are written under each of their names, so that a strict load_state_dict in plain PyTorch takes it.
    Raises UsageError for a name that does not end in .safetensors, CheckpointError when it cannot be written.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise UsageError(f"run.export({str(path)!r}): the name has to end in .safetensors, as in 'model.safetensors'.")
    state = unwrap(model).state_dict(keep_vars=True)
    whole = _collect({plain_name(key): value for key, value in state.items() if isinstance(value, torch.Tensor)}, world)
    failure = None
    if world.is_main:
        try:
            write_weights({key: value.clone() for key, value in whole.items()}, target)
        except OSError as error:
            failure = f"the weights could not be exported to {target}: {error.strerror or error}."
    failure = world.broadcast_object(failure, "run.export")
    if failure is not None:
        raise CheckpointError(failure)


def _collect(state: dict[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
    """Whole tensors: on rank 0 all of them, where ranks hold different ones."""
    absent = [key for key, value in state.items() if is_absent(value)]
    lacking = world.gather_objects(absent, "run.export")
    if not any(lacking):
        return {key: _whole(value.detach()) for key, value in state.items()}
    wanted, found = set(lacking[0]), {}
    for key, value in state.items():
        holder = next(rank for rank, keys in enumerate(lacking) if key not in keys)
        if key not in absent:
            whole = _whole(value.detach()).contiguous()
            if world.is_main:
                found[key] = whole
            elif key in wanted and world.rank == holder:
                dist.send(whole.cpu(), dst=0, group=world.host_group)
        elif world.is_main:
            found[key] = torch.empty(value.shape, dtype=value.dtype)
            dist.recv(found[key], src=holder, group=world.host_group)
    return found


def write_weights(tensors: dict[str, torch.Tensor], target: Path) -> None:
    """A safetensors file, or with the suffix .pt one of torch.save. Replaces it in one rename, durable when it
    returns. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        dense = {key: value.cpu().contiguous() for key, value in tensors.items()}
        if target.suffix == ".pt":
            torch.save(dense, partial)
        else:
            _save_safetensors(dense, partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(target.parent)


def _save_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # which its Rust side raises for what is an OSError elsewhere
        raise OSError(str(error)) from None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[operator]


def convert_weights(source: Path, target: Path, name: str | None = None) -> int:
    """Weights of any format that can be read, as one .safetensors or .pt file; how many tensors. Raises OSError."""
    weights = open_weights(source, name, must_match=True)
    described = weights.source.described
    tensors = {key: torch.empty(each.shape, dtype=each.dtype) for key, each in described.items()}
    weights.source.read(tensors)
    for key, other in weights.same.items():
        tensors[key] = tensors[other].clone()
    write_weights(tensors, target)
    return len(tensors)
