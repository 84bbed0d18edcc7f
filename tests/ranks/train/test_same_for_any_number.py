"""The promise: N ranks train as one process does. One table, each row against one process, in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from run_ranks import run_ranks
from scenarios import SCENARIOS

TOLERANCE = 1e-9  # float64, tens of steps; sums of at most 16 terms in another order


def play(rank: int, size: int, name: str) -> dict[str, Any]:
    return SCENARIOS[name]()


@cache
def alone(name: str) -> dict[str, Any]:
    return run_ranks(play, 1, name)[0]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SCENARIOS)
def test_trains_as_one_process_does(name: str, size: int) -> None:
    expected, found = alone(name), run_ranks(play, size, name)
    for rank in found:
        assert rank["ranks_agree"]
        assert len(rank["history"]) == len(expected["history"])
        for there, here in zip(expected["history"], rank["history"]):
            assert here == pytest.approx(there, rel=TOLERANCE)
        for key, value in expected["state"].items():
            torch.testing.assert_close(rank["state"][key], value, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{key} {name}")
            assert torch.equal(rank["state"][key], found[0]["state"][key])
