"""Lists and dictionaries that hold more and more tensors somewhere else than in a running function's variables: in a module
of the script, in an object of its classes, or in a function that closes over them."""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from instep.launch.probe.sites import is_users_file

_MOST_LOOKS = 12  # one takes about 50 ms
_GROWTH = 1.3  # of what memory had grown by at the look before
_MIN_ITEMS, _MOST_ITEMS = 8, 20_000
_CONTAINERS = (list, dict, deque)


class Held(NamedTuple):
    """What one container holds: tensors with graphs behind them, all tensors, and their bytes."""

    graphs: int
    tensors: int
    size: int


class Place(NamedTuple):
    """Where a container is to be found in the source."""

    file: str
    function: str
    name: str


class Holders:
    """Looks through all containers of the process, seldom."""

    def __init__(self) -> None:
        self._looks = 0
        self._next = 0

    def look(self, growth: int) -> list[tuple[Any, Held]]:
        """The containers that hold tensors by the number; growth: bytes, of the process so far."""
        if growth < self._next or self._looks >= _MOST_LOOKS:
            return []
        self._looks += 1
        self._next = int(growth * _GROWTH)
        own = sys._getframe(0)
        found: list[tuple[Any, Held]] = []
        for one in gc.get_objects():
            kind = _kind_of(one)
            if kind is not None and kind.__len__(one) >= _MIN_ITEMS and one is not own and _holds_tensors(kind, one):
                found.append((one, _weigh(kind, one)))
        return [(one, held) for one, held in found if held.tensors >= _MIN_ITEMS]


def _kind_of(one: Any) -> Any:
    """The built-in type whose methods say what a container holds: a class's own may load, import or warn. Found by type, since
    `isinstance` asks the object."""
    return next((kind for kind in _CONTAINERS if issubclass(type(one), kind)), None)


def _holds_tensors(kind: Any, container: Any) -> bool:
    try:
        last = next(reversed(dict.values(container))) if kind is dict else kind.__getitem__(container, -1)
    except (IndexError, RuntimeError, StopIteration):
        return False  # it changes meanwhile
    return any(True for _ in _tensors_of(last))


def parts_of(item: Any) -> list[Any]:
    """The item, or the first of what it holds where it is a record."""
    parts = item.values() if type(item) is dict else item if type(item) in (tuple, list) else (item,)
    return list(parts)[:8]


def _tensors_of(item: Any) -> list[Any]:
    return [part for part in parts_of(item) if isinstance(part, torch.Tensor)]


def _weigh(kind: Any, container: Any) -> Held:
    items = list(dict.values(container) if kind is dict else kind.__iter__(container))[:_MOST_ITEMS]
    tensors = [tensor for item in items for tensor in _tensors_of(item)]
    graphs = sum(tensor.grad_fn is not None for tensor in tensors)
    return Held(graphs, len(tensors), sum(tensor.nbytes for tensor in tensors if not tensor.is_sparse))


def find_place(container: Any, depth: int = 0) -> Place | None:
    """The script's own name for a container: a variable of a module, an attribute, or a variable that a function closes
    over. None for what belongs to a library."""
    if depth > 2:
        return None
    for referrer in gc.get_referrers(container):
        found = _named_in(referrer, container)
        if found is not None:
            return found
    for referrer in gc.get_referrers(container):
        if isinstance(referrer, (dict, list)) and not _is_namespace(referrer):
            found = find_place(referrer, depth + 1)
            if found is not None:
                return found
    return None


def _named_in(referrer: Any, container: Any) -> Place | None:
    if isinstance(referrer, dict):
        module = _module_of(referrer)
        if module is not None:
            names = [name for name, value in dict.items(referrer) if value is container]
            return Place(os.path.abspath(module.__file__ or ""), module.__name__, names[0]) if names else None
        owners = [
            one
            for one in gc.get_referrers(referrer)
            if _file_of(type(one)) and getattr(one, "__dict__", None) is referrer
        ]
        return _attribute(owners[0], container) if owners else None
    if isinstance(referrer, CellType):
        return _closed_over(referrer)
    return _attribute(referrer, container)


def _file_of(kind: type) -> str | None:
    """The script's file in which a class stands."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return os.path.abspath(file) if file is not None and is_users_file(file) else None


def _attribute(owner: Any, container: Any) -> Place | None:
    kind = type(owner)
    file = _file_of(kind)
    members = getattr(owner, "__dict__", None) if file is not None else None
    if file is None or not isinstance(members, dict):
        return None
    names = [name for name, value in members.items() if value is container]
    return Place(file, kind.__name__, f"{kind.__name__}.{names[0]}") if names else None


def _closed_over(cell: CellType) -> Place | None:
    closures = [one for one in gc.get_referrers(cell) if isinstance(one, tuple)]
    for function in (one for closure in closures for one in gc.get_referrers(closure)):
        if isinstance(function, FunctionType) and is_users_file(function.__code__.co_filename):
            names = [
                name for name, one in zip(function.__code__.co_freevars, function.__closure__ or ()) if one is cell
            ]
            if names:
                return Place(os.path.abspath(function.__code__.co_filename), function.__name__, names[0])
    return None


def _module_of(namespace: dict[Any, Any]) -> ModuleType | None:
    name = dict.get(namespace, "__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    is_own = (
        module is not None and module.__dict__ is namespace and is_users_file(getattr(module, "__file__", None) or "")
    )
    return module if is_own else None


def _is_namespace(referrer: Any) -> bool:
    return isinstance(referrer, dict) and "__name__" in referrer
