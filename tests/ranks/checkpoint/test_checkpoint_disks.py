"""Disks that fill up, go read-only, are slow, or give back other bytes than were written."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from instep.errors import CheckpointError, UsageError
from instep.records.run_dir import RunDir
from instep.train.checkpoint import manifest, shelf
from instep.train.checkpoint.store import Checkpoints
from instep.train.world import World

WORLD = World(0, 1, 0, 1, torch.device("cpu"))
is_root = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting needs root on Linux")


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def state(step: int, kib: int = 1500) -> dict[str, torch.Tensor]:
    return {"model/net/weight": torch.full((kib, 256), float(step))}


def is_whole(folder: Path, step: int) -> bool:
    directory = RunDir(folder).checkpoint(step).root
    return manifest.find_damage(directory, manifest.read_manifest(directory)) == []


@is_root
def test_a_disk_without_room_is_noticed_before_writing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3500k") as disk:
        checkpoints = Checkpoints(disk / "run", WORLD)
        checkpoints.save(state(1), {}, step=1, wait=True)
        with pytest.raises(CheckpointError, match=r"of step 2 needs 2\.\d+ MiB, and .* has 1\.\d+ MiB free"):
            checkpoints.save(state(2), {}, step=2)
        checkpoints.close()
        assert is_whole(disk / "run", 1)
        assert [path.name for path in (disk / "run/checkpoints").iterdir()] == ["step-1"]


@is_root
def test_a_disk_that_fills_up_while_writing_leaves_the_old_ones_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Roomy:
        f_bavail, f_frsize = 1 << 20, 4096

    monkeypatch.setattr(shelf.os, "statvfs", lambda path: Roomy)  # as when another program takes the room meanwhile
    with small_disk(tmp_path / "disk", "2m") as disk:
        checkpoints = Checkpoints(disk / "run", WORLD)
        checkpoints.save(state(1), {}, step=1)
        checkpoints.save(state(2), {}, step=2)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.close()
        assert str(caught.value) == (
            f"the checkpoint of step 2 could not be written to {disk}/run/checkpoints by rank 0: No space left on "
            "device. The older checkpoints are whole. Make room there."
        )
        assert is_whole(disk / "run", 1)
        assert [path.name for path in (disk / "run/checkpoints").iterdir()] == ["step-1"]


@is_root
def test_a_disk_that_goes_read_only_is_said_and_can_be_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        checkpoints = Checkpoints(disk / "run", WORLD)
        checkpoints.save(state(1), {}, step=1, wait=True)
        descriptor, checkpoints._lock.descriptor = checkpoints._lock.descriptor, None  # type: ignore[union-attr]
        os.close(descriptor)  # type: ignore[arg-type]  # a file that is open for writing keeps the disk writable
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(state(2), {}, step=2)
        assert str(caught.value) == (
            f"the checkpoint of step 2 could not be begun in {disk}/run/checkpoints: Read-only file system. "
            "The older checkpoints are whole."
        )
        assert checkpoints.open().load_all()["model/net/weight"].unique().tolist() == [1.0]
        checkpoints.close()
        with pytest.raises(UsageError, match=r"cannot be written to .*: Read-only file system"):
            Checkpoints(disk / "other", WORLD)


def test_a_slow_disk_does_not_hold_up_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def slow(descriptor: int, data: bytes) -> int:
        time.sleep(0.5)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slow)
    checkpoints = Checkpoints(tmp_path, WORLD)
    began = time.monotonic()
    checkpoints.save(state(1, 50), {}, step=1)
    blocked = time.monotonic() - began
    checkpoints.check()
    assert RunDir(tmp_path).list_checkpoints() == []
    checkpoints.save(state(2, 50), {}, step=2)  # waits for the one before: one in flight
    assert is_whole(tmp_path, 1)
    checkpoints.close()
    assert is_whole(tmp_path, 2)
    assert time.monotonic() - began > 6 * 0.5  # three files each, at least one piece each
    assert blocked < 0.5


@contextmanager
def as_nobody() -> Iterator[None]:
    """Permissions do not hold for root."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


def damage(file: Path, other: Path, kind: str, dice: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if kind == "truncated":
        os.truncate(file, dice.randrange(len(data)))
    elif kind == "flipped":
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data)
    elif kind == "deleted":
        file.unlink()
    elif kind == "swapped":
        shutil.copy(other, file)
    elif kind == "forbidden":
        os.chmod(file, 0)


def test_a_hundred_damaged_files_are_all_noticed() -> None:
    dice, seen = random.Random(0), Counter[str]()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, as_nobody_owns(Path(folder)):
        kinds = ["truncated", "flipped", "deleted", "swapped", "forbidden"] * 20
        for number, kind in enumerate(kinds):
            run = Path(folder) / f"{number}"
            checkpoints = Checkpoints(run, WORLD)
            for step in (1, 2):
                checkpoints.save(state(step, 4), {"step": step, "noise": dice.random()}, step=step)
            checkpoints.close()
            newest = RunDir(run).checkpoint(2).root
            file = dice.choice(sorted(newest.iterdir()))
            damage(file, RunDir(run).checkpoint(1).root / file.name, kind, dice)
            said: list[str] = []
            checkpoints = Checkpoints(run, WORLD, say=said.append)
            saved = checkpoints.open()
            assert saved.step == 1, (kind, file.name)
            assert saved.load_all()["model/net/weight"].unique().tolist() == [1.0]
            assert len(said) == 1
            assert f"step-2/{file.name}" in said[0], (kind, said)
            checkpoints.close()
            seen[kind] += 1
    assert seen == dict.fromkeys(["truncated", "flipped", "deleted", "swapped", "forbidden"], 20)


@contextmanager
def as_nobody_owns(folder: Path) -> Iterator[None]:
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    with as_nobody():
        yield
