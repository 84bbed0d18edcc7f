"""Faults in steps that are only counted, and counts that stay right: short steps, of which few are watched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instep.records.event import Event, read_events
from instep.records.recording import Page, read_page
from watched_runs import Ended, notes_of_failures, run

EPOCH_STEPS, AT = 300, 440
# The probe rests as it does in a long run, only sooner.
SCRIPT = f"""
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from instep.launch.probe import watched_steps

watched_steps.FIRST_STEPS, watched_steps.FIRST_SECONDS = 64, 0.0
watched_steps._PERIODS = ((0.5, 128),)
FAULT = "none"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn({EPOCH_STEPS * 8}, 32), torch.randn({EPOCH_STEPS * 8}, 1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
for epoch in range(2):
    if FAULT != "same-order":
        sampler.set_epoch(epoch)
    for inputs, targets in loader:
        step += 1
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        if FAULT == "nan" and step == {AT}:
            loss = loss * torch.log(-1 - loss)
        if FAULT == "barrier" and step == {AT} and rank == 0:
            dist.barrier()
        if FAULT == "skipped" and step == {AT} and rank == 1:
            continue
        if FAULT == "left" and step == {AT} and rank == 1:
            sys.exit(0)
        if FAULT == "rate" and step == {AT} and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.02
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for inputs, targets in loader:
            model.module(inputs)
    model.train()
dist.destroy_process_group()
"""


def run_with(fault: str, folder: Path) -> Ended:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace('FAULT = "none"', f'FAULT = "{fault}"'))
    ended = run(script, folder, "--stall-after", "4", "--on-stall", "stop")
    assert notes_of_failures(ended.run_dir) == []
    return ended


def page_of(ended: Ended, rank: int) -> Page:
    page = read_page(ended.run_dir / f"rank{rank}" / "page.bin")
    assert page is not None
    return page


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


def laps_of(ended: Ended, rank: int) -> list[Event]:
    return [event for event in read_events(ended.run_dir / f"rank{rank}" / "events.jsonl") if event.name == "lap"]


def test_a_healthy_run_is_silent_and_its_counts_are_whole(tmp_path: Path) -> None:
    ended = run_with("none", tmp_path)
    assert (ended.code, ended.findings) == (0, []), ended.text
    for rank in range(2):
        page = page_of(ended, rank)
        marked = set(page.counts_by_step())
        assert page.num_steps == 2 * EPOCH_STEPS
        assert 130 in marked and 200 not in marked  # a window, and steps that are only counted
        assert 2 * EPOCH_STEPS - 128 < page.seconds["steps"] <= 2 * EPOCH_STEPS
        laps = laps_of(ended, rank)
        assert [lap["batches"] for lap in laps] == [EPOCH_STEPS] * 4
        assert [lap["samples"] for lap in laps] == [4 * EPOCH_STEPS] * 4
        assert [lap["backwards"] for lap in laps] == [EPOCH_STEPS, 0] * 2
        assert all(lap["order"] for lap in laps)
    newest = page_of(ended, 0).newest_step_mark
    assert newest is not None and newest.turns == newest.backwards == newest.step


@pytest.mark.parametrize(
    ("fault", "finding", "title"),
    [
        ("nan", "nonfinite/loss", f"in step {AT}"),
        ("barrier", "hang/some-ranks-only", "barrier"),
        pytest.param("skipped", "numbers/silent-pairing", "rank 1 left out the average", marks=pytest.mark.slow),
        pytest.param("left", "crash/rank-left-early", "rank 1 ended after 439 steps", marks=pytest.mark.slow),
        pytest.param("rate", "numbers/rates-apart", "since a step between", marks=pytest.mark.slow),
        pytest.param("same-order", "numbers/same-order", "same order", marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_a_counted_step_is_told(fault: str, finding: str, title: str, tmp_path: Path) -> None:
    ended = run_with(fault, tmp_path)
    assert ended.findings, ended.text
    found: dict[str, Any] = ended.findings[0]
    assert (found["id"], found["certainty"]) == (finding, "certain"), json.dumps(found)
    assert title in found["title"]
    if fault in ("barrier", "skipped", "rate"):
        assert found["where"]["line"] == line_of(f'FAULT == "{fault}"') + (fault != "skipped")
