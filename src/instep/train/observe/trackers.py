"""TensorBoard, Weights & Biases and MLflow: the numbers of metrics.jsonl where a team already looks at them.

Each is one function that opens a tracker; their packages are extras of ours and imported only when asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from instep.errors import UsageError
from instep.records.run_dir import RunDir


class Tracker(Protocol):
    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_trackers(names: Sequence[str], directory: Path | None, arguments: dict[str, Any]) -> list[Tracker]:
    """Raises UsageError for a name that is none of ours, a package that is not installed, or no directory."""
    for name in names:
        if name not in OPENERS:
            raise UsageError(f"the tracker {name!r} is not known; there are {', '.join(sorted(OPENERS))}.")
    if names and directory is None:
        raise UsageError(f"the tracker {names[0]!r} needs a place for its files: give Run(dir=...).")
    return [OPENERS[name](directory, arguments) for name in dict.fromkeys(names) if directory is not None]


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the tracker {extra!r} needs a package that is not installed ({error.name}): "
            f"pip install instep[{extra}], or leave {extra!r} out of the trackers."
        ) from None


def _open_tensorboard(directory: Path, arguments: dict[str, Any]) -> Tracker:
    _require("tensorboard", "tensorboard")
    return TensorBoard(_require("torch.utils.tensorboard", "tensorboard"), directory, arguments)


def _open_wandb(directory: Path, arguments: dict[str, Any]) -> Tracker:
    wandb = _require("wandb", "wandb")
    try:
        return WeightsAndBiases(wandb, directory, arguments)
    except wandb.errors.Error as error:
        raise _refused("wandb", error) from None


def _open_mlflow(directory: Path, arguments: dict[str, Any]) -> Tracker:
    mlflow = _require("mlflow", "mlflow")
    try:
        return MLflow(mlflow, directory, arguments)
    except mlflow.exceptions.MlflowException as error:
        raise _refused("mlflow", error) from None


def _refused(name: str, error: Exception) -> UsageError:
    return UsageError(f"the tracker {name!r} did not start: {' '.join(str(error).split())} Or leave {name!r} out.")


OPENERS: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}


def kept_id(path: Path) -> str | None:
    """The id under which this run directory is known to a tracker, so that a resumed run goes on with its curves."""
    return path.read_text(encoding="utf-8").strip() or None if path.exists() else None


class TensorBoard:
    """Event files in the run directory: `tensorboard --logdir DIR`."""

    def __init__(self, module: Any, directory: Path, arguments: dict[str, Any]) -> None:
        self._module = module
        self._place = RunDir(directory).tracker("tensorboard")
        self._arguments = arguments
        self._writer: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            # what an earlier, stopped run wrote for this step and later ones is taken back
            self._writer = self._module.SummaryWriter(str(self._place), purge_step=step)
            table = "\n".join(f"| {name} | {value} |" for name, value in self._arguments.items())
            self._writer.add_text("arguments", f"| argument | value |\n|---|---|\n{table}", step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Project, entity and mode come from wandb's own variables (WANDB_PROJECT, WANDB_MODE, ...)."""

    def __init__(self, wandb: Any, directory: Path, arguments: dict[str, Any]) -> None:
        place = RunDir(directory).tracker("wandb")
        place.mkdir(parents=True, exist_ok=True)
        kept = place / "instep-run-id"
        name = directory.resolve().name
        self._run = wandb.init(dir=str(directory), name=name, config=arguments, id=kept_id(kept), resume="allow")
        kept.write_text(f"{self._run.id}\n", encoding="utf-8")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Server and experiment come from MLflow's own variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME)."""

    def __init__(self, mlflow: Any, directory: Path, arguments: dict[str, Any]) -> None:
        place = RunDir(directory).tracker("mlflow")
        place.mkdir(parents=True, exist_ok=True)
        kept = place / "instep-run-id"
        known = kept_id(kept)
        self._mlflow = mlflow
        run = mlflow.start_run(run_id=known, run_name=None if known else directory.resolve().name)
        self._id = run.info.run_id
        kept.write_text(f"{self._id}\n", encoding="utf-8")
        if known is None:
            mlflow.log_params(arguments)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step, synchronous=False)

    def close(self) -> None:
        self._mlflow.end_run()
