"""The first operation that made a bad number, told from the graph of the loss, kept and done again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from instep.cli.diagnose import replay_all
from instep.errors import UsageError
from instep.launch.probe.first_bad import find_first_bad
from instep.launch.probe.replay import keep_operation, replay
from instep.records.run_dir import RunDir

FACTS = {"rank": 1, "step": 12, "batch": 12, "indices": [7, 3]}


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (lambda x: (x / (x * 0)).sum(), "Div", "division by 0 (3 of 3 elements of the divisor)"),
        (lambda x: torch.log(-x).sum(), "Log", "logarithm of -3 (3 of 3 elements)"),
        (lambda x: torch.sqrt(-x).sum(), "Sqrt", "square root of a negative number"),
        (lambda x: (x * 0).pow(-0.5).sum(), "Pow", "0 to the power of -0.5"),
        (lambda x: torch.exp(x * 100).sum(), "Exp", "exp of a number that is too large (above 88.7 in float32, 11.1 in float16)"),
    ],
)  # fmt: skip
def test_names_the_operation_and_why(make: Any, name: str, why: str) -> None:
    found = find_first_bad(make(leaf(1.0, 2.0, 3.0)))
    assert found is not None and (found.name, found.why, found.certain) == (name, why, True)


def test_a_mask_that_hides_a_whole_row_is_told_from_one_that_does_not() -> None:
    scores = torch.zeros(2, 3, requires_grad=True) + 1
    mask = torch.tensor([[True, False, False], [True, True, True]])
    bad = find_first_bad(scores.masked_fill(mask, float("-inf")).softmax(-1).sum() * 2)
    assert bad is not None and bad.name == "Softmax" and "every value is -inf" in bad.why
    assert find_first_bad(scores.masked_fill(mask[:1], float("-inf")).softmax(-1).sum() * 2) is None


def test_overflow_of_half_precision_is_told_by_doing_it_again_in_float32() -> None:
    x = torch.full((2, 4), 300.0, dtype=torch.float16, requires_grad=True)
    found = find_first_bad((x @ (x.t() * 1)).float().sum())
    assert found is not None and found.name == "Mm" and found.overflow
    assert "65504" in found.why


def test_the_first_operation_is_named_and_not_one_that_follows_from_it() -> None:
    x = leaf(0.0, 1.0)
    found = find_first_bad((torch.log(x * 1) * 0 / leaf(0.0, 1.0)).sum())
    assert found is not None and found.name == "Log"


def test_a_kept_operation_is_done_again_from_its_file(tmp_path: Path) -> None:
    x = torch.full((1, 4), 300.0, dtype=torch.float16, requires_grad=True)
    found = find_first_bad((x @ (x.t() * 1)).float().sum())
    assert found is not None
    path = RunDir(tmp_path).rank(1).replay
    path.parent.mkdir()
    assert keep_operation(path, found, FACTS, [("[0]", torch.ones(2, 4))]) == ""
    text = replay_all(tmp_path)
    assert text.startswith("rank 1, step 12, batch 12, samples [7, 3]: Mm\n")
    assert "again in float16: 1 of 1 not finite, first at [0, 0]: inf" in text
    assert "again in float32: all finite, largest 360000" in text
    assert "[0] of the batch: float32 (2, 4), from 1 to 1" in text


def test_large_tensors_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.launch.probe.replay.MOST_BYTES", 10)
    found = find_first_bad(torch.log(leaf(0.0, 1.0, 2.0, 3.0) * 1).sum())
    assert found is not None
    assert keep_operation(tmp_path / "kept.pt", found, FACTS, [("x", torch.ones(100))]) == "self"
    assert "left out for its size: self" in replay(tmp_path / "kept.pt")


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("run",)

    path = tmp_path / "rank0" / "nonfinite.pt"
    path.parent.mkdir()
    torch.save({"operation": Evil()}, path)
    with pytest.raises(UsageError, match="is not an operation kept by `instep run`"):
        replay_all(tmp_path)


def test_a_run_without_a_bad_loss_has_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no operation to replay: none of its ranks saw a loss become NaN"):
        replay_all(tmp_path)


def test_losses_that_are_numbers_have_no_first_bad_operation() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    assert find_first_bad(F.cross_entropy(x * 2, torch.tensor([0, 1, 2, 0]))) is None


def test_a_convolution_is_done_again_with_its_own_shape() -> None:
    x = torch.full((1, 2, 5, 5), 200.0, dtype=torch.float16, requires_grad=True)
    weight = torch.full((3, 2, 3, 3), 100.0, dtype=torch.float16, requires_grad=True)
    found = find_first_bad(F.conv2d(x * 1, weight, stride=2, padding=1).float().sum())
    assert found is not None and found.name == "Convolution" and found.overflow
