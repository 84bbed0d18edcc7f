"""What is done to a model's blocks beside sharing them out: recomputed, compiled, kept on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from instep.errors import UsageError
from instep.train.call_arguments import read_flag
from instep.train.techniques.compile_blocks import compile_blocks
from instep.train.techniques.recompute import read_recompute, recompute_blocks


@dataclass(frozen=True)
class BlockOptions:
    recompute: int | str | None = None
    offload: bool = False
    compile: bool = False


def read_block_options(run_wide: Any, recompute: Any, offload: bool | None, compile: bool | None) -> BlockOptions:
    """run_wide: the arguments of Run, which hold for what is None here. Raises UsageError."""
    for name, value in {"offload": offload, "compile": compile}.items():
        if value is not None:
            read_flag("run.prepare", name, value)
    options = BlockOptions(
        run_wide.recompute if recompute is None else read_recompute(recompute),
        run_wide.offload if offload is None else offload,
        run_wide.compile if compile is None else compile,
    )
    if options.compile and options.recompute == "selective":
        raise UsageError(
            "recompute='selective' chooses among the operations of a block, which compile=True leaves as one. Take "
            "recompute='blocks', or leave compile out."
        )
    return options


def change_blocks(model: nn.Module, options: BlockOptions, device: torch.device) -> None:
    """Before sharding: the unit that is shared out holds the block as it runs."""
    if options.compile:
        compile_blocks(model, device)
    if options.recompute is not None:
        recompute_blocks(model, options.recompute)
