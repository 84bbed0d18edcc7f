"""Putting a wrapper in the place of a function of torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from instep.launch.probe.recorder import contained

REPLACED: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []  # owner, name, original, wrapper


def replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replaces `owner.name` by `wrap(owner.name)`; False when this version of torch has no such name."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "_instep_wraps", None) is not None:
        return False
    wrapper = functools.wraps(original)(wrap(original))
    wrapper._instep_wraps = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
    REPLACED.append((owner, name, original, wrapper))
    return True


@contained
def hide_from_compiler(package: str) -> None:
    """Marks every function of a package as nothing that torch.compile should look at when it is called.

    Where a wrapper is inlined into compiled code it hands over to the original at once, so that no graph is broken there.
    """
    from torch._C._dynamo import eval_frame

    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for code in _codes_of(module):
                eval_frame.set_code_exec_strategy(code, strategy)


def _codes_of(module: ModuleType) -> list[CodeType]:
    """The code of all functions and methods of a module, with the functions inside them."""
    members = list(vars(module).values())
    members += [part for member in members if isinstance(member, type) for part in vars(member).values()]
    members = [getattr(part, "fget", None) or getattr(part, "__wrapped__", part) for part in members]
    codes = [part.__code__ for part in members if isinstance(part, FunctionType) and part.__module__ == module.__name__]
    for code in codes:  # grows while it is gone through
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return codes
