"""torch.compile, block by block: blocks of one class share what was compiled, and what happens between blocks (gathers,
recomputation) stays outside of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from instep.errors import UsageError
from instep.train.techniques.blocks import find_repeated, plain_forward

CPP_COMPILERS = ("g++", "clang++", "c++")


def compile_blocks(model: nn.Module, device: torch.device) -> None:
    """In place; the compiler starts in the first forward. Raises UsageError where it could not, or finds no block."""
    if device.type == "cpu":
        check_cpp_compiler()
    blocks = find_repeated(model)
    if not blocks:
        raise UsageError(
            f"compile=True found no block in {type(model).__name__}: blocks are members of a ModuleList, ModuleDict or "
            "Sequential that hold layers and occur at least twice as one class. Give run.prepare the model as it is and "
            "call torch.compile(model) yourself."
        )
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
    for block in blocks:
        plain = plain_forward(block)
        if plain not in compiled:
            compiled[plain] = torch.compile(plain)
        block.forward = MethodType(compiled[plain], block)


def check_cpp_compiler() -> None:
    """torch.compile on the CPU writes C++, and would fail with a traceback in the first forward."""
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else CPP_COMPILERS
    if not any(shutil.which(name) for name in wanted):
        raise UsageError(
            f"compile=True needs a C++ compiler on the CPU, and none of {', '.join(wanted)} is installed here. Install one, "
            "name yours in the variable CXX, or leave compile out."
        )
