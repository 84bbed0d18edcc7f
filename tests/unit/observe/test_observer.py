import io
import json
import statistics
import time

import numpy
import pytest
import torch

from instep.errors import UsageError
from instep.train.observe.observer import Observer


def observer(tmp_path=None, is_main=True, stream=None) -> Observer:
    return Observer(directory=tmp_path, is_main=is_main, arguments={}, stream=stream or io.StringIO())


def step(watcher: Observer, index: int, loss: float | None = 1.0) -> None:
    watcher.step(index, 0, loss, 0.5, 1e-3, 64.0, False)


def read(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_one_object_per_step_with_what_was_measured(tmp_path):
    watcher = observer(tmp_path)
    step(watcher, 0)
    watcher.step(1, 2, float("inf"), None, 1e-4, 32.0, True)
    watcher.close()
    first, second = read(tmp_path)
    assert first.keys() == {
        *("step", "epoch", "time", "seconds", "loss", "grad_norm", "learning_rate", "samples", "skipped")
    }
    assert first["time"] == pytest.approx(time.time(), abs=60)
    assert first["loss"] == 1.0 and first["skipped"] is False
    assert second["loss"] is None and second["nonfinite"] == {"loss": "inf"} and second["skipped"] is True


def test_a_metric_joins_its_step_before_and_after_the_update(tmp_path):
    watcher = observer(tmp_path)
    for index in range(2):
        watcher.begin(index)
        watcher.log({"before": index})
        step(watcher, index)
        watcher.log({"after": torch.tensor(index)})
    watcher.log({"at_the_end": numpy.float32(0.5)})
    watcher.close()
    assert [(line["before"], line["after"]) for line in read(tmp_path)] == [(0, 0), (1, 1)]
    assert read(tmp_path)[1]["at_the_end"] == 0.5


def test_a_logged_loss_takes_the_place_of_the_measured_one(tmp_path):
    watcher = observer(tmp_path)
    step(watcher, 0, loss=1.25)
    watcher.log({"loss": 2.5})
    watcher.close()
    assert read(tmp_path)[0]["loss"] == 2.5


def test_a_second_update_of_a_step_is_the_same_object_and_adds_no_samples(tmp_path):
    stream = io.StringIO()
    watcher = observer(tmp_path, stream=stream)
    step(watcher, 0, loss=1.0)
    step(watcher, 0, loss=3.0)
    step(watcher, 1)
    watcher.close()
    assert [line["loss"] for line in read(tmp_path)] == [3.0, 1.0]
    assert stream.getvalue().splitlines()[-1].startswith("step 2 ")


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    stream = io.StringIO()
    watcher = observer(tmp_path, is_main=False, stream=stream)
    watcher.plan(2)
    watcher.begin(0)
    step(watcher, 0)
    watcher.log({"a": 1})
    watcher.say("hello")
    watcher.print("hello")
    watcher.rewind(0)
    watcher.flush()
    watcher.close()
    assert stream.getvalue() == "" and list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_a_line_is_said_once():
    stream = io.StringIO()
    watcher = observer(stream=stream)
    for text in ("one", "two", "one"):
        watcher.say(text)
    watcher.close()
    assert stream.getvalue() == "instep: one\ninstep: two\n"


def test_print_is_pythons_print(capsys):
    watcher = observer()
    watcher.print("a", 1, sep="-", end="!")
    watcher.close()
    assert capsys.readouterr().out == "a-1!"


def test_rewind_forgets_the_steps_that_are_done_again(tmp_path):
    watcher = observer(tmp_path)
    for index in range(5):
        step(watcher, index)
    watcher.close()
    watcher = observer(tmp_path)
    watcher.rewind(3)
    step(watcher, 3, loss=9.0)
    watcher.close()
    assert [(line["step"], line["loss"]) for line in read(tmp_path)] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 9.0)]


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (
            {"step": 3},
            "run.log(step=...): 'step' is written for every step already, as are step, epoch, time, seconds, samples, "
            "skipped, nonfinite. Choose another name.",
        ),
        (
            {"a": torch.zeros(3)},
            "run.log(a=...) got a Tensor of 3 elements; it takes a number, a text, a bool, None or a tensor of one "
            "element.",
        ),
        (
            {"a": [1]},
            "run.log(a=...) got a list; it takes a number, a text, a bool, None or a tensor of one element.",
        ),
    ],
)
def test_what_cannot_be_logged_is_one_sentence_on_every_rank(metrics, text, is_main):
    watcher = observer(is_main=is_main)
    with pytest.raises(UsageError) as caught:
        watcher.log(metrics)
    watcher.close()
    assert str(caught.value) == text


def test_a_step_costs_microseconds(tmp_path):
    watcher = observer(tmp_path)
    watcher.plan(4000)
    seconds = []
    for index in range(4000):
        start = time.perf_counter()
        watcher.begin(index)
        step(watcher, index)
        seconds.append(time.perf_counter() - start)
    watcher.close()
    assert statistics.median(seconds) < 50e-6  # 2 us when the machine is idle; loaded machines are slow
