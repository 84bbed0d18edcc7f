"""The norm of gradients is exact to rounding, however many numbers there are."""

from __future__ import annotations

import pytest
import torch

from instep.train.reduce.norm import gradient_norm


@pytest.mark.parametrize("count", [5, 70_001, 3_000_000])
def test_long_gradients_lose_nothing(count: int) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(count) * 1e-3
    assert gradient_norm([gradient, gradient[:3]]) == pytest.approx(
        float(torch.cat([gradient, gradient[:3]]).double().norm()), rel=3e-7
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_number_shows(bad: float) -> None:
    gradient = torch.zeros(100_000)
    gradient[99_999] = bad
    assert not torch.isfinite(torch.tensor(gradient_norm([gradient])))
