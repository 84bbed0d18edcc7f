"""A run's checkpoints: what goes in, and how a run continues from one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from instep.errors import CheckpointError, UsageError
from instep.settings import read_setting
from instep.train.checkpoint.encode import decode_state, encode_state, tensor_names
from instep.train.checkpoint.model_state import check_storable
from instep.train.checkpoint.saved import Saved
from instep.train.checkpoint.state import capture, merge_states
from instep.train.checkpoint.state import restore as restore_state
from instep.train.checkpoint.store import Checkpoints
from instep.train.exactness import describe_differences, read_facts
from instep.train.parts import check_values
from instep.train.position import Position
from instep.train.reduce.power_sgd import PowerSGD
from instep.train.step_end import finish_step
from instep.train.techniques.local_sgd import average_all
from instep.train.update import count_steps

if TYPE_CHECKING:
    from instep.train.run import Run


def open_checkpoints(run: Run) -> Checkpoints | None:
    """Takes the run directory, which another living run may not have."""
    arguments, world = run._arguments, run._entered()
    if arguments.dir is None:
        return None
    keep_every = read_setting("keep_every").value
    return Checkpoints(arguments.dir, world, keep=arguments.keep, keep_every=keep_every, say=run._observer.say)


def close_checkpoints(run: Run, failed: bool) -> None:
    """Waits for the last save; after a failure only for what still can finish."""
    assert run._checkpoints is not None
    if failed:
        run._checkpoints.abandon()
    else:
        run._checkpoints.close()


def _parts(run: Run) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    models = {str(number): model for number, model in enumerate(run._models)}
    optimizers = {str(number): trained.optimizer for number, trained in enumerate(run._trained)}
    return models, optimizers


def _kept_here(run: Run) -> dict[str, Callable[[torch.Tensor], bool]]:
    """By optimizer, of which parameters this rank keeps the state, where ranks share it out."""
    shares = {str(number): trained.shares for number, trained in enumerate(run._trained)}
    return {number: each.is_here for number, each in shares.items() if each is not None}


def save(run: Run, metric: float | None, best: str | None) -> None:
    checkpoints = _need_directory(run, "run.save")
    if best is not None and not (isinstance(best, str) and best in ("max", "min")):
        raise UsageError(f"run.save(best={best!r}): best is 'max' or 'min', by the metric.")
    if best is not None and metric is None:
        raise UsageError(
            f"run.save(best={best!r}) needs the metric that it goes by: run.save(metric=value, best={best!r})."
        )
    if run._step is not None and run._step.update_calls:
        finish_step(run, run._step)
    run._observer.flush()
    average_all(run, "run.save", state=True)
    tensors, training = capture(*_parts(run))
    if run._pipelines or any(trained.shares is not None for trained in run._trained):
        training["optimizers"] = merge_states(run._entered().gather_objects(training["optimizers"], "run.save"))
    more, values = encode_state(
        {
            "position": run._position.as_json(),
            "loss_scale": run._loss_scale.state_dict(),
            "reference": run._reference if run._next_reference is None else run._next_reference,
            "schedulers": [[s.scheduler.state_dict() for s in trained.schedulers] for trained in run._trained],
            "arguments": run._arguments.as_json(),
            "exact": read_facts(run._entered()) if run._exact else None,
        },
        "run",
    )
    kept, values["state"] = encode_state(run.state, "run.state")
    for name, tensor in kept.items():
        check_storable(name, tensor)
    own_tensors, streams = encode_state(_stream_states(run), "streams")
    remembered, memories = encode_state(_transport_states(run), "transports")
    checkpoints.save(
        {**tensors, **more, **kept, **own_tensors, **remembered},
        {**training, "run": values},
        step=run._position.next_index,
        metric=metric,
        best=best,  # type: ignore[arg-type]  # checked above
        own_values={"streams": streams, "transports": memories},
    )
    run._saved_index = run._position.next_index


def _stream_states(run: Run) -> dict[str, Any]:
    """Of the streams of the epoch that the run is in; between epochs there are none."""
    loop = next((loop for loop in reversed(run._position.loops) if not loop.done), None)
    if run._epoch is None or loop is None or loop.step == 0:
        return {}
    states = run._epoch.stream_states()
    return {str(slot): state for slot, state in (states or {}).items()}


def _transport_states(run: Run) -> dict[str, Any]:
    """What PowerSGD remembers on this rank, by optimizer."""
    transports = {str(number): trained.reducer.transport for number, trained in enumerate(run._trained)}
    states = {number: t.state() for number, t in transports.items() if isinstance(t, PowerSGD)}
    return {str(run._entered().rank): states} if states else {}


def _restore_transports(run: Run, saved: Saved) -> None:
    world, kept = run._entered(), saved.values.get("transports", {})
    for number, trained in enumerate(run._trained):
        transport = trained.reducer.transport
        if isinstance(transport, PowerSGD) and str(number) in kept.get("0", {}):
            own = [str(rank) for rank in range(world.rank, len(kept), world.size)]
            mine = [_decode(saved, kept[rank][str(number)]) for rank in own]
            transport.load_state(_decode(saved, kept["0"][str(number)]), mine)


def between_saves(run: Run) -> None:
    """Has all ranks stop together, at the next step, when a save in the background failed; gets the memory for the
    first save."""
    assert run._checkpoints is not None
    if run._checkpoints.failure is not None:
        run._stop_asked = True  # the ranks learn of it at different times
    if run._arguments.checkpoint_every is not None and not run._checkpoints.is_reserved:
        run._checkpoints.reserve(capture(*_parts(run))[0])


def restore(run: Run, path: Path) -> bool:
    """path: of a checkpoint, or `latest`."""
    is_latest = str(path) == "latest"
    if is_latest and run._checkpoints is None:
        return False
    checkpoints = _need_directory(run, f"run.restore({str(path)!r})")
    if is_latest and checkpoints.newest_good() is None:
        return False
    saved = checkpoints.open("latest" if is_latest else path)
    _compare_arguments(run, saved)
    restore_state(saved, saved.values, *_parts(run), _kept_here(run))
    values = _decode(saved, saved.values["run"])
    _restore_schedulers(run, values["schedulers"])
    run._position = Position.from_json(values["position"])
    run._loss_scale.load_state_dict(values["loss_scale"])
    run._reference, run._next_reference = values["reference"], None
    run.state.clear()
    run.state.update(values["state"])
    streams = _decode(saved, saved.values.get("streams", {}))
    if streams:
        last = next(loop for loop in reversed(run._position.loops) if not loop.done)
        last.streams = {int(slot): state for slot, state in streams.items()}
    _restore_transports(run, saved)
    run._observer.rewind(run._position.next_index)
    run._observer.say(f"continues after step {run._position.next_index - 1}, from {saved.path}")
    return True


def _decode(saved: Saved, values: Any) -> Any:
    return decode_state(values, saved.load(tensor_names(values)))


def _restore_schedulers(run: Run, kept: list[list[Any]]) -> None:
    here = [len(trained.schedulers) for trained in run._trained]
    if here != [len(states) for states in kept]:
        raise CheckpointError(
            f"the checkpoint does not fit: it has {sum(map(len, kept))} schedulers, this run {sum(here)}. Give "
            "run.prepare the same schedulers as when it was saved."
        )
    for trained, states in zip(run._trained, kept):
        for scheduler, state in zip(trained.schedulers, states):
            scheduler.scheduler.load_state_dict(state)
            scheduler.count = count_steps(scheduler.scheduler)


def _compare_arguments(run: Run, saved: Saved) -> None:
    """Says what will not be as it was; raises UsageError where exact=True has promised that it will."""
    then, now = saved.values["run"]["arguments"], run._arguments.as_json()
    if run._exact:
        if then["micro_batch"] != now["micro_batch"]:
            raise UsageError(
                f"exact=True cannot continue with micro_batch={now['micro_batch']}: the checkpoint {saved.path} was made with "
                f"micro_batch={then['micro_batch']}. Give the same, or leave exact out."
            )
        differences = describe_differences(saved.values["run"].get("exact"), read_facts(run._entered()))
        if differences is not None:
            run._observer.say(f"from here the bits may differ from an undisturbed run's: {differences}")
    elif then["micro_batch"] != now["micro_batch"]:
        run._observer.say(
            f"the checkpoint was made with micro_batch={then['micro_batch']}, this run has {now['micro_batch']}: dropout masks "
            "and batch statistics change from here"
        )
    if then["global_batch"] != now["global_batch"]:
        run._observer.say(
            f"the checkpoint was made with global_batch={then['global_batch']}, this run has {now['global_batch']}: "
            "step numbers mean other samples from here"
        )


def load_weights(run: Run, path: Path, model: nn.Module | None, strict: bool) -> None:
    from instep.train.checkpoint.interchange import load_weights as load

    world, chosen = run._entered(), _which(run, model, "run.load_weights")
    name = next((str(number) for number, each in enumerate(run._models) if each is chosen), None)
    load(chosen, path, world, strict=strict, name=name, say=run._observer.say)


def export_weights(run: Run, path: Path, model: nn.Module | None) -> None:
    from instep.train.checkpoint.interchange import export

    average_all(run, "run.export")
    export(_which(run, model, "run.export"), path, run._entered())


def _which(run: Run, model: nn.Module | None, what: str) -> nn.Module:
    if model is not None:
        check_values(what, model)
        return model
    if len(run._models) != 1:
        raise UsageError(f"{what} needs model=: this run has prepared {len(run._models)} models, not one.")
    return run._models[0]


def _need_directory(run: Run, what: str) -> Checkpoints:
    if run._checkpoints is None:
        raise UsageError(f"{what} needs a place for checkpoints: give Run a dir, as Run(dir='runs/mine').")
    return run._checkpoints


def keep_step(run: Run) -> None:
    """Saves when it is time, stops when asked. When the loop goes on, so that the checkpoint has what the script
    noted after its update."""
    every, index = run._arguments.checkpoint_every, run._position.next_index
    if every is not None and index % every == 0 and run._saved_index != index:
        save(run, None, None)
    elif run._checkpoints is not None:
        between_saves(run)
    if run._stop_agreed:
        _stop(run)


def _stop(run: Run) -> None:
    index = run._position.next_index
    if run._checkpoints is not None:
        run._checkpoints.wait()  # raises why the last save failed, on every rank
        if run._saved_index != index:
            save(run, None, None)
        run._checkpoints.wait()  # now, while all ranks are here: leaving by an exception waits for no one
    kept = "saved" if run._checkpoints is not None else "nothing saved, since Run has no dir"
    run._observer.say(f"asked to stop (SIGTERM): {kept} after step {index - 1}, all ranks end")
    raise SystemExit(143)
