"""All that models and optimizers hold, as flat named tensors and JSON, and back in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from instep.train.checkpoint.encode import JSON, decode_state, encode_state
from instep.train.checkpoint.model_state import ModelTarget, capture_model, check_storable
from instep.train.checkpoint.optimizer_state import OptimizerTarget, capture_optimizer
from instep.train.checkpoint.source import Differences, InMemory, Source, refuse

__all__ = ["apply", "capture", "decode_state", "encode_state", "restore"]

_ADVICE = (
    "Build the same models and optimizers as when it was saved, or take only what fits with "
    "run.load_weights(path, strict=False)."
)


def capture(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    """Live tensors (not copies) as `model/<name>/<key>` and `optimizer/<name>/<model>/<parameter>/<key>`, and the
    rest as JSON. Raises UsageError for state that a checkpoint cannot hold."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, JSON] = {"models": {}, "optimizers": {}}
    for name, model in models.items():
        found, values["models"][name] = capture_model(name, model)
        tensors.update(found)
    for name, optimizer in optimizers.items():
        found, values["optimizers"][name] = capture_optimizer(name, optimizer, models)
        tensors.update(found)
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    return tensors, values


def merge_states(everyone: Sequence[dict[str, JSON]]) -> dict[str, JSON]:
    """Of what `capture` gave on ranks that hold different parameters: the optimizers, with the state of all."""
    merged = {name: dict(values) for name, values in everyone[0].items()}
    for values in everyone[1:]:
        for name, optimizer in values.items():
            merged[name]["state"] = {**optimizer["state"], **merged[name]["state"]}
    return merged


def apply(
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, JSON],
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
) -> None:
    """Puts whole tensors that are in memory back; see `restore`."""
    restore(InMemory(tensors), values, models, optimizers)


def restore(
    source: Source,
    values: Mapping[str, JSON],
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    kept_here: Mapping[str, Callable[[torch.Tensor], bool]] | None = None,
) -> None:
    """Puts what `capture` gave back in place, read straight into the live tensors.

    kept_here: by optimizer, of which parameters this rank keeps the state; of all, where it says nothing.

    Raises CheckpointError that lists all that does not fit, before anything is changed.
    """
    _check_names(values, models, optimizers)
    model_targets = [ModelTarget(name, model, values["models"][name], source) for name, model in models.items()]
    optimizer_targets = [
        OptimizerTarget(name, optimizer, models, values["optimizers"][name], source, (kept_here or {}).get(name))
        for name, optimizer in optimizers.items()
    ]
    everything = [*model_targets, *optimizer_targets]
    refuse("the checkpoint does not fit", [target.compare() for target in everything], _ADVICE)
    _read(source, [target.targets() for target in everything])
    for target in model_targets:
        extra = {
            name: torch.empty(source.described[name].shape, dtype=source.described[name].dtype)
            for name in target.extra_names()
        }
        source.read(extra)
        target.finish(extra)
    for target in optimizer_targets:
        target.finish()


def _read(source: Source, wanted: list[dict[str, list[torch.Tensor]]]) -> None:
    first: dict[str, torch.Tensor] = {}
    further: list[tuple[torch.Tensor, torch.Tensor]] = []
    for targets in wanted:
        for name, takers in targets.items():
            for taker in takers:
                if name in first:
                    further.append((taker, first[name]))
                else:
                    first[name] = taker
    source.read(first)
    with torch.no_grad():
        for taker, filled in further:
            taker.copy_(filled)


def _check_names(
    values: Mapping[str, JSON], models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> None:
    kinds = {"models": models, "optimizers": optimizers}
    found = [
        Differences(
            kind, missing=sorted(set(here) - set(values[kind])), unexpected=sorted(set(values[kind]) - set(here))
        )
        for kind, here in kinds.items()
    ]
    refuse("the checkpoint does not fit", found, _ADVICE)
