"""`instep.Run`: a training run on any number of processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from instep import settings
from instep.errors import RanksDisagree, UsageError
from instep.records.parallel import Parallel, fit
from instep.train import keeping, seeds
from instep.train.agree import agree
from instep.train.arguments import Arguments, read_arguments
from instep.train.buffers import Buffers
from instep.train.call_arguments import check_module, check_sendable, read_flag, read_number, read_path, show
from instep.train.checkpoint.store import Checkpoints
from instep.train.data.loader import Epoch, Loader, build_loader
from instep.train.evaluate import evaluation_batches
from instep.train.exactness import be_deterministic, check_exact_sizes
from instep.train.loop import loop_steps
from instep.train.mesh import data_place, lay_out
from instep.train.observe.observer import Observer
from instep.train.peers import name_peers
from instep.train.position import Position
from instep.train.precision import LossScale, read_precision
from instep.train.prepare import prepare_parts
from instep.train.read_outside import explain_read
from instep.train.slots import Slots, plan_slots
from instep.train.step import Step
from instep.train.techniques.block_options import read_block_options
from instep.train.techniques.pipeline.pipeline import Pipeline
from instep.train.totals import local_terms, mean_of, sum_of
from instep.train.update import Trained
from instep.train.world import World, join_world, leave_world


class Run:
    """Use as a context manager. See the arguments in the reference; every rank makes the same calls.

    global_batch, micro_batch: samples per step over all ranks, and per forward pass. checkpoint_every: steps.
    dir: where metrics and checkpoints go; None writes nothing. Raises UsageError for values that cannot be.
    """

    def __init__(
        self,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        parallel: Any = "ddp",
        precision: str = "fp32",
        exact: bool = False,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        compress: str | None = None,
        recompute: int | str | None = None,
        offload: bool = False,
        compile: bool = False,
        seed: int = 0,
        threads: int | None = None,
        dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
    ) -> None:
        given = {
            "global_batch": global_batch,
            "micro_batch": micro_batch,
            "parallel": parallel,
            "precision": precision,
            "exact": exact,
            "clip_norm": clip_norm,
            "clip_value": clip_value,
            "compress": compress,
            "recompute": recompute,
            "offload": offload,
            "compile": compile,
            "seed": seed,
            "threads": threads,
            "dir": dir,
            "checkpoint_every": checkpoint_every,
            "keep": keep,
        }
        self._arguments: Arguments = read_arguments(settings.override_run_arguments(given))
        self._state: dict[str, Any] = {}
        self._world: World | None = None
        self._evaluating = False
        self._stop_asked = False
        self._undo_deterministic: Callable[[], None] | None = None

    # -- begin and end

    def __enter__(self) -> Run:
        arguments = self._arguments
        self._world = world = join_world()
        try:
            self._begin(arguments, world)
        except BaseException:
            leave_world(world)
            raise
        return self

    def _begin(self, arguments: Arguments, world: World) -> None:
        split = fit(arguments.parallel, world.size)
        self._slots = self._plan_slots(split)
        agree(arguments.as_json(), world, "instep.Run", "arguments")
        if arguments.exact:
            check_exact_sizes(self._slots)
        self._observer = Observer(
            directory=arguments.dir,
            is_main=world.is_main,
            arguments=arguments.as_json(),
            trackers=settings.read_setting("trackers").value,
        )
        self._checkpoints: Checkpoints | None = None
        self._checkpoints = keeping.open_checkpoints(self)
        if world.is_main:
            name_peers(arguments.dir, settings.read_setting("run_dir").value)
        self._seed = arguments.seed
        self._exact = arguments.exact
        self._dtype = read_precision(arguments.precision)
        self._loss_scale = LossScale(arguments.precision == "fp16")
        self._clip_norm, self._clip_value = arguments.clip_norm, arguments.clip_value
        self._models: list[nn.Module] = []
        self._hooks: list[Any] = []  # on models
        self._trained: list[Trained] = []
        self._pipelines: list[Pipeline] = []
        self._loss_context: AbstractContextManager[None] | None = None
        self._group = world.new_group()
        self._lay_out(split)
        self._position = Position()
        self._calls = 0  # of run.steps
        self._step: Step | None = None
        self._epoch: Epoch | None = None
        self._loaders: WeakSet[Loader] = WeakSet()
        self._usual_updates = 0
        self._reference: float | None = None  # the weight that has factor 1, from the step before
        self._next_reference: float | None = None
        self._first_reference = arguments.micro_batch if arguments.exact else None  # None: slot 0's weight
        self._is_sharded = False
        self._spread_short_steps = False  # over all slots, for statistics over the global batch
        self._stop_agreed = False
        self._saved_index: int | None = None  # of the step after the last checkpoint
        self._choose_threads(arguments, world)
        seeds.set_generators(seeds.OUTSIDE, self._seed)
        for choice in arguments.chosen:
            self._observer.say(str(choice))
        self._observer.say(self._slots.describe())
        self._old_handler = None
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, self._ask_to_stop)

    def _plan_slots(self, split: Parallel) -> Slots:
        """Micro-batches are shared out over data ranks."""
        arguments = self._arguments
        return plan_slots(arguments.global_batch, arguments.micro_batch, *data_place(split, self._entered().rank))

    def _lay_out(self, split: Parallel) -> None:
        """Takes up a split of all ranks, before anything was prepared. Every rank must call it."""
        self._grid, self._slots = lay_out(split, self._entered()), self._plan_slots(split)
        data = self._grid.data
        self._data_group = self._group if data is self._world else data.new_group()
        self._buffers = Buffers(data, self._observer.say, self._slots.local if self._exact else None)

    def _split_losses(self) -> None:
        """From here to the end of the run, cross_entropy of outputs that lie in shares adds up over the ranks."""
        if self._loss_context is None:
            self._loss_context = loss_parallel()
            self._loss_context.__enter__()

    def _choose_threads(self, arguments: Arguments, world: World) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if arguments.exact:
            self._undo_deterministic = be_deterministic(arguments.threads)
        elif arguments.threads is not None:
            torch.set_num_threads(arguments.threads)
        elif world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, cores // world.local_size)
            torch.set_num_threads(threads)
            self._observer.say(f"threads={threads}: {cores} cores for {world.local_size} ranks (set Run(threads=...))")

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_asked = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Waits for the last save after a good end; after an exception no rank waits for another."""
        world = self._entered()
        try:
            if self._checkpoints is not None:
                keeping.close_checkpoints(self, failed=kind is not None)
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._old_handler or signal.SIG_DFL)
            self._observer.close()
            for loader in self._loaders:
                loader.close()
            for trained in self._trained:
                trained.close()
            for hook in self._hooks:
                hook.remove()
            if self._loss_context is not None:
                self._loss_context.__exit__(None, None, None)
            for pipeline in self._pipelines:
                pipeline.close()
            if world.meeting is not None:
                world.meeting.leave("the end of its run" if kind is None else f"the end of its run, by {kind.__name__}")
            if self._undo_deterministic is not None:
                self._undo_deterministic()
            leave_world(world)
            self._world = None
        told = explain_read(error, self._models) if error is not None else None
        if told is not None:
            raise told from error
        if kind is None and self._stop_asked:
            raise SystemExit(143)

    def _entered(self) -> World:
        if self._world is None:
            raise UsageError("This run is not open: use it inside `with instep.Run(...) as run:`.")
        return self._world

    # -- facts

    @property
    def rank(self) -> int:
        return self._entered().rank

    @property
    def world_size(self) -> int:
        return self._entered().size

    @property
    def is_main(self) -> bool:
        return self._entered().is_main

    @property
    def device(self) -> torch.device:
        return self._entered().device

    @property
    def state(self) -> dict[str, Any]:
        """What the script wants kept in checkpoints: numbers, text, tensors, and lists and dicts of such."""
        return self._state

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        if not isinstance(value, dict):
            raise UsageError(f"run.state got {show(value)}; it stays a dict: run.state['best'] = 0.9.")
        self._state = value

    # -- models and data

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        *,
        schedule_every: str = "step",
        sync_batch_norm: bool = False,
        parallel: Any = None,
        recompute: int | str | None = None,
        offload: bool | None = None,
        compile: bool | None = None,
    ) -> Any:
        """Makes a model, and what trains it, part of the run; returns the same objects. Every rank must call it.

        parallel, recompute, offload, compile: for this model, where it is not as Run was told.
        Raises UsageError for what cannot be trained, RanksDisagree when the ranks came with different models.
        """
        options = read_block_options(self._arguments, recompute, offload, compile)
        return prepare_parts(self, model, optimizer, scheduler, schedule_every, sync_batch_norm, parallel, options)

    def loader(self, source: Any, **options: Any) -> Loader:
        """Batches of a dataset, of an iterable one, or of a DataLoader, the same for every number of ranks.

        Options are DataLoader's: shuffle, drop_last, collate_fn, num_workers, pin_memory, persistent_workers,
        prefetch_factor, worker_init_fn, multiprocessing_context. len() of it: steps per epoch.
        """
        world = self._entered()
        loader = build_loader(
            source,
            slots=self._slots,
            seed=self._seed,
            device=world.device,
            local_size=world.local_size,
            say=self._observer.say,
            **options,
        )
        self._loaders.add(loader)
        return loader

    def steps(
        self, loader: Loader | None = None, *, epochs: int | None = None, steps: int | None = None
    ) -> Iterator[Step]:
        """Optimizer steps: over `epochs` of the loader, or `steps` of them, or `steps` without data (slot numbers)."""
        self._no_collective("run.steps")
        return loop_steps(self, loader, epochs, steps)

    def evaluate(self, loader: Loader) -> Iterator[Any]:
        """This rank's batches of a set in which every sample counts once over all ranks, in eval mode without gradients.

        Ranks may get different numbers of batches (none, too), so nothing collective may be called inside.
        """
        self._entered()
        return evaluation_batches(self, loader)

    # -- over ranks

    def mean(self, value: Any, weight: Any = 1) -> Any:
        """The mean over all ranks, weighted; value may be a list, one per batch, then weight too. Every rank calls it."""
        terms = self._meet_data("run.mean", local_terms("run.mean", value, weight))
        return mean_of([pair for rank in terms for pair in rank])

    def sum(self, value: Any) -> Any:
        """The sum over all ranks. Every rank must call it."""
        terms = self._meet_data("run.sum", local_terms("run.sum", value, 1))
        return sum_of("run.sum", [value for rank in terms for value, _ in rank])

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, in rank order, on every rank; of ranks that share their data, the first one's. Every rank must
        call it."""
        check_sendable("run.gather", value)
        return self._meet_data("run.gather", value)

    def schedule(self, value: float) -> None:
        """Steps ReduceLROnPlateau schedulers with a value that is equal on all ranks, as run.mean gives. Every rank."""
        number = read_number("run.schedule", value, "the number to go by, such as run.mean(loss, weight)")
        plateaus = [s for trained in self._trained for s in trained.schedulers if s.every == "value"]
        if not plateaus:
            raise UsageError(
                "run.schedule has nothing to step: give run.prepare(model, optimizer, scheduler) a ReduceLROnPlateau first. "
                "Other schedulers are stepped by step.update()."
            )
        values = self._meet("run.schedule", number)
        if len(set(map(repr, values))) > 1:  # NaN is equal to itself here
            listed = ", ".join(f"{value:g}" for value in values)
            raise RanksDisagree(
                f"run.schedule got different values on the ranks ({listed}): give it run.mean(value, weight)."
            )
        for plateau in plateaus:
            plateau.advance(number)

    def _meet_data(self, what: str, value: Any) -> list[Any]:
        """One value per data rank."""
        everyone = self._meet(what, value)
        return [everyone[rank] for rank in self._grid.one_per_data_rank()]

    def _meet(self, what: str, value: Any) -> list[Any]:
        self._no_collective(what)
        return self._entered().gather_objects(value, what)

    def _no_collective(self, what: str) -> None:
        self._entered()
        if self._evaluating:
            raise UsageError(
                f"{what} was called inside run.evaluate, where ranks have different numbers of batches: some would wait "
                "for ever. Collect values in the loop and call it after."
            )

    # -- checkpoints

    def save(self, metric: float | None = None, best: str | None = None) -> None:
        """Saves everything that was prepared, in the background. Every rank must call it."""
        self._no_collective("run.save")
        number = None if metric is None else read_number("run.save", metric, "the metric as a number")
        keeping.save(self, number, best)

    def restore(self, path: str | os.PathLike[str] = "latest") -> bool:
        """Continues from a checkpoint; False when there is none to continue from. Every rank must call it."""
        self._no_collective("run.restore")
        return keeping.restore(self, read_path("run.restore", path))

    def load_weights(self, path: str | os.PathLike[str], model: nn.Module | None = None, strict: bool = True) -> None:
        """Loads only weights, from any usual kind of file. model: which, when several were prepared."""
        self._no_collective("run.load_weights")
        check_module("run.load_weights", model)
        strict = read_flag("run.load_weights", "strict", strict)
        keeping.load_weights(self, read_path("run.load_weights", path), model, strict)

    def export(self, path: str | os.PathLike[str], model: nn.Module | None = None) -> None:
        """Writes one plain safetensors file with plain names. Every rank must call it."""
        self._no_collective("run.export")
        check_module("run.export", model)
        keeping.export_weights(self, read_path("run.export", path), model)

    # -- words

    def log(self, *unnamed: Any, **metrics: Any) -> None:
        """Adds numbers to this step's line in metrics.jsonl and to the trackers (rank 0's values)."""
        self._entered()
        if unnamed:
            raise UsageError(
                f"run.log got {show(unnamed[0])} without a name: write run.log(name=value), or run.log(**metrics) for a dict."
            )
        self._observer.log(metrics)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on rank 0."""
        self._entered()
        self._observer.print(*args, **kwargs)

    # -- for Step

    def _choose(self, optimizer: torch.optim.Optimizer | None, what: str) -> list[Trained]:
        self._no_collective(what)
        if not self._trained:
            raise UsageError(f"{what} has nothing to train: give an optimizer to run.prepare(model, optimizer) first.")
        if optimizer is None:
            return self._trained
        chosen = [trained for trained in self._trained if trained.optimizer is optimizer]
        if not chosen:
            raise UsageError(f"{what} got an optimizer that run.prepare did not take. Prepare it with its model first.")
        return chosen
