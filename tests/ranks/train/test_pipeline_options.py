"""What goes with a pipeline: offload, 16-bit gradients, compiled blocks, rows of the whole batch, blocks gathered one by one."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import instep
from run_ranks import run_ranks
from scenarios import CLASSES, FEATURES, adam, data, sgd, whole

Pipe = partial(instep.Parallel, pipeline=2)


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


def deep(drop: float = 0.2) -> nn.Module:
    blocks = [Block(drop) for _ in range(4)]
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Sequential(*blocks), nn.Linear(8, CLASSES)).double()


def train(parallel: Any, drop: float = 0.2, optimizer_of: Any = adam, **arguments: Any) -> dict[str, Tensor]:
    with instep.Run(global_batch=16, micro_batch=2, parallel=parallel, **arguments) as run:
        torch.manual_seed(1)
        model = deep(drop)
        run.prepare(model, optimizer_of(model))
        history: list[float | None] = []
        for step in run.steps(run.loader(data(43), shuffle=True), epochs=1):
            step.forward_backward(model, F.cross_entropy)
            step.update()
            history += [step.loss, step.grad_norm]
        return result(model, history)


def result(model: nn.Module, history: Any) -> dict[str, Tensor]:
    state = {key: whole(value).detach().clone() for key, value in model.state_dict().items() if not value.is_meta}
    return {"history": torch.tensor(history, dtype=torch.float64), **state}


def train_on_rows(parallel: Any) -> dict[str, Tensor]:
    with instep.Run(global_batch=16, micro_batch=2, parallel=parallel) as run:
        torch.manual_seed(1)
        model = deep()
        run.prepare(model, adam(model))
        history: list[float | None] = []
        for step in run.steps(run.loader(data(43), shuffle=True), epochs=1):
            first, y = step.all_rows(lambda x, y: (model(x + 0.1 * torch.randn(FEATURES).double()), y))
            second = step.all_rows(lambda x, _: F.normalize(model(2 * x)))
            near = F.normalize(first) @ second.T * 5
            step.backward(F.cross_entropy(near, torch.arange(len(near))) + F.cross_entropy(first, y))
            step.update()
            history += [step.loss, step.grad_norm]
        return result(model, history)


def play(rank: int, size: int, options: list[tuple[Any, dict[str, Any]]]) -> list[dict[str, Tensor]]:
    return [train(parallel, **arguments) for parallel, arguments in options]


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 0.0, atol: float = 0.0) -> None:
    for key, value in found.items():
        torch.testing.assert_close(
            value, expected[key], rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize(
    ("size", "split"), [(2, Pipe()), (4, Pipe(shard=2, schedule="zbv"))], ids=["one pipeline", "sharded, zbv"]
)
def test_offload_changes_no_bit(size: int, split: instep.Parallel) -> None:
    for plain, offloaded in run_ranks(play, size, [(split, {}), (split, {"offload": True})]):
        compare(
            offloaded, plain, rtol=1e-12, atol=1e-15
        )  # sharded over one rank, gradients are added up in another order


def test_copies_of_a_pipeline_add_up_gradients_in_16_bits() -> None:
    (alone,) = run_ranks(play, 1, [("ddp", {"optimizer_of": sgd})])[0]
    for compressed, wide in run_ranks(
        play, 4, [(Pipe(replicate=2), {"optimizer_of": sgd, "compress": kind}) for kind in ("bf16", None)]
    ):
        compare(wide, alone, rtol=1e-9, atol=1e-9)
        compare(compressed, alone, rtol=0.02, atol=2e-3)
        assert any(not torch.equal(value, wide[key]) for key, value in compressed.items())


def play_rows(rank: int, size: int, parallel: Any) -> dict[str, Tensor]:
    return train_on_rows(parallel)


@pytest.mark.parametrize(("size", "split"), [(2, Pipe(schedule="zbv")), (4, Pipe(shard=2))], ids=["zbv", "sharded"])
def test_rows_of_all_samples_have_the_gradients_of_one_process(size: int, split: instep.Parallel) -> None:
    (alone,) = run_ranks(play_rows, 1, "ddp")
    for rank in run_ranks(play_rows, size, split):
        compare(rank, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_compiled_blocks_of_stages_agree_to_rounding() -> None:
    plain: dict[str, Any] = {"drop": 0.0}
    options = [
        (Pipe(schedule=name), plain | {"compile": on}) for name in ("1f1b", "interleaved_1f1b") for on in (False, True)
    ]
    for found in run_ranks(play, 2, options, timeout_seconds=400):
        for expected, compiled in (found[:2], found[2:]):
            compare(compiled, expected, rtol=1e-9, atol=1e-9)


def watch_blocks(rank: int, size: int, split: instep.Parallel) -> set[int]:
    """How many blocks of this rank were whole while one of them ran."""
    seen: set[int] = set()
    with instep.Run(global_batch=16, micro_batch=2, parallel=split) as run:
        model = deep()
        run.prepare(model, adam(model))
        blocks: list[Any] = [each for each in model[1] if not each.up.weight.is_meta]  # type: ignore[union-attr,arg-type]

        def note(*_: Any) -> None:
            seen.add(sum(not isinstance(each.up.weight, DTensor) for each in blocks))

        for block in blocks:
            block.up.register_forward_hook(note)
            block.up.register_full_backward_hook(note)
        for step in run.steps(run.loader(data(43)), steps=2):
            step.forward_backward(model, F.cross_entropy)
            step.update()
            assert all(isinstance(each.up.weight, DTensor) for each in blocks)
    return seen


@pytest.mark.parametrize(("gathered", "expected"), [(False, {1}), (True, {2})])
def test_a_block_of_a_sharded_stage_is_whole_while_it_runs_or_for_a_step(gathered: bool, expected: set[int]) -> None:
    assert run_ranks(watch_blocks, 4, Pipe(shard=2, gathered=gathered)) == [expected] * 4


def fail(rank: int, size: int, where: str) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("labels out of range")

    with instep.Run(global_batch=16, micro_batch=2, parallel=Pipe()) as run:
        model: Any = deep()
        run.prepare(model, adam(model))
        for step in run.steps(run.loader(data(43)), epochs=1):
            if step.index == 1 and where == "forward":
                model[2].register_forward_hook(refuse)
            elif step.index == 1:
                model[2].register_full_backward_hook(refuse)
            step.forward_backward(model, F.cross_entropy)
            step.update()


@pytest.mark.parametrize(
    ("where", "said"), [("forward", "in stage 1 of 2"), ("backward", "in backward of stage 1 of 2")]
)
def test_an_error_in_a_stage_says_which_one(where: str, said: str) -> None:
    with pytest.raises(RuntimeError, match="rank 1: ") as caught:
        run_ranks(fail, 2, where)
    text = str(caught.value)
    assert "ValueError: labels out of range" in text
    assert "Failed to run stage" not in text  # what torch makes of it
    assert sys.version_info < (3, 11) or f"[{said} of the pipeline, which this rank holds]" in text
