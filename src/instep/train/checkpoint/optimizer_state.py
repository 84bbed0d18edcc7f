"""An optimizer's state by the names of its parameters, and back.

torch numbers parameters in the order in which they were given; names hold whatever the order and the split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep.train.absent import is_absent
from instep.train.checkpoint.encode import JSON, decode_state, encode_state, tensor_names
from instep.train.checkpoint.names import plain_name, unwrap
from instep.train.checkpoint.source import Differences, Source

# how the same update is computed: the script and its device say so, not the checkpoint
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def name_parameters(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """`<model>/<name>` of every parameter; tied ones under each of their names."""
    return {
        f"{model_name}/{plain_name(name)}": parameter
        for model_name, model in models.items()
        for name, parameter in unwrap(model).named_parameters(remove_duplicate=False)
    }


def capture_optimizer(
    name: str, optimizer: Optimizer, models: Mapping[str, nn.Module]
) -> tuple[dict[str, torch.Tensor], JSON]:
    """Live tensors as `optimizer/<name>/<model>/<parameter>/<key>`, and hyperparameters and plain state as JSON.

    A parameter that is in no model is named by its place, and its own value is kept with the state.
    """
    tensors: dict[str, torch.Tensor] = {}
    state_dict = optimizer.state_dict()
    parameters = _by_number(optimizer)
    names = _names_by_number(optimizer, models)
    state: dict[str, JSON] = {}
    for number, entry in state_dict["state"].items():
        path = f"optimizer/{name}/{names[number]}" if number in names else f"optimizer/{name}/state"
        found, state[names.get(number, str(number))] = encode_state(entry, path)
        tensors.update(found)
    for number, parameter in parameters.items():
        if _is_loose(names[number]):
            tensors[_loose_name(name, names[number])] = parameter.detach()
    groups = [
        _encode_group(f"optimizer/{name}/group{i}", group, names, tensors)
        for i, group in enumerate(state_dict["param_groups"])
    ]
    found, other = encode_state(
        {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")},
        f"optimizer/{name}/other",
    )
    tensors.update(found)
    return tensors, {"state": state, "groups": groups, "other": other}


def _encode_group(path: str, group: dict[str, Any], names: dict[int, str], tensors: dict[str, torch.Tensor]) -> JSON:
    options = {key: value for key, value in group.items() if _is_kept(key, value)}
    found, encoded = encode_state(options, path)
    tensors.update(found)
    return {"parameters": [names[number] for number in group["params"]], "options": encoded}


def _is_kept(key: str, value: object) -> bool:
    return key not in ("params", "param_names", *IMPLEMENTATION) and not callable(value)


class OptimizerTarget:
    """A live optimizer that is to take what was saved."""

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        models: Mapping[str, nn.Module],
        saved: JSON,
        source: Source,
        kept_here: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self.name, self.optimizer, self.saved, self.source = name, optimizer, saved, source
        self._parameters, self._kept_here = _by_number(optimizer), kept_here
        self._names = _names_by_number(optimizer, models)
        every_name = {id(p): number for number, p in self._parameters.items()}
        self._numbers = {name: number for number, name in self._names.items()}
        for full, parameter in name_parameters(models).items():
            if id(parameter) in every_name:
                self._numbers.setdefault(full, every_name[id(parameter)])
        self.saved = {**saved, "state": {name: entry for name, entry in saved["state"].items() if self._is_here(name)}}
        self._filled: dict[str, torch.Tensor] = {}

    def _is_here(self, name: str) -> bool:
        parameter = self._parameters.get(self._numbers.get(name, -1))
        if parameter is None or self._kept_here is None:
            return not is_absent(parameter)
        return not is_absent(parameter) and self._kept_here(parameter)

    def compare(self) -> Differences:
        """Whether the same parameters stand in the same groups; in which order does not matter."""
        found = Differences(f"optimizer {self.name!r}")
        saved = [name for group in self.saved["groups"] for name in group["parameters"]]
        numbers = {self._numbers[name] for name in saved if name in self._numbers}
        found.missing = [name for number, name in self._names.items() if number not in numbers]
        found.unexpected = [name for name in saved if name not in self._numbers]
        if not found and self._match_groups() is None:
            found.other = [
                f"its {len(self.saved['groups'])} groups of parameters are not these {len(self.optimizer.param_groups)}"
            ]
        for name, number in self._numbers.items():
            loose = _loose_name(self.name, name)
            if _is_loose(name) and loose in self.source.described:
                found.compare(name, self.source.described[loose], self._parameters[number])
        return found

    def targets(self) -> dict[str, list[torch.Tensor]]:
        """For each saved tensor one to take it: the live one where it fits, else a new one."""
        live = self.optimizer.state
        for name, entry in self.saved["state"].items():
            parameter = self._parameters.get(self._numbers.get(name, -1))
            if parameter is None or not isinstance(entry, dict):
                continue
            for key, value in entry.items():
                for tensor_name in tensor_names(value):
                    existing = live.get(parameter, {}).get(key) if value == {"$tensor": tensor_name} else None
                    self._filled[tensor_name] = self._make_target(tensor_name, parameter, key, existing)
        for name, number in self._numbers.items():
            if _is_loose(name):
                self._filled[_loose_name(self.name, name)] = self._parameters[number]
        for tensor_name in tensor_names([self.saved["state"], self.saved["groups"], self.saved["other"]]):
            if tensor_name not in self._filled:
                described = self.source.described[tensor_name]
                self._filled[tensor_name] = torch.empty(described.shape, dtype=described.dtype)
        return {name: [tensor] for name, tensor in self._filled.items()}

    def finish(self) -> None:
        """Gives the filled tensors to `load_state_dict`, and undoes its cast of state to the parameter's type."""
        state = {
            self._numbers.get(name, name): decode_state(entry, self._filled)
            for name, entry in self.saved["state"].items()
        }
        groups = self._match_groups() or {}
        self.optimizer.load_state_dict(
            {
                **decode_state(self.saved["other"], self._filled),
                "state": {number: dict(entry) if isinstance(entry, dict) else entry for number, entry in state.items()},
                "param_groups": [
                    self._decode_group(index, self.saved["groups"][groups[index]])
                    for index in range(len(self.optimizer.param_groups))
                ],
            }
        )
        for number, entry in state.items():
            parameter = self._parameters.get(number) if isinstance(number, int) else None
            if parameter is None or not isinstance(entry, dict):
                continue
            loaded = self.optimizer.state[parameter]
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and key != "step" and loaded[key].dtype != value.dtype:
                    loaded[key] = value  # torch would keep fp32 moments of a bf16 parameter in bf16

    def _decode_group(self, index: int, saved: JSON) -> dict[str, Any]:
        live = self.optimizer.param_groups[index]
        numbers = {id(parameter): number for number, parameter in self._parameters.items()}
        options = decode_state(saved["options"], self._filled)
        for key, value in options.items():
            if isinstance(value, torch.Tensor) and isinstance(live.get(key), torch.Tensor):
                options[key] = value.to(live[key].device)
        kept = {key: value for key, value in live.items() if not _is_kept(key, value)}
        return {**kept, **options, "params": [numbers[id(parameter)] for parameter in live["params"]]}

    def _match_groups(self) -> dict[int, int] | None:
        """Live group -> saved group with the same parameters, or None when they are grouped differently."""
        saved = {
            frozenset(self._numbers.get(name, -1) for name in group["parameters"]): index
            for index, group in enumerate(self.saved["groups"])
        }
        numbers = {id(parameter): number for number, parameter in self._parameters.items()}
        live = [frozenset(numbers[id(p)] for p in group["params"]) for group in self.optimizer.param_groups]
        if len(live) != len(self.saved["groups"]) or any(group not in saved for group in live):
            return None
        return {index: saved[group] for index, group in enumerate(live)}

    def _make_target(self, name: str, parameter: torch.Tensor, key: str, existing: Any) -> torch.Tensor:
        described = self.source.described[name]
        if (
            isinstance(existing, torch.Tensor)
            and tuple(existing.shape) == described.shape
            and existing.dtype == described.dtype
        ):
            return existing
        if key != "step" and tuple(parameter.shape) == described.shape:
            return torch.empty_like(parameter, dtype=described.dtype, requires_grad=False)
        group = next(g for g in self.optimizer.param_groups if any(parameter is p for p in g["params"]))
        on_host = key == "step" and not group.get("fused") and not group.get("capturable")  # as torch places it
        device = torch.device("cpu") if on_host else parameter.device
        return torch.empty(described.shape, dtype=described.dtype, device=device)


def _by_number(optimizer: Optimizer) -> dict[int, torch.Tensor]:
    """Parameters under the numbers that `state_dict` gives them."""
    return dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))


def _names_by_number(optimizer: Optimizer, models: Mapping[str, nn.Module]) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, parameter in name_parameters(models).items():
        names.setdefault(id(parameter), name)
    numbered = iter(range(len(_by_number(optimizer))))
    return {
        next(numbered): names.get(id(parameter), f"#{group_index}.{index}")
        for group_index, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    }


def _is_loose(name: str) -> bool:
    return name.startswith("#")


def _loose_name(optimizer_name: str, name: str) -> str:
    return f"optimizer/{optimizer_name}/{name}/@value"
