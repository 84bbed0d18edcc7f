"""The benchmarks of the loop run, with the peers that are installed, and compare like with like."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_benchmark(name: str, *words: str, seconds: float = 200) -> str:
    command = [sys.executable, str(BENCHMARKS / name), *words]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def rows(output: str) -> dict[str, list[float]]:
    """The numbers behind each variant's name."""
    found = re.findall(r"^(by hand, fused|by hand|instep) {2,}(.*)$", output, re.MULTILINE)
    return {
        name: [float(number) for number in re.findall(r"[-+]?\d+\.?\d*(?:e[-+]\d+)?", rest)] for name, rest in found
    }


def test_overhead_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "overhead.md"
    output = run_benchmark("overhead.py", "--ranks", "2", "--rounds", "2", "--block-steps", "4", "--out", str(page))
    found = rows(output)
    assert set(found) == {"by hand", "by hand, fused", "instep"}
    assert all(p10 <= median for p10, median, *_ in found.values())
    assert output.strip() in page.read_text()
    assert "torch" in page.read_text() and "Command: `python benchmarks/overhead.py --ranks 2" in page.read_text()


def test_watch_parts_tells_what_each_hook_costs() -> None:
    output = run_benchmark("watch_parts.py", "--rounds", "40", "--seconds", "0.5")
    warm = {
        name: float(us) for name, us in re.findall(r"^(\w[\w ]*?) +[-\d.]+ \[.*?\] +([-\d.]+) \[", output, re.MULTILINE)
    }
    assert set(warm) == {"data", "forward", "backward", "step", "a step"}
    assert 0 < warm["forward"] < warm["a step"] < 5000
    assert "looks/s" in output and "MiB" in output


def test_throughput_compares_equal_training() -> None:
    output = run_benchmark("throughput.py", "--tasks", "conv", "--rounds", "1", "--block-steps", "2")
    assert rows(output)["instep"][-1] < 1e-4
    assert "NOT THE SAME TRAINING" not in output


@pytest.mark.slow
def test_splits_are_compared_and_held_against_arithmetic() -> None:
    output = run_benchmark(
        "parallel.py", "--splits", "zero3", "--ranks", "2", "--rounds", "1", "--block-steps", "1", seconds=580
    )
    assert "NOT THE SAME TRAINING" not in output
    off = {
        name.strip(): float(percent)
        for name, percent in re.findall(r"^(.{14}) arithmetic: .*measured ([+-][\d.]+)%$", output, re.MULTILINE)
    }
    assert set(off) == {"by hand", "instep", "instep, gloo"}
    assert all(abs(percent) < 5 for percent in off.values())
