"""A parameter that is read where this rank holds only a part of it: which one, where, and what to do instead.

A layer computes with its own parameters. `F.linear(x, self.tokens.weight)`, or a penalty on weights in the loss, reads
them past it, and PyTorch then complains of DTensors that the script never made, or takes a part's gradient for all of it.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from instep.errors import InstepError, UsageError
from instep.records.finding import CallSite
from instep.train.absent import PENALTY
from instep.train.call_site import frames_of, is_users, say_site, site_of, user_call_site
from instep.train.reduce.local_part import TENSOR_AXIS

_DTENSORS = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "distributed", "tensor") + os.sep
_NAMES = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[\d+\])*")
_INTO_LAYER = "_ToTorchTensor"  # autograd's name for what takes a layer's parameter to plain tensors
_NAME = "instep_name"  # an attribute of sharded parameters
_MOST_NODES = 10_000  # of a graph to look through


def explain_read(error: BaseException, models: Sequence[nn.Module]) -> UsageError | None:
    """In words, an error that comes from such a read; None for all others."""
    frames = list(frames_of(error))
    if isinstance(error, InstepError) or not isinstance(error, (RuntimeError, NotImplementedError)) or not frames:
        return None
    is_in_dtensor = frames[-1][0].f_code.co_filename.startswith(_DTENSORS)
    if not (is_in_dtensor or "DTensor" in str(error)):
        return None
    names = {id(p): name for model in models for name, p in model.named_parameters() if isinstance(p, DTensor)}
    for frame, line in reversed(frames):
        loss = None if is_users(frame) else frame.f_locals.get("loss")  # of step.backward
        read = _named_in(frame, line) if is_users(frame) else [loss] if isinstance(loss, Tensor) else []
        for parameter in (found for tensor in read for found in _parameters_of(tensor)):
            name = names.get(id(parameter)) or getattr(parameter, _NAME, None)
            if name is not None:
                return UsageError(_say(name, parameter, site_of(error), by_loss=loss is not None))
    return None


def watch_reads(model: nn.Module) -> None:
    """A gradient that autograd brings to a sharded parameter itself is of a read outside: forward works on gathered ones.

    Call it when the model has been sharded. What comes raises UsageError in backward: each rank's loss would reach only the
    part that it holds.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and isinstance(parameter, DTensor):
            setattr(parameter, _NAME, name)  # while it is gathered, the model has another in its place
            parameter.register_hook(partial(_refuse, name, parameter))


def _refuse(name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
    raise UsageError(_say(name, parameter, user_call_site(), by_loss=True))


def _say(name: str, parameter: Any, site: CallSite | None, *, by_loss: bool) -> str:
    at = say_site(site).removeprefix(" at ") or "an unknown line"
    at = f"by the loss that comes to {at}" if by_loss else f"at {at}"
    layer = name.rpartition(".")[0] or name
    if parameter.device_mesh.mesh_dim_names == (TENSOR_AXIS,):
        return (
            f"{name} is read past the forward of {layer} {at}, and each of {parameter.device_mesh.size()} ranks holds a part of "
            f"it. Call the layer, or keep it whole: Parallel(tensor=..., plan={{{layer!r}: 'whole'}}). {PENALTY}"
        )
    return (
        f"{name} is read outside the forward of {layer} {at}, where each rank has only its share of it. Compute with it inside "
        f"that forward, or train with 'ddp' or 'zero1'. {PENALTY}"
    )


# -- what the line that failed has read


def _named_in(frame: FrameType, line: int) -> list[Tensor]:
    """Tensors that the line names, as `x`, `self.tokens.weight` or `self.layers[0].weight`."""
    found = []
    for match in _NAMES.finditer(linecache.getline(frame.f_code.co_filename, line)):
        first, *rest = re.findall(r"\w+", match[0])
        value = frame.f_locals.get(first, frame.f_globals.get(first))
        for part in rest:
            if isinstance(value, Tensor):
                break
            value = _member(value, part)
        if isinstance(value, Tensor):
            found.append(value)
    return found


def _member(value: Any, part: str) -> Any:
    """Without running any code of the user's."""
    if isinstance(value, nn.Module):
        for kind in (value._parameters, value._modules, value._buffers):
            if part in kind:
                return kind[part]
    if isinstance(value, (list, tuple)) and part.isdecimal():
        return value[int(part)] if int(part) < len(value) else None
    return getattr(value, "__dict__", {}).get(part)


def _parameters_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and the leaves that it was computed from by way of no layer."""
    yield tensor
    left, seen = [tensor.grad_fn], set()
    while left and len(seen) < _MOST_NODES:
        node: Any = left.pop()
        if node is None or node in seen or _INTO_LAYER in node.name():
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        left += [following for following, _ in node.next_functions]
