"""Runs of two ranks under `instep run`: the fault is said while they run or at their end, and health is silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from watched_runs import notes_of_failures, run

CASES = Path(__file__).parents[2] / "cases"
HEALTHY = sorted((CASES / "healthy" / "scripts").glob("*.py"))
ILL = sorted(path.parent for path in CASES.glob("*/*/script.py"))
SOON = ("gradients_by_hand", "local_sgd")  # run in the quick suite; the rest is recorded, and run by hand


def check_healthy(script: Path, folder: Path) -> None:
    ended = run(script, folder, "--stall-after", "6")
    assert ended.code == 0, ended.text
    assert ended.findings == [], ended.text
    assert notes_of_failures(ended.run_dir) == []


@pytest.mark.parametrize("name", SOON)
def test_a_healthy_script_ends_without_a_word(name: str, tmp_path: Path) -> None:
    check_healthy(CASES / "healthy" / "scripts" / f"{name}.py", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", [path for path in HEALTHY if path.stem not in SOON], ids=lambda path: path.stem)
def test_healthy_scripts_of_many_styles_end_without_a_word(script: Path, tmp_path: Path) -> None:
    check_healthy(script, tmp_path)


def test_a_proven_deadlock_is_reported_and_stopped(tmp_path: Path) -> None:
    ended = run(CASES / "hang" / "some_ranks_only" / "script.py", tmp_path, "--stall-after", "3")
    assert ended.code == 124, ended.text
    (first,) = ended.findings
    assert first["id"] == "hang/some-ranks-only" and first["ranks"] == [0]
    assert "dist.barrier()  # wait for the file" in first["where"]["source"]
    assert "certain: rank 0 waits in barrier" in ended.text
    assert ended.text.rstrip().splitlines()[-2].startswith("  more")  # findings come last, before the exit code


def test_an_error_that_the_script_hid_is_shown(tmp_path: Path) -> None:
    ended = run(CASES / "crash" / "error_hidden" / "script.py", tmp_path)
    assert ended.code == 3, ended.text
    assert ended.findings[0]["id"] == "crash/error-hidden"
    assert "KeyError: 41" in ended.findings[0]["title"]


def test_wrong_numbers_are_told_at_the_end_of_a_run_that_succeeds(tmp_path: Path) -> None:
    ended = run(CASES / "numbers" / "forward_past_wrapper" / "script.py", tmp_path)
    assert ended.code == 0, ended.text
    assert [one["id"] for one in ended.findings] == ["numbers/forward-past-wrapper"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ILL, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_ill_script_is_told_when_it_runs(case: Path, tmp_path: Path) -> None:
    expected = json.loads((case / "expected.json").read_text())
    ended = run(case / "script.py", tmp_path, "--stall-after", "6", "--on-stall", "stop")
    first = ended.findings[0]
    assert first["id"] == f"{case.parent.name}/{case.name}".replace("_", "-"), ended.text
    assert first["ranks"] == expected["ranks"]
    assert expected["line"] in first["where"]["source"]
    assert notes_of_failures(ended.run_dir) == []


COMPILED = """
import torch
import torch.distributed as dist
import torch._dynamo.utils
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.compile(DDP(torch.nn.Linear(8, 3)), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.compile(backend="aot_eager", fullgraph=True)
def loss_of(output, target):
    return torch.nn.functional.cross_entropy(output, target)


for _ in range(12):
    loss = loss_of(model(torch.randn(4, 8)), torch.randint(0, 3, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print("graphs", graphs, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_compiled_script_makes_as_few_graphs_as_unwatched(tmp_path: Path) -> None:
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    watched = run(script, tmp_path)
    assert watched.code == 0, watched.text
    assert watched.text.count("graphs 1") == 2, watched.text
    assert watched.findings == []
