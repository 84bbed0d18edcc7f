"""Operations of autograd's graph: what each keeps for its backward, whether it made the first bad number, and the
same operation done again in another precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Saved = dict[str, Any]
_HALVES = (torch.float16, torch.bfloat16)
# What the argument of these must be; the rest is judged by results.
_POSITIVE = {"Log": "logarithm", "Log2": "logarithm", "Log10": "logarithm"}
_BY_RESULT = {
    "Exp": "exp of a number that is too large (above 88.7 in float32, 11.1 in float16)",
    "Sqrt": "square root of a negative number",
    "Rsqrt": "reciprocal square root of 0 or of a negative number",
    "Reciprocal": "reciprocal of 0",
    "Softmax": "softmax over a row in which every value is -inf, as under a mask that hides everything",
    "LogSoftmax": "log-softmax over a row in which every value is -inf, as under a mask that hides everything",
}


def read_saved(node: Any) -> Saved:
    """What a node of the graph keeps, by name; what has been freed or changed in place since is left out."""
    found: Saved = {}
    for key in dir(node):
        if key.startswith("_saved_"):
            try:
                value = getattr(node, key)
            except RuntimeError:
                continue
            if is_there(value):
                found[key.removeprefix("_saved_")] = value
    return found


def is_there(value: Any) -> bool:
    """Whether a tensor has its memory: sharded models free that of whole parameters between their uses."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return True
    return not value.numel() or value.untyped_storage().nbytes() > 0


def short_name(node: Any) -> str:
    """`Log` for LogBackward0."""
    return type(node).__name__.partition("Backward")[0]


def is_bad(value: Any) -> bool:
    """Whether a tensor holds NaN or infinity; -inf alone is none, as masks are made of it."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return False
    return bool((torch.isnan(value) | (value == math.inf)).any())


def judge(name: str, saved: Saved) -> dict[str, Any] | None:
    """Why this operation made a bad number of good ones, or None when it did not or cannot be judged."""
    inputs = {key: value for key, value in saved.items() if not _is_result(key)}
    if any(is_bad(value) for value in inputs.values()):
        return None
    why = _outside_domain(name, saved)
    if why is not None:
        return {"why": why, "overflow": False}
    results = [value for key, value in saved.items() if _is_result(key)]
    if name not in _BY_RESULT and not any(isinstance(value, torch.Tensor) for value in inputs.values()):
        return None  # it may have been handed what is bad in its result
    again = redo(name, saved)
    if not any(is_bad(value) for value in (*results, again)):
        return None
    if _overflows(name, saved, [*results, again]):
        return {"why": f"a result above 65504, the largest number of float16, in {name}", "overflow": True}
    return {"why": _BY_RESULT.get(name, f"finite inputs, result not finite, in {name}"), "overflow": False}


def _is_result(key: str) -> bool:
    return "result" in key or key in ("output", "out", "logsumexp")


def _outside_domain(name: str, saved: Saved) -> str | None:
    value: Any = saved.get("self")
    other: Any = saved.get("other")
    if name in _POSITIVE and isinstance(value, torch.Tensor) and bool((value <= 0).any()):
        return f"{_POSITIVE[name]} of {value.min().item():g} ({_count(value <= 0)})"
    if name == "Div" and isinstance(other, torch.Tensor) and bool((other == 0).any()):
        return f"division by 0 ({_count(other == 0)} of the divisor)"
    exponent = saved.get("exponent")
    if name == "Pow" and isinstance(value, torch.Tensor) and isinstance(exponent, (int, float)):
        if exponent < 0 and bool((value == 0).any()):
            return f"0 to the power of {exponent:g}"
        if exponent != int(exponent) and bool((value < 0).any()):
            return f"{value.min().item():g} to the power of {exponent:g}"
    return None


def _count(chosen: torch.Tensor) -> str:
    return f"{int(chosen.sum())} of {chosen.numel()} elements"


def _overflows(name: str, saved: Saved, results: list[Any]) -> bool:
    """Whether the result is bad because half precision ends at 65504: in float32 it is a number."""
    kept = [value for value in saved.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if not any(value.dtype in _HALVES for value in (*kept, *results) if isinstance(value, torch.Tensor)):
        return False
    wide = redo(name, saved, torch.float32)
    return wide is not None and not is_bad(wide)


def redo(name: str, saved: Saved, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """The operation once more, from what it kept; None when that is not enough. dtype: another precision."""
    operation = _REDO.get(name)
    if operation is None:
        return None
    values = {key: _cast(value, dtype) for key, value in saved.items()}
    try:
        with torch.no_grad():
            return operation(values)
    except (KeyError, TypeError, RuntimeError, AttributeError):  # something it needs was not kept
        return None


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    return value


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Saved], torch.Tensor]:
    return lambda saved: function(saved["self"])


def _convolve(saved: Saved) -> torch.Tensor:
    stride, padding, dilation, output_padding = (
        list(saved[key]) for key in ("stride", "padding", "dilation", "output_padding")
    )
    shape = (stride, padding, dilation, saved["transposed"], output_padding, saved["groups"])
    return torch.convolution(saved["input"], saved["weight"], None, *shape)


_REDO: dict[str, Callable[[Saved], torch.Tensor]] = {
    **{word.capitalize(): _unary(getattr(torch, word)) for word in ("log", "log2", "log10", "log1p", "tan", "sinh")},
    **{word.capitalize(): _unary(getattr(torch, word)) for word in ("cosh", "acos", "asin", "acosh", "atanh", "expm1")},
    "Div": lambda saved: saved["self"] / saved["other"],
    "Mul": lambda saved: saved["self"] * saved["other"],
    "Pow": lambda saved: saved["self"] ** saved["exponent"],
    "Addmm": lambda saved: saved["mat1"] @ saved["mat2"],
    "Mm": lambda saved: saved["self"] @ saved["mat2"],
    "Bmm": lambda saved: saved["self"] @ saved["mat2"],
    "Convolution": _convolve,
    "MseLoss": lambda saved: F.mse_loss(saved["self"], saved["target"]),
    "LinalgVectorNorm": lambda saved: torch.linalg.vector_norm(saved["self"], saved["ord"]),
}
