"""State of any shape as JSON and named tensors, and back. Nothing is pickled, so nothing is run on reading.

Plain JSON stands for itself. What JSON lacks is an object with one key that starts with `$`:
`{"$tensor": name}`, `{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}`, `{"$float": "inf"}` and so on.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from instep.errors import CheckpointError, UsageError

JSON = Any
DEEPEST = 50  # levels that are searched for the place of a mistake
Decode = Callable[[Any], Any]


def encode_state(value: object, name: str = "state") -> tuple[dict[str, torch.Tensor], JSON]:
    """The tensors of `value` by name (each begins with `name`), and the rest as JSON that refers to them.

    The tensors are the live ones, not copies. Raises UsageError for what has no such form, with its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        return tensors, _encode(value, name, tensors)
    except RecursionError:
        place = _find_loop(value, name, ()) or name
        raise UsageError(
            f"{place} holds itself, or is nested too deeply, and a checkpoint writes down each value that it holds. Keep in it "
            "only what does not lead back to itself."
        ) from None


def decode_state(value: JSON, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `encode_state`."""
    if isinstance(value, list):
        return [decode_state(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "$tensor":
            return _find_tensor(content, tensors)
        if tag == "$array":
            return _find_tensor(content, tensors).numpy(force=True)
        if tag.startswith("$"):
            if tag not in _DECODERS:
                raise CheckpointError(f"{tag!r} is not a kind of value that this version of instep knows.")
            return _DECODERS[tag](content, lambda item: decode_state(item, tensors))
    return {key: decode_state(item, tensors) for key, item in value.items()}


def tensor_names(value: JSON) -> list[str]:
    """Names of the tensors that encoded state refers to."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    if len(value) == 1 and ("$tensor" in value or "$array" in value):
        return list(value.values())
    return [name for item in value.values() for name in tensor_names(item)]


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> JSON:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _keep(value, path, tensors)}
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"$array": _keep(torch.from_numpy(numpy.ascontiguousarray(value)).reshape(value.shape), path, tensors)}
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, lambda item, key: _encode(item, f"{path}/{key}", tensors))
    if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
        return {"$number": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    raise UsageError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold. It holds "
        "numbers, strings, None, lists, tuples, sets, dicts, tensors and numpy arrays; convert it to one of these."
    )


def _find_loop(value: Any, path: str, above: tuple[int, ...]) -> str | None:
    """The place of a container that lies inside itself; None where there is none, or none near the top."""
    if id(value) in above:
        return path
    if len(above) > DEEPEST or not isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = (_find_loop(item, f"{path}/{key}", (*above, id(value))) for key, item in items)
    return next((place for place in found if place is not None), None)


def _keep(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    name, count = path, 1
    while name in tensors:  # {1: ..., "1": ...} give one path
        count += 1
        name = f"{path}~{count}"
    tensors[name] = tensor
    return name


def _find_tensor(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in tensors:
        raise CheckpointError(f"the checkpoint refers to a tensor {name!r} that it does not hold.")
    return tensors[name]


Inner = Callable[[Any, Any], JSON]


def _encode_dict(value: dict[Any, Any], inner: Inner) -> JSON:
    plain = all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)).startswith("$"))
    if plain:
        return {key: inner(item, key) for key, item in value.items()}
    return {"$dict": [[inner(key, "key"), inner(item, key)] for key, item in value.items()]}


def _encode_items(value: Any, inner: Inner) -> list[JSON]:
    return [inner(item, index) for index, item in enumerate(value)]


def _encode_default_dict(value: defaultdict[Any, Any], inner: Inner) -> JSON:
    return _encode_dict(value, inner)  # the factory is code: whoever takes the state back has it


def _sorted(value: Any) -> list[Any]:
    return sorted(value, key=lambda item: (type(item).__name__, repr(item)))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is not a type of numbers that this version of torch has.")
    return found


def _scalar(content: list[str]) -> Any:
    dtype, data = content
    return numpy.frombuffer(base64.b64decode(data), numpy.dtype(dtype))[0]


_ENCODERS: dict[type, Callable[[Any, Inner], JSON]] = {
    dict: _encode_dict,
    defaultdict: _encode_default_dict,
    list: _encode_items,
    tuple: lambda value, inner: {"$tuple": _encode_items(value, inner)},
    set: lambda value, inner: {"$set": _encode_items(_sorted(value), inner)},
    frozenset: lambda value, inner: {"$frozenset": _encode_items(_sorted(value), inner)},
    deque: lambda value, inner: {"$deque": [_encode_items(value, inner), value.maxlen]},
    OrderedDict: lambda value, inner: {"$ordered": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]},
    Counter: lambda value, inner: {"$counter": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]},
    complex: lambda value, inner: {"$complex": [inner(value.real, "real"), inner(value.imag, "imag")]},
    bytes: lambda value, inner: {"$bytes": base64.b64encode(value).decode()},
    torch.Size: lambda value, inner: {"$size": list(value)},
    torch.dtype: lambda value, inner: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value, inner: {"$device": str(value)},
}

_DECODERS: dict[str, Callable[[Any, Decode], Any]] = {
    "$float": lambda content, inner: float(content),
    "$tuple": lambda content, inner: tuple(map(inner, content)),
    "$set": lambda content, inner: set(map(inner, content)),
    "$frozenset": lambda content, inner: frozenset(map(inner, content)),
    "$deque": lambda content, inner: deque(map(inner, content[0]), content[1]),
    "$dict": lambda content, inner: {inner(key): inner(item) for key, item in content},
    "$ordered": lambda content, inner: OrderedDict((inner(key), inner(item)) for key, item in content),
    "$counter": lambda content, inner: Counter({inner(key): inner(item) for key, item in content}),
    "$complex": lambda content, inner: complex(*map(inner, content)),
    "$bytes": lambda content, inner: base64.b64decode(content),
    "$number": lambda content, inner: _scalar(content),
    "$size": lambda content, inner: torch.Size(content),
    "$dtype": lambda content, inner: _dtype(content),
    "$device": lambda content, inner: torch.device(content),
}
