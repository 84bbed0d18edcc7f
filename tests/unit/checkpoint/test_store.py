"""Checkpoints of one process: kept, removed, damaged, refused, and found again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader

from instep.errors import CheckpointError, UsageError
from instep.records.run_dir import RunDir
from instep.train.checkpoint import manifest, shelf
from instep.train.checkpoint.store import Checkpoints
from instep.train.world import World

WORLD = World(0, 1, 0, 1, torch.device("cpu"))


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {
        "model/net/weight": torch.full((5, 3), float(step)),
        "model/net/flags": torch.tensor([True, False]),
        "model/net/half": torch.ones(3, 2, dtype=torch.bfloat16) * step,
        "model/net/last": torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last) * step,
        "model/net/count": torch.tensor(step),
        "model/net/empty": torch.empty(0, 4),
    }


def make(folder: Path, steps: list[int], **options: object) -> tuple[Checkpoints, list[str]]:
    said: list[str] = []
    checkpoints = Checkpoints(folder, WORLD, say=said.append, **options)  # type: ignore[arg-type]
    for step in steps:
        checkpoints.save(tensors_of(step), {"step": step}, step=step)
    return checkpoints, said


def kept(folder: Path) -> list[int]:
    return [each.step or 0 for each in RunDir(folder).list_checkpoints()]


def test_comes_back_with_every_type_and_shape(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [7])
    saved = checkpoints.open()
    checkpoints.close()
    assert (saved.step, saved.values) == (7, {"step": 7})
    loaded = saved.load_all()
    assert loaded.keys() == tensors_of(7).keys()
    for name, tensor in tensors_of(7).items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype
    assert list(saved.load_all("model/net/w")) == ["model/net/weight"]


def test_what_is_trained_on_does_not_reach_a_save_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    write = manifest.write_durably

    def slow(path: Path, contents: memoryview | bytes) -> manifest.FileEntry:
        go.wait(30)
        return write(path, contents)

    monkeypatch.setattr("instep.train.checkpoint.saving.write_durably", slow)
    checkpoints, _ = make(tmp_path, [])
    tensors, values = tensors_of(1), {"note": [1]}
    checkpoints.save(tensors, values, step=1)
    assert kept(tmp_path) == []
    tensors["model/net/weight"].fill_(99)
    values["note"].append(2)
    go.set()
    saved = checkpoints.open()
    checkpoints.close()
    assert saved.load_all()["model/net/weight"].unique().tolist() == [1.0]
    assert saved.values == {"note": [1]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_takes_the_files(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [3])
    checkpoints.close()
    target = {name: torch.empty_like(tensor) for name, tensor in tensors_of(3).items() if tensor.numel()}
    reader = HuggingFaceStorageReader(str(tmp_path / "checkpoints" / "step-3"))
    torch.distributed.checkpoint.load(target, storage_reader=reader, no_dist=True)
    assert all(torch.equal(tensor, tensors_of(3)[name]) for name, tensor in target.items())


def test_keeps_the_last_the_best_and_every_kth(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [], keep=2, keep_every=4)
    for step, metric in enumerate([0.1, 0.9, 0.3, 0.2, float("nan"), 0.5, 0.6], start=1):
        checkpoints.save(tensors_of(step), {}, step=step, metric=metric, best="max")
    checkpoints.close()
    assert kept(tmp_path) == [2, 4, 6, 7]


def test_after_going_back_the_newest_is_the_last_saved(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [10, 20, 5], keep=3)
    assert checkpoints.open().step == 5
    checkpoints.save(tensors_of(6), {}, step=6)
    checkpoints.close()
    assert kept(tmp_path) == [5, 6, 20]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [1, 1])
    checkpoints.save(tensors_of(8), {"again": True}, step=1, wait=True)
    assert checkpoints.open().values == {"again": True}
    checkpoints.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 0x10
    path.write_bytes(data)


def swap(path: Path) -> None:
    other = path.parent.parent / "step-1" / path.name
    shutil.copy(other, path)


DAMAGES = {
    "truncated": (lambda p: os.truncate(p, p.stat().st_size - 5), "has {less} bytes instead of {bytes}"),
    "flipped": (flip, "does not hold what was saved: its checksum is"),
    "deleted": (Path.unlink, "is missing"),
    "swapped": (swap, "does not hold what was saved: its checksum is"),
    "emptied": (lambda p: os.truncate(p, 0), "has 0 bytes instead of {bytes}"),
}


@pytest.mark.parametrize("name", ["tensors-00000-of-00001.safetensors", "values.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_one_before_is_used(tmp_path: Path, name: str, damage: str) -> None:
    checkpoints, said = make(tmp_path, [1, 2])
    checkpoints.close()
    file = tmp_path / "checkpoints" / "step-2" / name
    num_bytes = file.stat().st_size
    act, words = DAMAGES[damage]
    act(file)
    checkpoints, said = make(tmp_path, [])
    assert checkpoints.open().step == 1
    assert len(said) == 1
    expected = words.format(less=num_bytes - 5, bytes=num_bytes)
    assert said[0].startswith(f"checkpoint step-2 is not usable: step-2/{name} {expected}")
    assert said[0].endswith("trying the one before.")
    with pytest.raises(CheckpointError, match=f"step-2 cannot be restored: step-2/{name}"):
        checkpoints.open("step-2")
    checkpoints.close()


COMPLETE_DAMAGES = {
    "deleted": (Path.unlink, "step-2/complete.json is missing: not finished, or not a checkpoint of instep"),
    "truncated": (lambda p: os.truncate(p, 40), "step-2/complete.json is damaged: it is not JSON"),
    "edited": (
        lambda p: p.write_text(p.read_text().replace('"step": 2', '"step": 9')),
        "step-2/complete.json is damaged: its checksum does not match",
    ),
    "foreign": (lambda p: p.write_text('{"done": true}'), "step-2/complete.json was not written by instep"),
    "swapped": (swap, "step-2/complete.json belongs to the checkpoint of step 1"),
}


@pytest.mark.parametrize("damage", COMPLETE_DAMAGES)
def test_a_damaged_complete_json_is_named(tmp_path: Path, damage: str) -> None:
    checkpoints, said = make(tmp_path, [1, 2])
    checkpoints.close()
    act, words = COMPLETE_DAMAGES[damage]
    act(tmp_path / "checkpoints" / "step-2" / "complete.json")
    checkpoints, said = make(tmp_path, [])
    assert checkpoints.open().step == 1
    checkpoints.close()
    assert said == [f"not a usable checkpoint: {words}."]


def test_a_foreign_file_of_tensors_is_named(tmp_path: Path) -> None:
    make(tmp_path, [1, 2])[0].close()
    shutil.copy(
        tmp_path / "checkpoints/step-1/tensors-00000-of-00001.safetensors",
        tmp_path / "checkpoints/step-2/tensors-00001-of-00002.safetensors",
    )
    checkpoints, said = make(tmp_path, [])
    assert checkpoints.open().step == 1
    checkpoints.close()
    assert "step-2/tensors-00001-of-00002.safetensors is foreign: it is not part of this checkpoint" in said[0]


def test_foreign_directories_and_files_are_said(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [1])
    (tmp_path / "checkpoints/step-5").mkdir()
    (tmp_path / "checkpoints/step-6").write_text("")
    (tmp_path / "checkpoints/notes").mkdir()
    checkpoints.close()
    checkpoints, said = make(tmp_path, [])
    assert checkpoints.open().step == 1
    checkpoints.close()
    assert said == [
        "not a usable checkpoint: step-5/complete.json is missing: not finished, or not a checkpoint of instep.",
        "not a usable checkpoint: step-6 is not a directory.",
    ]


def test_nothing_whole_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints, said = make(tmp_path, [1])
    os.truncate(next((tmp_path / "checkpoints/step-1").glob("*.safetensors")), 9) if checkpoints.newest_good() else None
    checkpoints.close()
    checkpoints, said = make(tmp_path, [])
    assert checkpoints.newest_good() is None
    assert said[0].endswith("there is none before it.")
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in "):
        checkpoints.open()
    checkpoints.close()


def test_a_damaged_one_does_not_count_among_the_kept(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [1, 2], keep=2)
    checkpoints.close()
    flip(next((tmp_path / "checkpoints/step-2").glob("*.safetensors")))
    checkpoints, _ = make(tmp_path, [], keep=2)
    assert checkpoints.open().step == 1
    checkpoints.save(tensors_of(3), {}, step=3)
    checkpoints.close()
    assert kept(tmp_path) == [1, 2, 3]


def test_what_killed_runs_left_is_cleared_and_a_replaced_one_comes_back(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [1, 2])
    checkpoints.close()
    folder = tmp_path / "checkpoints"
    (folder / ".step-3.ab.partial").mkdir()
    os.rename(folder / "step-2", folder / ".step-2.ab.replaced")
    (folder / ".step-0.old.removed").mkdir()
    checkpoints, said = make(tmp_path, [])
    assert checkpoints.open().step == 2
    checkpoints.close()
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2"]
    assert said == []


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _ = make(tmp_path, [1])

    class Full:
        f_bavail, f_frsize = 2, 4096

    monkeypatch.setattr(shelf.os, "statvfs", lambda path: Full)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.save(tensors_of(2), {}, step=2)
    assert str(caught.value) == (
        f"the checkpoint of step 2 needs 1 MiB, and {tmp_path}/checkpoints has 8 KiB free. The older "
        "checkpoints are whole. Make room there, or keep fewer."
    )
    assert checkpoints.open().step == 1
    checkpoints.close()


def test_an_error_in_the_background_is_raised_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _ = make(tmp_path, [1])
    checkpoints.newest_good()

    def full(path: Path, contents: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("instep.train.checkpoint.saving.write_durably", full)
    checkpoints.save(tensors_of(2), {}, step=2)
    assert checkpoints._saving is not None
    checkpoints._saving.join()
    assert checkpoints.failure is not None
    with pytest.raises(CheckpointError) as caught:
        checkpoints.check()
    assert str(caught.value) == (
        f"the checkpoint of step 2 could not be written to {tmp_path}/checkpoints by rank 0: No space left on device. "
        "The older checkpoints are whole. Make room there."
    )
    checkpoints.check()
    checkpoints.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_an_error_of_the_last_save_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _ = make(tmp_path, [])
    monkeypatch.setattr(shelf, "write_manifest", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    checkpoints.save(tensors_of(2), {}, step=2)
    with pytest.raises(CheckpointError, match=r"by rank 0: Input/output error. The older checkpoints are whole.$"):
        checkpoints.close()
    assert kept(tmp_path) == []
    make(tmp_path, [])[0].close()  # the lock is free


def test_values_have_to_be_json(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [])
    with pytest.raises(UsageError, match="the values of a checkpoint have to be plain JSON: Object of type set"):
        checkpoints.save({}, {"a": {1}}, step=1)
    checkpoints.close()


def test_sizes_of_keep_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep=0 has to be a whole number of at least 1, or None"):
        Checkpoints(tmp_path, WORLD, keep=0)


def test_a_second_run_in_this_process_is_refused(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [])
    with pytest.raises(UsageError, match=rf"is in use by this process \({os.getpid()}\)"):
        Checkpoints(tmp_path, WORLD)
    checkpoints.close()
    make(tmp_path, [])[0].close()


HOLD = """
import sys
from pathlib import Path
from instep.records.run_dir import RunDir
from instep.train.checkpoint.lock import take_lock
lock = take_lock(RunDir(Path(sys.argv[1])))
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError) as caught:
            Checkpoints(tmp_path, WORLD)
        text = str(caught.value)
        assert text.startswith(
            f"the run directory {tmp_path} is in use by process {holder.pid} on {os.uname().nodename}"
        )
        assert text.endswith("wait for it, stop it, or give this run another directory.")
        holder.kill()
    Checkpoints(tmp_path, WORLD).close()


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        Checkpoints(tmp_path / "file" / "run", WORLD)
    assert str(caught.value) == (
        f"checkpoints cannot be written to {tmp_path}/file/run: Not a directory. Give the run a directory that this "
        "user can write."
    )


def test_reserved_memory_is_used(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [])
    checkpoints.reserve(tensors_of(1))
    checkpoints._image.finish_reserving()
    buffer = checkpoints._image._buffer
    checkpoints.save(tensors_of(1), {}, step=1)
    assert checkpoints._image._buffer is buffer
    checkpoints.close()


def test_complete_json_lists_what_is_there(tmp_path: Path) -> None:
    checkpoints, _ = make(tmp_path, [4])
    checkpoints.close()
    folder = tmp_path / "checkpoints" / "step-4"
    complete = json.loads((folder / "complete.json").read_text())
    assert complete["files"].keys() == {path.name for path in folder.iterdir()} - {"complete.json"}
    assert all(complete["files"][name]["bytes"] == (folder / name).stat().st_size for name in complete["files"])
    assert (complete["step"], complete["world_size"], complete["sequence"]) == (4, 1, 1)
