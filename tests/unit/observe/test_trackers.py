import io
import sys
import types

import pytest

from instep.errors import UsageError
from instep.train.observe.observer import Observer
from instep.train.observe.trackers import open_trackers


class FakeRun:
    """Stands for a wandb run: keeps what it was given."""

    def __init__(self, **arguments) -> None:
        self.arguments = arguments
        self.id = arguments["id"] or "fresh"
        self.logged: list[tuple[int, dict]] = []
        self.finished = False

    def log(self, numbers: dict, step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished = True


class NoKey(Exception):
    """What wandb raises for what the user has to do."""


@pytest.fixture
def wandb_runs(monkeypatch) -> list[FakeRun]:
    runs: list[FakeRun] = []

    def init(**arguments) -> FakeRun:
        runs.append(FakeRun(**arguments))
        return runs[-1]

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.errors = types.SimpleNamespace(Error=NoKey)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_names_the_extra(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as caught:
        open_trackers([name], tmp_path, {})
    assert str(caught.value) == (
        f"the tracker {name!r} needs a package that is not installed ({name}): pip install instep[{name}], or leave "
        f"{name!r} out of the trackers."
    )


def test_an_unknown_tracker_names_those_there_are(tmp_path):
    with pytest.raises(UsageError) as caught:
        open_trackers(["comet"], tmp_path, {})
    assert str(caught.value) == "the tracker 'comet' is not known; there are mlflow, tensorboard, wandb."


def test_a_tracker_without_a_directory_is_one_sentence():
    with pytest.raises(UsageError) as caught:
        open_trackers(["wandb"], None, {})
    assert str(caught.value) == "the tracker 'wandb' needs a place for its files: give Run(dir=...)."


def test_a_tracker_gets_each_step_once_with_what_was_logged(tmp_path, wandb_runs):
    watcher = Observer(
        directory=tmp_path, is_main=True, arguments={"seed": 3}, trackers=["wandb", "wandb"], stream=io.StringIO()
    )
    watcher.begin(0)
    watcher.log({"early": 1})
    watcher.step(0, 0, 2.0, None, 1e-3, 64.0, False)
    watcher.log({"late": 0.5, "note": "text is not a number"})
    watcher.begin(1)
    watcher.step(1, 0, 1.0, None, 1e-3, 64.0, False)
    watcher.close()
    (run,) = wandb_runs
    assert run.arguments["config"] == {"seed": 3} and run.finished
    assert [step for step, _ in run.logged] == [0, 1]
    first = run.logged[0][1]
    assert (first["loss"], first["early"], first["late"], first["samples"]) == (2.0, 1.0, 0.5, 64.0)
    assert first.keys().isdisjoint({"note", "grad_norm", "step"})


def test_a_resumed_run_goes_on_with_the_same_curves(tmp_path, wandb_runs):
    for _ in range(2):
        Observer(directory=tmp_path, is_main=True, arguments={}, trackers=["wandb"], stream=io.StringIO()).close()
    assert [run.arguments["id"] for run in wandb_runs] == [None, "fresh"]


def test_a_tracker_that_refuses_is_one_sentence(tmp_path, wandb_runs, monkeypatch):
    def init(**arguments):
        raise NoKey("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    with pytest.raises(UsageError) as caught:
        open_trackers(["wandb"], tmp_path, {})
    assert str(caught.value) == (
        "the tracker 'wandb' did not start: No API key configured. Use `wandb login` to log in. Or leave 'wandb' out."
    )


def test_other_ranks_open_no_tracker(tmp_path, wandb_runs):
    Observer(directory=tmp_path, is_main=False, arguments={}, trackers=["wandb"], stream=io.StringIO()).close()
    assert wandb_runs == []


def test_tensorboard_keeps_the_curve(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    watcher = Observer(
        directory=tmp_path, is_main=True, arguments={"seed": 3}, trackers=["tensorboard"], stream=io.StringIO()
    )
    for index in range(3):
        watcher.step(index, 0, 2.0 - index, None, 1e-3, 64.0, False)
    watcher.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 2.0), (1, 1.0), (2, 0.0)]
