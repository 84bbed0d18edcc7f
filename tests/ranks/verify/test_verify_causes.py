"""Every cause has a script that an ordinary user could have written; verify names it, the line and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.verify.text import format_conclusion
from recorded_ranks import SCRIPTS, verify_script

# script: cause, step, quantity, a part of the line that is named (or ""), a part of the explanation
CAUSES = {
    "same_data": ("same-data", 1, "samples", "", "the same samples in every step"),
    "data_order": ("data-order", 1, "samples", "return DataLoader(part", "each rank shuffles a part of its own"),
    "set_epoch": ("epoch-order", 3, "samples", "in self.loader:", "set_epoch of the DistributedSampler is never called"),
    "padding": ("padding", 5, "samples", "in loader:", "1 samples a second time"),
    "drop_last": ("drop-last", 5, "samples", "in loader:", "1 samples that one process trained on"),
    "initial_weights": ("initial-weights", 1, "weights before the step", "", "Rank 1 begins with other weights"),
    "summed": ("gradients-summed", 1, "gradients", "optimizer.step()", "2 times the mean"),
    "never_averaged": ("not-averaged", 1, "gradients", "optimizer.step()", "no wrapper holds the parameters"),
    "loss_divided": ("constant-factor", 1, "loss", "loss.backward()", "0.5 times that of one process: 1 / 2"),
    "micro_batches_summed": ("constant-factor", 1, "loss", ".backward()", "micro-batches per step, 4 instead of 8"),
    "rate_scaled": ("rate-scaled", 1, "learning rate", "", "multiplied by the number of processes (0.1 -> 0.2)"),
    "scheduler_times": ("scheduler-steps", 2, "learning rate", "scheduler.step()", "stepped 3 times before this step"),
    "masked_mean": ("mean-of-means", 1, "loss", ".backward()", "One process weighs them 0.889 : 0.111"),
    "incomplete_group": ("incomplete-group", 3, "micro-batches", "loss.backward()", "adds 6 micro-batches"),
    "short_group": ("incomplete-group", 3, "micro-batches", "loss.backward()", "adds 2 micro-batches"),
    "no_sync": ("no-sync", 1, "gradients", "model.no_sync()", "averaged, no_sync, no_sync, no_sync"),
    "past_wrapper": ("forward-past-wrapper", 1, "gradients", "loss.backward()", "a forward of the inner model"),
    "replaced": ("parameters-replaced", 1, "gradients", "model = DDP(", "2 of the model's parameters"),
    "not_cleared": ("gradients-not-cleared", 2, "gradients", "optimizer.step()", "still in those of this one"),
    "loaded_on_one": ("loaded-on-some-ranks", 1, "weights before the step", "load_state_dict", "ran on rank 0 only"),
    "batch_norm_local": ("batch-norm-statistics", 1, "buffers", "", "nothing hands out rank 0's buffers"),
    "dropout_stream": ("dropout-streams", 1, "dropout", "", "every rank drops the same elements"),
    "clip_scaled": ("clip-before-unscale", 1, "clipping", "clip_grad_value_(model", "loss scale 1024"),
    "contrastive": ("gathered-without-gradients", 1, "gradients", "dist.all_gather(", "The loss is that of the whole"),
    "metric": ("metric-averaged", 4, "metric", "dist.all_reduce(accuracy)", "for the same weights"),
}  # fmt: skip
STEPS = {"padding": 7, "drop_last": 7, "incomplete_group": 4, "short_group": 4, "metric": 4}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named(name: str, tmp_path: Path) -> None:
    cause, step, quantity, line, words = CAUSES[name]
    verdict = verify_script(name, tmp_path, steps=STEPS.get(name, 3))
    first = verdict.partings[0]
    assert verdict.kind == "parted"
    assert (first.cause.id, first.step, first.quantity) == (cause, step, quantity)
    assert words in first.cause.text
    assert first.cause.fix
    if line:
        path, _, number = first.cause.where.rpartition(":")
        assert path == str(SCRIPTS / f"{name}.py")
        assert line in Path(path).read_text().splitlines()[int(number) - 1]
    assert [parting.cause.id for parting in verdict.partings] == [cause], "one fault is told once"


def test_every_script_is_tried() -> None:
    scripts = {path.stem for path in SCRIPTS.glob("*.py")}
    assert scripts == CAUSES.keys() | HEALTHY.keys() | {
        "sampler_rank",
        "random_data",
        "random_noise",
        "parameter_order",
    }


HEALTHY = {
    "healthy_augmented": {},
    "healthy_by_hand": {},
    "healthy_dropout": {},
    "healthy_exact": {"exact": True},
    "healthy_fsdp1": {},
    "healthy_gan": {},
    "healthy_parameter_average": {},
    "healthy_run": {"sizes": (1, 2, 4)},
    "healthy_scaler": {},
    "healthy_sharded": {},
    "healthy_tensor_parallel": {},
    "healthy_tokens": {},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_scripts_are_in_step(name: str, tmp_path: Path) -> None:
    verdict = verify_script(name, tmp_path, steps=4, **HEALTHY[name])
    assert (verdict.kind, verdict.partings, verdict.questions) == ("in step", [], [])
    rows = [row for comparison in verdict.comparisons for row in comparison.rows]
    assert len(rows) >= 4 * len(verdict.comparisons)
    assert all(row.same_samples and row.samples[0] == 32 for row in rows)
    assert all("gradients" in row.differences and "parameters" in row.differences for row in rows)


def test_equal_bits_are_asked_for_and_missed(tmp_path: Path) -> None:
    verdict = verify_script("healthy_run", tmp_path, steps=1, exact=True)
    assert [parting.cause.id for parting in verdict.partings] == ["not-exact"]
    assert "instep.Run(exact=True)" in verdict.partings[0].cause.fix


def test_a_sampler_made_with_the_rank_of_an_argument(tmp_path: Path) -> None:
    verdict = verify_script("sampler_rank", tmp_path, args=("--batch_size", "16"))
    assert verdict.partings[0].cause.id == "same-data"
    assert "was made with rank=0, num_replicas=2" in verdict.partings[0].cause.text


def test_data_that_ranks_draw_themselves_are_not_judged(tmp_path: Path) -> None:
    verdict = verify_script("random_data", tmp_path)
    assert verdict.kind == "not judged"
    assert "come from no DataLoader" in verdict.questions[0]


def test_noise_that_the_loop_draws_is_not_judged(tmp_path: Path) -> None:
    verdict = verify_script("random_noise", tmp_path)
    assert verdict.kind == "not judged"
    assert "drawn between a batch and its backward pass" in verdict.questions[0]
    assert "The ranks of each run agree with each other" in format_conclusion(verdict)


def test_batch_norm_differs_by_rights(tmp_path: Path) -> None:
    verdict = verify_script("batch_norm_local", tmp_path, steps=2)
    assert any("batch norm takes its statistics over the samples of one rank" in note for note in verdict.notes)
    assert {parting.cause.id for parting in verdict.partings} == {"batch-norm-statistics"}
