"""recompute, offload and compile beside each other: what Run says, what prepare says, and what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import instep
from instep.overrides import read_override
from instep.records.parallel import Parallel, read_parallel
from instep.train.reduce.local_part import local_part
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


def trained(**options: Any) -> tuple[list[Any], bool, bool]:
    """What was learned, whether FSDP2 held it, and whether a group is left behind."""
    torch.manual_seed(0)
    layer = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*layer, nn.Linear(3, 1)).double()
    rows = TensorDataset(torch.randn(12, 3).double(), torch.randn(12, 1).double())
    with instep.Run(global_batch=4, micro_batch=2, clip_norm=0.1, **options) as run:
        run.prepare(model, torch.optim.AdamW(model.parameters()))
        found: list[Any] = []
        for step in run.steps(run.loader(rows), epochs=1):
            step.forward_backward(model, F.mse_loss)
            step.update()
            found += [step.loss, step.grad_norm]
        is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
        found += [x for p in model.parameters() for x in local_part(p).detach().flatten().tolist()]
    return found, is_sharded, dist.is_initialized()


@pytest.mark.parametrize("parallel", ["zero3", "zero2"])
def test_one_rank_with_a_device_of_its_own_offloads(parallel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, *_ = trained(parallel=parallel)
    monkeypatch.setattr("instep.train.parts.has_own_memory", lambda _: True)
    found, is_sharded, has_group = trained(parallel=parallel, offload=True)
    assert is_sharded and not has_group
    assert found == pytest.approx(plain, rel=1e-12)


def test_offload_says_where_it_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    plain, *_ = trained(parallel="zero3")
    capsys.readouterr()
    assert trained(parallel="zero3", offload=True) == (plain, False, False)
    text = "instep: offload=True changes nothing here: the device is the CPU, whose memory is the host's (said once)"
    assert capsys.readouterr().err.count(text) == 1
