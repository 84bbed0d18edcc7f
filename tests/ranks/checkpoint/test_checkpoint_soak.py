"""Runs that are killed again and again end with the weights of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

from instep.records.run_dir import RunDir
from instep.train.checkpoint.manifest import find_damage, read_manifest

SCRIPT = Path(__file__).with_name("soak_script.py")
TOLERANCE = 1e-7  # other numbers of ranks give 1e-10 after 300 steps; one micro-batch lost moves a loss by 1


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    launches: int = 0
    kept: int = 0  # checkpoints that were looked through after a kill
    largest: float = 0.0

    def __str__(self) -> str:
        return (
            f"{sum(self.kills.values())} kills ({dict(self.kills)}), {self.launches} launches on {dict(self.ranks)} "
            f"ranks, {self.kept} checkpoints verified after kills, largest difference {self.largest:.1e}"
        )


def start(folder: Path, num_ranks: int, restarts: int, steps: int, every: int, width: int) -> subprocess.Popen[bytes]:
    for path in (folder / "pids").glob("*"):
        path.unlink()
    command = [sys.executable, "-m", "instep", "run", "-n", num_ranks, "--max-restarts", restarts, "--no-watch"]
    script = ["--run-dir", folder / "launch", SCRIPT, folder, steps, every, width]
    with open(folder / "output.log", "ab") as log:
        return subprocess.Popen(list(map(str, command + script)), stdout=log, stderr=log)


def living(folder: Path, num_ranks: int) -> list[int]:
    """Processes of the ranks, once all have begun; none while they start."""
    texts = [path.read_text() for path in (folder / "pids").glob("*")]
    pids = [int(text) for text in texts if text]
    return [pid for pid in pids if psutil.pid_exists(pid)] if len(pids) == num_ranks else []


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it came to its end just now


def strike(
    folder: Path, launcher: subprocess.Popen[bytes], num_ranks: int, dice: random.Random, tally: Tally
) -> list[int]:
    """One SIGKILL at a random moment, of one rank, of all of them, or of the launcher. Returns all ranks' processes."""
    deadline = time.monotonic() + 180
    while not (pids := living(folder, num_ranks)):
        if launcher.poll() is not None or time.monotonic() > deadline:
            return []
        time.sleep(0.02)
    time.sleep(dice.uniform(0, 1.5))
    if launcher.poll() is not None:
        return pids
    kind = dice.choice(["one rank", "one rank", "all ranks", "launcher"])
    victims = {"one rank": [dice.choice(pids)], "all ranks": pids, "launcher": [launcher.pid]}[kind]
    for pid in victims:
        kill(pid)
    for path in (folder / "pids").glob("*"):
        path.unlink(missing_ok=True)  # so that the restarted ones are told from these
    tally.kills[kind] += 1
    return pids


def await_end(launcher: subprocess.Popen[bytes], pids: list[int]) -> None:
    launcher.wait(300)
    deadline = time.monotonic() + 180
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, f"ranks {pids} outlive their launcher"
        time.sleep(0.05)


def newest_step(folder: Path, tally: Tally) -> int:
    """The step to resume from. Whatever was killed when, each visible checkpoint is whole."""
    manifests = []
    for directory in RunDir(folder / "run").list_checkpoints():
        manifests.append(read_manifest(directory.root))
        assert find_damage(directory.root, manifests[-1]) == []
        tally.kept += 1
    return max(manifests, key=lambda each: each.sequence).step if manifests else 0


def suffer(folder: Path, num_kills: int, dice: random.Random, steps: int, every: int, width: int) -> Tally:
    """Trains to the end, killed up to `num_kills` times, each launch on another number of ranks."""
    tally = Tally()
    folder.mkdir()
    while not (folder / "final.pt").exists():
        newest = newest_step(folder, tally)
        seen = len(_lines(folder / "resumes.jsonl"))
        num_ranks, restarts = dice.choice([1, 2, 3, 4]), dice.choice([0, 2])
        launcher = start(folder, num_ranks, restarts, steps, every, width)
        tally.launches += 1
        tally.ranks[num_ranks] += 1
        pids: list[int] = []
        while launcher.poll() is None and sum(tally.kills.values()) < num_kills:
            pids += strike(folder, launcher, num_ranks, dice, tally)
        await_end(launcher, pids)
        resumes = [json.loads(line) for line in _lines(folder / "resumes.jsonl")[seen:]]
        if resumes:
            assert resumes[0] == {"ranks": num_ranks, "step": newest}
            assert [each["step"] for each in resumes] == sorted(each["step"] for each in resumes)
    return tally


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def largest_difference(first: Path, second: Path) -> float:
    """Over weights, buffers and the losses of all steps."""
    a, b = torch.load(first), torch.load(second)
    assert a["model"].keys() == b["model"].keys()
    assert a["losses"].shape == b["losses"].shape
    pairs = [(a["losses"], b["losses"]), *((a["model"][key], b["model"][key]) for key in a["model"])]
    return max(float((one.double() - two.double()).abs().max()) for one, two in pairs)


def undisturbed(folder: Path, steps: int, every: int, width: int) -> Path:
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, folder, steps, every, width]
    subprocess.run(list(map(str, command)), check=True, env=environment, capture_output=True)
    return folder / "final.pt"


def test_kills_leave_no_trace_in_the_weights(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "calm", 60, 5, 32)
    tally = suffer(tmp_path / "rough", 2, random.Random(1), 60, 5, 32)
    assert sum(tally.kills.values()) > 0
    assert largest_difference(expected, tmp_path / "rough" / "final.pt") < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_two_hundred_kills_leave_no_trace_in_the_weights(tmp_path: Path) -> None:
    wanted, dice, total = 200, random.Random(7), Tally()
    expected = undisturbed(tmp_path / "calm", 300, 2, 128)
    episode = 0
    while sum(total.kills.values()) < wanted:
        episode += 1
        folder = tmp_path / f"rough{episode}"
        tally = suffer(folder, wanted - sum(total.kills.values()), dice, 300, 2, 128)
        total.kills += tally.kills
        total.ranks += tally.ranks
        total.launches += tally.launches
        total.kept += tally.kept
        total.largest = max(total.largest, largest_difference(expected, folder / "final.pt"))
        print(f"episode {episode}: {total}", flush=True)
        assert total.largest < TOLERANCE
    assert total.kills.keys() == {"one rank", "all ranks", "launcher"}
    assert total.ranks.keys() == {1, 2, 3, 4}
