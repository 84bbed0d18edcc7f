"""What scripts hand to the methods of Run and Step, checked at the door as `arguments.py` does for Run itself.

call: the method as the script writes it, such as `run.export`.
"""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from instep.errors import UsageError
from instep.train.absent import check_there

MOST_BITS = 1023  # of a whole number that has to become a float
MOST_SHOWN = 60  # characters of a value in an error
CANNOT_PICKLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, NotImplementedError, RecursionError)


def show(value: object) -> str:
    """A plain value as it was written, anything else by its type."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, os.PathLike)):
        text = repr(value)
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and type {kind}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def read_path(call: str, value: object) -> Path:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise UsageError(f"{call} got {show(value)}; it takes a path, a str or a pathlib.Path.")
    return Path(path)


def read_flag(call: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{call}({name}={show(value)}): {name} has to be True or False.")
    return value


def read_number(call: str, value: Any, what: str) -> float:
    """what: the number that the call takes, for the error. A tensor or an array of one element is a number too."""
    number = plain_number(value)
    if number is None:
        raise UsageError(f"{call} got {show(value)}; it takes {what}.")
    return number


def plain_number(value: Any) -> float | None:
    """None for what is no real number."""
    check_there(value)
    if isinstance(value, torch.Tensor):
        value = value.detach()
    if not isinstance(value, (int, float)) and callable(getattr(value, "item", None)):
        count: Any = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", None)
        value = value.item() if count == 1 and not getattr(value, "is_meta", False) else None
    too_large = isinstance(value, int) and value.bit_length() > MOST_BITS
    return value if isinstance(value, (int, float)) and not too_large else None


def read_weight(call: str, value: Any, of: str) -> float:
    """How many items a mean was taken over. of: the name of that mean."""
    number = plain_number(value)
    if number is None or isinstance(number, bool) or not 0 <= number < math.inf:
        shown = "None" if value is None else show(value)
        raise UsageError(
            f"{call}(weight={shown}): the weight is the number of items that the {of} is a mean of, at least 0."
        )
    return number


def check_module(call: str, model: object) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"{call}(model={show(model)}): model is one that run.prepare took, a torch.nn.Module.")


def check_sendable(call: str, value: object) -> None:
    """Raises UsageError for what cannot be sent to another process; on one process too, so that none comes as news."""
    try:
        pickle.dumps(value)
    except UsageError:  # of a parameter that another rank holds
        raise
    except CANNOT_PICKLE as error:
        reason = "it refers to itself too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
        raise UsageError(
            f"{call} got {show(value)}, which cannot be sent to other ranks: {reason}. Give numbers, text, tensors, or lists "
            "and dicts of such."
        ) from None
