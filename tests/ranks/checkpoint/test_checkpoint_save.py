"""Checkpoints on several ranks: saved by all, read by any number, split or not, and given up together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instep.errors import CheckpointError
from instep.train.checkpoint.interchange import export, load_weights
from instep.train.checkpoint.state import capture, restore
from instep.train.checkpoint.store import Checkpoints
from instep.train.meeting import Meeting
from instep.train.world import World
from run_ranks import run_ranks


def make_world(rank: int, size: int) -> World:
    group = dist.new_group(backend="gloo") if size > 1 else None
    meeting = Meeting(rank, size, group) if group is not None else None
    return World(rank, size, rank, size, torch.device("cpu"), group, meeting)


def make_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 1200), nn.BatchNorm1d(1200), nn.Linear(1200, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + seed))
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 300)).square().sum().backward()
    optimizer.step()


def sums_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    tensors, _ = capture({"net": model}, {"opt": optimizer})
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
    return [float((tensor.double() * 1.5).sum()) for _, tensor in sorted(whole.items())]


def save_steps(rank: int, size: int, folder: str, steps: int) -> list[float]:
    world = make_world(rank, size)
    model, optimizer = make_training(0)
    checkpoints = Checkpoints(folder, world, keep=2)
    for step in range(1, steps + 1):
        train_step(model, optimizer)
        checkpoints.check()
        tensors, values = capture({"net": model}, {"opt": optimizer})
        own = {f"streams/{rank}": torch.full((2,), rank)}
        checkpoints.save({**tensors, **own}, values, step=step, own_values={"streams": {str(rank): rank}})
    checkpoints.close()
    return sums_of(model, optimizer)


def continue_from(rank: int, size: int, folder: str) -> tuple[list[float], int, dict[str, int], dict[str, Any]]:
    world = make_world(rank, size)
    model, optimizer = make_training(1)
    checkpoints = Checkpoints(folder, world, keep=2)
    saved = checkpoints.open()
    restore(saved, saved.values, {"net": model}, {"opt": optimizer})
    checkpoints.close()
    streams = {name: tensor.tolist() for name, tensor in saved.load_all("streams/").items()}
    return sums_of(model, optimizer), saved.step, saved.values["streams"], streams


@pytest.mark.parametrize(("saving", "reading"), [(1, 2), (3, 2)])
def test_any_number_of_ranks_reads_what_any_number_saved(tmp_path: Path, saving: int, reading: int) -> None:
    weights = run_ranks(save_steps, saving, str(tmp_path), 3)[0]
    for sums, step, streams, tensors in run_ranks(continue_from, reading, str(tmp_path)):
        assert sums == weights
        assert step == 3
        assert streams == {str(rank): rank for rank in range(saving)}
        assert tensors == {f"streams/{rank}": [rank, rank] for rank in range(saving)}
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-2", "step-3"]
    files = sorted((tmp_path / "checkpoints" / "step-3").glob("*.safetensors"))
    assert len(files) == saving
    assert max(file.stat().st_size for file in files) < 1.2 * min(file.stat().st_size for file in files)


def shard_and_save(rank: int, size: int, folder: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = make_world(rank, size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = make_training(0)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_step(model, optimizer)
    checkpoints = Checkpoints(folder, world)
    tensors, values = capture({"net": model}, {"opt": optimizer})
    checkpoints.save(tensors, values, step=1)
    checkpoints.close()
    export(model, Path(folder) / "whole.safetensors", world)
    return sums_of(model, optimizer)


def restore_sharded(rank: int, size: int, folder: str) -> tuple[list[float], bool]:
    from torch.distributed.fsdp import fully_shard

    world = make_world(rank, size)
    model, optimizer = make_training(1)
    if size > 1:
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(folder, world)
    saved = checkpoints.open()
    restore(saved, saved.values, {"net": model}, {"opt": optimizer})
    checkpoints.close()
    before = sums_of(model, optimizer)
    load_weights(model, Path(folder) / "whole.safetensors", world)
    return before, sums_of(model, optimizer) == before


def ask_both_ways(rank: int, size: int) -> list[bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from instep.train.checkpoint import pieces

    mesh = init_device_mesh("cpu", (2, 2))
    tensor = distribute_tensor(torch.arange(63.0).reshape(7, 9), mesh, [Shard(0), Shard(1)])
    (usual,) = pieces.local_pieces(tensor)
    ask = DTensor.__create_chunk_list__
    del DTensor.__create_chunk_list__
    (fallback,) = pieces.local_pieces(tensor)
    DTensor.__create_chunk_list__ = ask
    whole = torch.arange(63.0).reshape(7, 9)
    return [usual.offsets == fallback.offsets, torch.equal(whole[usual.slices], usual.local)]


def test_torch_tells_where_a_part_begins_by_its_protocol_and_without() -> None:
    assert run_ranks(ask_both_ways, 4) == [[True, True]] * 4


@pytest.mark.parametrize("reading", [3, 1])
@pytest.mark.filterwarnings("ignore")
def test_a_split_model_is_read_on_another_split_and_whole(tmp_path: Path, reading: int) -> None:
    expected = run_ranks(shard_and_save, 4, str(tmp_path))[0]
    for sums, is_same in run_ranks(restore_sharded, reading, str(tmp_path)):
        assert sums == pytest.approx(expected, rel=1e-12)
        assert is_same


def fail_on_one_rank(rank: int, size: int, folder: str) -> tuple[str, str, list[str]]:
    import instep.train.checkpoint.saving as saving

    world = make_world(rank, size)
    checkpoints = Checkpoints(folder, world)
    checkpoints.save({"a": torch.ones(3)}, {}, step=1, wait=True)
    write = saving.write_durably

    def full(path: Path, contents: Any) -> Any:
        raise OSError(28, "No space left on device")

    saving.write_durably = full if rank == 1 else write  # type: ignore[assignment]
    checkpoints.save({"a": torch.ones(3)}, {}, step=2)
    texts = []
    for action in (checkpoints.close, lambda: Checkpoints(folder, world).open("step-2")):
        try:
            action()
        except CheckpointError as error:
            texts.append(str(error))
    return texts[0], texts[1], sorted(os.listdir(Path(folder) / "checkpoints"))


def test_all_ranks_learn_that_one_could_not_write(tmp_path: Path) -> None:
    for text, missing, left in run_ranks(fail_on_one_rank, 2, str(tmp_path)):
        assert text == (
            f"the checkpoint of step 2 could not be written to {tmp_path}/checkpoints by rank 1: No space left on "
            "device. The older checkpoints are whole. Make room there."
        )
        assert missing == "the checkpoint step-2 cannot be restored: step-2 is missing."
        assert left == ["step-1"]


def refuse_second_run(rank: int, size: int, folder: str) -> str:
    try:
        Checkpoints(folder, make_world(rank, size))
    except ValueError as error:
        return str(error)
    return "not refused"


def test_all_ranks_are_refused_while_another_run_lives(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from instep.records.run_dir import RunDir\n"
        "from instep.train.checkpoint.lock import take_lock\n"
        "lock = take_lock(RunDir(Path(sys.argv[1]))); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for text in run_ranks(refuse_second_run, 2, str(tmp_path)):
            assert f"is in use by process {holder.pid} on " in text
        holder.kill()


def see_other_directories(rank: int, size: int, folder: str) -> str:
    import instep.train.checkpoint.store as store

    sees = store.sees_lock
    store.sees_lock = lambda run_dir, holder: sees(run_dir, holder, 0.3)
    try:
        Checkpoints(f"{folder}/node{rank}", make_world(rank, size))
    except ValueError as error:
        return str(error)
    return "not refused"


def test_nodes_that_do_not_share_the_directory_are_named_at_the_start(tmp_path: Path) -> None:
    first, second = run_ranks(see_other_directories, 2, str(tmp_path))
    assert first == (
        f"rank 1 on {os.uname().nodename} does not see the run directory {tmp_path}/node0 of rank 0: checkpoints of "
        "several nodes need a directory on storage that all of them share."
    )
    assert second == first.replace("node0", "node1")


def lose_a_rank(rank: int, size: int, folder: str) -> tuple[float, list[str]]:
    import instep.train.checkpoint.saving as saving

    world = make_world(rank, size)
    checkpoints = Checkpoints(folder, world)
    checkpoints.save({"a": torch.ones(3)}, {}, step=1, wait=True)
    write = saving.write_durably
    if rank == 1:  # it never reports that it has written
        saving.write_durably = lambda path, contents: time.sleep(60) or write(path, contents)  # type: ignore[func-returns-value]
    checkpoints.save({"a": torch.zeros(3)}, {}, step=2)
    began = time.monotonic()
    checkpoints.abandon(0.5)
    return time.monotonic() - began, sorted(os.listdir(Path(folder) / "checkpoints"))


def test_a_save_whose_peer_never_comes_is_given_up(tmp_path: Path) -> None:
    (seconds, left), _ = run_ranks(lose_a_rank, 2, str(tmp_path))
    assert seconds < 5
    assert left[-1] == "step-1"
    assert "step-2" not in left


def disagree(rank: int, size: int, folder: str) -> Any:
    checkpoints = Checkpoints(folder, make_world(rank, size))
    try:
        checkpoints.save({"a": torch.ones(3)}, {}, step=1 + rank)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    finally:
        checkpoints.abandon()
    return None


def test_ranks_that_save_another_step_are_told(tmp_path: Path) -> None:
    for kind, text in run_ranks(disagree, 2, str(tmp_path)):
        assert kind == "RanksDisagree"
        assert "saving the checkpoint of step 1" in text
        assert "saving the checkpoint of step 2" in text
