"""Putting a wrapper in the place of a function of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from instep.launch.probe.recorder import contained


def replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replaces `owner.name` by `wrap(owner.name)`; False when this version of torch has no such name."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "_instep_wraps", None) is not None:
        return False
    wrapper = functools.wraps(original)(wrap(original))
    wrapper._instep_wraps = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
    _skip_in_compiler(wrapper)
    return True


@contained
def _skip_in_compiler(wrapper: Any) -> None:
    """A wrapper's own frame is not for torch.compile; where it is inlined, it hands over to the original at once."""
    from torch._C._dynamo import eval_frame

    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(wrapper.__code__, strategy)
