"""`instep checkpoints`: lists, verifies, compares, converts; mistakes are one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from instep.cli.main import main
from instep.records.run_dir import RunDir
from instep.train.checkpoint.state import capture
from instep.train.checkpoint.store import Checkpoints
from instep.train.world import World


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    checkpoints = Checkpoints(tmp_path / "run", World(0, 1, 0, 1, torch.device("cpu")))
    for step, metric in ((10, 0.5), (20, 0.75), (30, 0.25)):
        tensors, values = capture({"net": model}, {})
        checkpoints.save(tensors, {**values, "lr": 1 / step}, step=step, metric=metric, best="max", wait=True)
        with torch.no_grad():
            model.weight.add_(0.5)
    checkpoints.close()
    return tmp_path / "run"


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["checkpoints", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_lists_with_size_metric_best_and_newest(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, run_dir)
    lines = out.splitlines()
    assert code == 0
    assert [line.split("  ")[0] for line in lines] == ["step-10", "step-20", "step-30"]
    assert "by 1 rank  metric 0.75  best  complete" in lines[1]
    assert lines[2].endswith("metric 0.25  newest  complete")
    assert call(capsys, run_dir / "checkpoints")[1] == out
    assert call(capsys, run_dir / "checkpoints" / "step-20")[1].startswith("step-20  ")


def test_takes_the_other_half_of_a_run(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "launcher").mkdir()
    RunDir(tmp_path / "launcher").name_peer(run_dir)
    assert call(capsys, tmp_path / "launcher")[1].count("step-") == 3


def test_verifies_and_names_what_is_damaged(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, run_dir, "--verify")[1].count("whole, checksums verified") == 3
    file = next((run_dir / "checkpoints/step-20").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.unlink(run_dir / "checkpoints/step-30/complete.json")
    assert call(capsys, run_dir)[0] == 0  # the sizes are right
    code, out, _ = call(capsys, run_dir, "--verify")
    assert code == 1
    assert f"step-20/{file.name} does not hold what was saved: its checksum is" in out
    assert "step-30/complete.json is missing: not finished, or not a checkpoint of instep" in out
    code, out, _ = call(capsys, run_dir, "--verify", "--json")
    assert [row["whole"] for row in json.loads(out)] == [True, False, False]


def test_lists_and_verifies_without_torch(run_dir: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from instep.cli.main import main; sys.exit(main(['checkpoints', sys.argv[1], '--verify']))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("whole") == 3


def test_compares_two_steps(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, run_dir, "--compare", 10, 30)
    assert code == 0
    assert "1 tensors are bit-identical, 1 differ, 1 other values differ" in out
    assert "         1 at most  model/net/weight" in out
    assert "  lr: 0.1 and 0.03333333333333333" in out
    found = json.loads(call(capsys, run_dir, "--compare", 10, run_dir / "checkpoints/step-20", "--json")[1])
    assert found["differ"] == {"model/net/weight": pytest.approx(0.5, rel=1e-6)}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_converts(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    target = tmp_path / f"out{suffix}"
    code, out, _ = call(capsys, run_dir, "--export", target, "--step", 20)
    assert code == 0
    assert out.startswith(f"{target}: 2 tensors, ")
    assert out.rstrip().endswith("checkpoints/step-20")
    model = nn.Linear(3, 2)
    model.load_state_dict(load_file(target) if suffix == ".safetensors" else torch.load(target, weights_only=True))
    again = tmp_path / "again.safetensors"
    assert call(capsys, target, "--export", again)[0] == 0
    assert torch.equal(load_file(again)["weight"], model.weight)


def test_nothing_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, tmp_path) == (0, f"no checkpoints in {tmp_path}\n", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "checkpoints: nowhere does not exist."),
        ([], "checkpoints: the following arguments are required: DIR. See: instep checkpoints --help"),
        (["{run}", "--verify", "--export", "x.pt"], "--verify, --compare and --export are three things; ask for one"),
        (["{run}", "--export", "x.bin"], "--export x.bin: the name has to end in .safetensors or .pt."),
        (["{run}", "--compare", "10", "99"], "has no complete checkpoint of step 99; steps there: 10, 20, 30."),
        (["{run}", "--export", "x.pt", "--model", "critic"], "holds the models net; name the one that is meant"),
    ],
)
def test_a_mistake_is_one_sentence(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    code, out, error = call(capsys, *[each.format(run=run_dir) for each in arguments])
    assert code in (1, 2)
    assert out == ""
    assert sentence in error
    assert error.count("\n") == 1
