"""recompute, offload and compile beside each other: what Run says, what prepare says, and what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.overrides import read_override
from instep.records.parallel import Parallel, read_parallel
from instep.train.techniques.block_options import BlockOptions, read_block_options
from instep.train.techniques.compile_blocks import check_cpp_compiler, compile_blocks
from instep.train.techniques.offload import check_host_memory, check_offload, host_bytes
from instep.train.world import World

WORLD = World(0, 4, 0, 4, torch.device("cpu"))


def run_wide(**given: Any) -> Any:
    return SimpleNamespace(**{"recompute": None, "offload": False, "compile": False, **given})


def test_prepare_beats_run() -> None:
    wide = run_wide(recompute=2, compile=True)
    assert read_block_options(wide, None, None, None) == BlockOptions(2, False, True)
    assert read_block_options(wide, "none", True, False) == BlockOptions(None, True, False)


def test_selective_does_not_go_with_compile() -> None:
    text = "recompute='selective' chooses among the operations of a block, which compile=True leaves as one. Take"
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        read_block_options(run_wide(), "selective", None, True)


@pytest.mark.parametrize(("text", "value"), [("blocks", "blocks"), ("3", 3), ("selective", "selective")])
def test_recompute_can_be_set_from_outside(text: str, value: Any) -> None:
    assert read_override("recompute", text) == value


def test_offload_without_shards_is_refused() -> None:
    with pytest.raises(
        instep.UsageError,
        match=re.escape(
            "offload=True moves the parameters of a sharded model to the host, and 'ddp' shards none: take "
            "parallel='zero3' or 'zero2', or leave offload out."
        ),
    ):
        check_offload(read_parallel("ddp"))
    check_offload(Parallel(shard=None))  # on one rank too, so that a script runs on any number


def test_offload_without_memory_is_refused() -> None:
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert host_bytes(model, optimizer, 4) == 3 * 2**20  # a gradient and two moments of 4 MiB each, on 4 ranks
    with pytest.raises(
        instep.UsageError,
        match=re.escape(
            "offload=True needs about 12 MiB of this machine's memory for the parameters, gradients and optimizer state "
            "of 4 ranks, and 8 MiB are free. Spread the ranks over more machines, or leave offload out."
        ),
    ):
        check_host_memory(model, optimizer, Parallel(shard=4), WORLD, free_bytes=8 << 20)
    check_host_memory(model, optimizer, Parallel(shard=4), WORLD, free_bytes=13 << 20)


def test_compile_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        instep.UsageError,
        match=re.escape(
            "compile=True needs a C++ compiler on the CPU, and none of no-such-compiler is installed here. Install one, name "
            "yours in the variable CXX, or leave compile out."
        ),
    ):
        check_cpp_compiler()


def test_compile_without_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(instep.UsageError, match="compile=True found no block in Linear: blocks are members"):
        compile_blocks(nn.Linear(2, 2), torch.device("cpu"))


def test_local_sgd_can_be_set_from_outside() -> None:
    assert read_parallel("replicate,average_every=8") == Parallel(replicate=None, average_every=8)
    with pytest.raises(instep.UsageError, match=re.escape("Parallel(average_every=None): it is a number of steps")):
        read_parallel("replicate,average_every")


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (Parallel(average_every=0), "Parallel(average_every=0): it is a number of steps, at least 1."),
        (
            Parallel(shard=2, average_every=4),
            "Parallel(average_every=4) lets whole copies of the model train by themselves and goes with replicate only, not "
            "with shard=2. Leave average_every out, or the other degrees.",
        ),
    ],
)
def test_local_sgd_is_for_whole_copies(parallel: Parallel, text: str) -> None:
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        read_parallel(parallel)


@pytest.mark.parametrize(("name", "value"), [("exact", True), ("compress", "bf16")])
def test_local_sgd_sends_no_gradients(name: str, value: Any) -> None:
    from instep.train.techniques.local_sgd import check_local_sgd

    arguments: Any = SimpleNamespace(**{"exact": False, "compress": None, name: value})
    with pytest.raises(instep.UsageError, match=re.escape(f"{name}={value!r} is about how gradients are added up")):
        check_local_sgd(arguments)
