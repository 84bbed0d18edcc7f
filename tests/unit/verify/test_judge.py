"""The verdict from records that were made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instep.verify.text import format_conclusion, format_tables
from instep.verify.verdict import EXIT_CODES, judge
from verify_records import gradient, make_run, step

HALVES = (["s0"], ["s1"])


def two(first: Any = None, second: Any = None, **facts: Any) -> list[list[Any]]:
    """One step of two ranks, each with a sample of its own; the gradients of the whole batch, unless given."""
    return [
        [step(gradient(1, 2, 3, 4, local=(2, 2, 2, 2)) if first is None else first, samples=HALVES[0], **facts)],
        [step(gradient(1, 2, 3, 4, local=(0, 2, 4, 6)) if second is None else second, samples=HALVES[1], **facts)],
    ]


def verdict_on(tmp_path: Path, ranks: list[list[Any]], one: Any = None, exact: bool = False, **more: Any) -> Any:
    reference = make_run(tmp_path / "n1", [one or [step()]])
    return judge(
        [reference, make_run(tmp_path / "n2", ranks, **more)], exact, lambda: make_again(tmp_path, one or [step()])
    )


def make_again(tmp_path: Path, steps: list[Any]) -> Any:
    return make_run(tmp_path / "again", [[{**each, **each.get("again", {})} for each in steps]]).record


def summed(*numbers: float, before: float = 0.0) -> dict[str, Any]:
    return {"line": "train.py:30", "call": "all_reduce", "before": [before], "after": list(numbers), "op": "SUM"}


def metric_ranks(total: float, parts: tuple[float, float]) -> list[list[Any]]:
    ranks = two()
    for rank, part in zip(ranks, parts):
        rank[0] = {**rank[0], "metrics": [summed(total, before=part)]}
    return ranks


@pytest.mark.parametrize(
    ("whole", "total", "parts", "wrong"),
    [
        (0.8, 1.6, (0.7, 0.9), False),  # the sum of means over equal parts
        (40.0, 40.0, (19.0, 21.0), False),  # a sum
        (0.8, 1.5, (0.6, 0.9), True),  # the mean of means is 0.75
        (45.0, 46.0, (23.0, 23.0), True),  # one sample twice
        (0.8, 3.0, (1.4, 1.6), False),  # no mean of the parts: bytes, seconds
    ],
)
def test_metrics(tmp_path: Path, whole: float, total: float, parts: tuple[float, float], wrong: bool) -> None:
    verdict = verdict_on(tmp_path, metric_ranks(total, parts), [step(metrics=[summed(whole)])])
    assert [p.cause.id for p in verdict.partings] == ["metric-averaged"] * wrong


def test_what_differs_from_run_to_run_is_no_metric(tmp_path: Path) -> None:
    whole = step(metrics=[summed(0.8)], again={"metrics": [summed(0.7)]})
    assert verdict_on(tmp_path, metric_ranks(1.5, (0.6, 0.9)), [whole]).kind == "in step"


def test_equal_numbers_are_in_step(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, two())
    assert verdict.kind == "in step"
    assert EXIT_CODES[verdict.kind] == 0
    assert format_tables(verdict).splitlines()[2].split()[:4] == ["1", "2", "the", "same"]


def test_rounding_is_in_step_but_not_exact(tmp_path: Path) -> None:
    near = gradient(1 + 1e-7, 2, 3, 4, local=(1, 2, 3, 4))
    assert verdict_on(tmp_path / "a", two(near, near, gradient_bits={"w": "other"})).kind == "in step"
    verdict = verdict_on(tmp_path / "b", two(near, near, gradient_bits={"w": "other"}), exact=True)
    assert [parting.cause.id for parting in verdict.partings] == ["not-exact"]


@pytest.mark.parametrize(
    ("factor", "times", "words"),
    [
        (0.5, 1.0, "0.5 times that of one process: 1 / 2, the number of processes. The loss does not carry it"),
        (2.0, 2.0, "2 times that of one process: 2, the number of processes. The loss carries the same factor"),
        (0.3, 1.0, "0.3 times that of one process: 0.3. The loss does not carry it"),
    ],
)
def test_a_factor_is_named(tmp_path: Path, factor: float, times: float, words: str) -> None:
    numbers = gradient(*(factor * n for n in (1, 2, 3, 4)))
    passes = [{"loss": times, "scale": 1.0, "divisor": None, "synced": True, "line": "train.py:9"}]
    verdict = verdict_on(tmp_path, two(numbers, numbers, backwards=passes))
    assert [parting.cause.id for parting in verdict.partings] == ["constant-factor"]
    assert words in verdict.partings[0].cause.text


def test_ranks_whose_gradients_differ_come_before_what_follows(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, two(gradient(2, 2, 2, 2), gradient(0, 2, 4, 6), wrapped_forwards=0))
    assert [(p.between, p.cause.id) for p in verdict.partings] == [("ranks", "forward-past-wrapper")]
    assert EXIT_CODES[verdict.kind] == 1


def test_no_sync_names_the_passes(tmp_path: Path) -> None:
    passes = [{"loss": 1.0, "scale": 1.0, "divisor": None, "synced": s, "line": "t.py:3"} for s in (True, False)]
    ranks = two(gradient(2, 2, 2, 2), gradient(0, 2, 4, 6), backwards=passes, no_sync_line="t.py:2")
    cause = verdict_on(tmp_path, ranks).partings[0].cause
    assert (cause.id, cause.where) == ("no-sync", "t.py:2")
    assert "(averaged, no_sync)" in cause.text


def test_gradients_that_are_summed(tmp_path: Path) -> None:
    summed = [gradient(2, 4, 6, 8, local=local) for local in ((2, 2, 2, 2), (0, 2, 4, 6))]
    verdict = verdict_on(tmp_path, two(*summed))
    assert [p.cause.id for p in verdict.partings] == ["gradients-summed"]


def test_a_hook_that_compresses_widens_the_tolerance(tmp_path: Path) -> None:
    near = [gradient(1.001, 2, 3, 4, local=local) for local in ((2, 2, 2, 2), (0, 2, 4, 6))]
    assert verdict_on(tmp_path / "a", two(*near)).kind == "parted"
    verdict = verdict_on(tmp_path / "b", two(*near, hook="fp16_compress_hook"))
    assert (verdict.kind, verdict.notes) == ("in step", [])


def test_a_hook_of_another_kind_is_named_and_not_judged(tmp_path: Path) -> None:
    rough = [gradient(1.3, 2, 3, 4, local=local) for local in ((2, 2, 2, 2), (0, 2, 4, 6))]
    verdict = verdict_on(tmp_path, two(*rough, hook="powerSGD_hook"))
    assert verdict.kind == "in step"
    assert "the communication hook powerSGD_hook changes gradients" in verdict.notes[0]


def test_parameters_averaged_after_each_step(tmp_path: Path) -> None:
    """With plain SGD that is the same as averaging gradients."""
    locals_ = ([2.0, 2, 2, 2], [0.0, 2, 4, 6])
    means = [10 - 0.1, 20 - 0.2, 30 - 0.3, 40 - 0.4]
    ranks = []
    for local, sample in zip(locals_, HALVES):
        after = [start - 0.1 * g for start, g in zip((10, 20, 30, 40), local)]
        first = step({**gradient(*local), "param/w": after}, samples=sample, wrapped=False)
        again = [start - 0.1 * g for start, g in zip(means, local)]
        second = step(
            {**gradient(*local), "start/w": means, "param/w": again}, samples=sample, wrapped=False, changed=["w"]
        )
        ranks.append([first, second])
    whole = [step(), step({"start/w": means, "param/w": [m - 0.1 * g for m, g in zip(means, (1, 2, 3, 4))]})]
    assert verdict_on(tmp_path, ranks, whole).kind == "in step"


def test_other_parameter_order(tmp_path: Path) -> None:
    ranks = two(model_names=["v", "w"])
    ranks[1][0] = {**ranks[1][0], "model_names": ["w", "v"]}
    verdict = verdict_on(tmp_path, ranks, [step(model_names=["v", "w"])])
    assert [p.cause.id for p in verdict.partings] == ["parameter-order"]
    assert "where v stands on rank 0, w stands on rank 1" in verdict.partings[0].cause.text


def test_a_batch_that_grows_with_processes_is_not_judged(tmp_path: Path) -> None:
    ranks = two()
    ranks[0][0] = {**ranks[0][0], "samples": ["s0", "s1"]}
    ranks[1][0] = {**ranks[1][0], "samples": ["s2", "s3"]}
    verdict = verdict_on(tmp_path, ranks)
    assert (verdict.kind, EXIT_CODES[verdict.kind]) == ("not judged", 3)
    assert "A step has 2 samples on one process and 4 on 2 processes" in verdict.questions[0]
    assert "--divide NAME" in verdict.questions[0]


def test_batch_norm_is_named_and_not_judged(tmp_path: Path) -> None:
    other = gradient(5, 2, 3, 4)
    verdict = verdict_on(tmp_path, two(other, other, batch_norm=True), [step(batch_norm=True)])
    assert verdict.kind == "in step"
    assert "batch norm takes its statistics" in verdict.notes[0]
    assert "!" not in format_tables(verdict)


def test_learning_rate_times_processes(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, two(rates=[0.2]))
    assert [p.cause.id for p in verdict.partings] == ["rate-scaled"]
    assert "(0.1 -> 0.2)" in verdict.partings[0].cause.text


def test_a_forward_that_draws_is_not_judged(tmp_path: Path) -> None:
    other = gradient(5, 2, 3, 1)
    verdict = verdict_on(tmp_path, two(other, other, draws=True), [step(draws=True)])
    assert verdict.kind == "not judged"
    assert "Random numbers are drawn between" in verdict.questions[0]


def test_rates_that_differ_between_ranks(tmp_path: Path) -> None:
    ranks = two()
    ranks[1][0] = {**ranks[1][0], "rates": [0.05]}
    verdict = verdict_on(tmp_path, ranks)
    assert verdict.partings[0].cause.id == "rates-apart"
    assert "[0.1] on rank 0 and [0.05] on rank 1" in verdict.partings[0].cause.text


def test_other_samples_come_before_equal_masks(tmp_path: Path) -> None:
    """Dropout is off while runs are compared, so it explains no difference of samples."""
    verdict = verdict_on(tmp_path, two(drops=True, random="r"), [step(samples=["s0", "s9"])])
    assert [p.cause.id for p in verdict.partings] == ["data-order", "dropout-streams"]


def test_several_axes_are_left_to_the_comparison(tmp_path: Path) -> None:
    """Tensor parallel ranks rightly hold the same samples and different parameters."""
    ranks = two(gradient(2, 2, 2, 2), gradient(0, 2, 4, 6), mesh_axes=2, sharded=1)
    assert all(p.between == "runs" for p in verdict_on(tmp_path, ranks).partings)


def test_what_is_printed(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, two(gradient(2, 2, 2, 2), gradient(0, 2, 4, 6), joined=False))
    assert format_conclusion(verdict).splitlines()[:2] == [
        "parted at step 1: gradients of w (1.2e+00 apart, tolerance 1.0e-05), between the ranks of 2 processes  "
        "[never-joined]",
        "  why   Rank 0 and rank 1 step with different gradients: the processes never met (torch.distributed is not",
    ]


def test_a_loss_that_is_no_number_in_one_process_is_not_judged(tmp_path: Path) -> None:
    passes = [{"loss": float("nan"), "scale": 1.0, "divisor": None, "synced": True, "line": "train.py:9"}]
    verdict = verdict_on(tmp_path, two(backwards=passes), [step(backwards=passes)])
    assert verdict.kind == "not judged"
    assert verdict.questions[0].startswith("The loss of step 1 is nan on one process already")
    assert json.loads(json.dumps(verdict.as_json(), allow_nan=False))["verdict"] == "not judged"


def test_it_goes_into_json(tmp_path: Path) -> None:
    told = json.loads(json.dumps(verdict_on(tmp_path, two(rates=[0.2])).as_json()))
    assert told["verdict"] == "parted"
    assert told["partings"][0]["cause"]["fix"]
    assert told["comparisons"][0]["rows"][0]["differences"]["gradients"]["tolerance"] > 0
