"""Mixed precision on any number of ranks: the same numbers to 16-bit rounding, one loss scale, skipped steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep
from run_ranks import run_ranks
from scenarios import CLASSES, FEATURES, data


@dataclass
class Output:
    logits: Tensor
    more: dict[str, list[Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, 32), nn.Linear(32, CLASSES)
        self.inner_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Output:
        hidden = self.one(x.float())
        self.inner_dtype = hidden.dtype
        return Output(self.two(torch.tanh(hidden)), {"hidden": [hidden]})


def train(rank: int, size: int, precision: str, spoiled: int | None) -> Any:
    with instep.Run(global_batch=16, micro_batch=2, precision=precision, clip_norm=1.0) as run:
        model = Net()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        history: list[Any] = []
        for step in run.steps(run.loader(data(), shuffle=True), epochs=2):
            for x, y in step:
                output = model(x)
                assert output.logits.dtype == output.more["hidden"][0].dtype == torch.float32
                assert not torch.is_autocast_enabled("cpu")
                loss = F.cross_entropy(output.logits, y)
                if step.index == spoiled and run.is_main:
                    loss = loss * float("inf")
                step.backward(loss)
            step.update()
            history.append((step.loss, step.grad_norm, step.skipped))
        return history, run._loss_scale.value, model.inner_dtype, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_equals_one_process(precision: str, dtype: torch.dtype) -> None:
    history, scale, inner, parameters = run_ranks(train, 1, precision, None)[0]
    assert inner == dtype
    for found in run_ranks(train, 2, precision, None):
        assert found[1] == scale == (65536.0 if precision == "fp16" else 1.0)
        for there, here in zip(history, found[0]):
            assert here == pytest.approx(there, rel=1e-5)
        for there, here in zip(parameters, found[3]):
            torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(precision: str) -> None:
    ranks = run_ranks(train, 2, precision, 3)
    for history, scale, _, parameters in ranks:
        assert [index for index, (_, _, skipped) in enumerate(history) if skipped] == [3]
        assert scale == (32768.0 if precision == "fp16" else 1.0)
        for here, there in zip(parameters, ranks[0][3]):
            assert torch.isfinite(here).all()
            assert torch.equal(here, there)


def test_autocast_is_off_after_an_exception() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    with instep.Run(global_batch=2, precision="bf16") as run:
        model = run.prepare(Failing())
        with pytest.raises(ValueError, match="no"):
            model(torch.ones(1, 2))
        assert not torch.is_autocast_enabled("cpu")
