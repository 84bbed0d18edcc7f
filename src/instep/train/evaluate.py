"""`run.evaluate`: batches of an evaluation, with the models in eval mode and no gradients, both put back after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from instep.errors import UsageError
from instep.train import seeds
from instep.train.call_arguments import show
from instep.train.data.loader import Loader
from instep.train.reduce.shard_reducer import ShardReducer
from instep.train.techniques.local_sgd import average_all

if TYPE_CHECKING:
    from instep.train.run import Run

_STREAM = 1 << 32  # keeps the random numbers of evaluations apart from those of training


def evaluation_batches(run: Run, loader: Loader) -> Iterator[Any]:
    if not isinstance(loader, Loader):
        raise UsageError(f"run.evaluate got {show(loader)}; it takes what run.loader(...) returns.")
    return _batches(run, loader)


def _batches(run: Run, loader: Loader) -> Iterator[Any]:
    average_all(run, "run.evaluate")
    generators = seeds.get_generators()
    modes = [(module, module.training) for model in run._models for module in model.modules()]
    gradients = torch.is_grad_enabled()
    epoch = loader.start_epoch(0)
    for model in run._models:
        model.eval()
    torch.set_grad_enabled(False)
    run._evaluating = True
    number = 0
    sharded = [trained.reducer for trained in run._trained if isinstance(trained.reducer, ShardReducer)]
    stages = [pipeline.sharded for pipeline in run._pipelines if pipeline.sharded is not None]
    try:
        for held in stages:
            held.gather()
        while (own := epoch.has_next()) or run._is_sharded:
            batches = epoch.next_step() if own else ()
            turns = _agree_on_turns(run, len(batches))
            if run._is_sharded and not turns:
                break
            for batch in batches:
                for reducer in sharded:
                    reducer.begin_evaluation()
                seeds.set_generators(seeds.FORWARD, run._seed, _STREAM + number, batch.slot)
                yield batch.data
            number += 1
            for reducer in sharded:
                for _ in range(turns - len(batches)):
                    reducer.replay_forward()
    finally:
        for reducer in sharded:
            reducer.end_evaluation()
        for held in stages:
            held.scatter()
        run._evaluating = False
        torch.set_grad_enabled(gradients)
        for module, training in modes:
            module.training = training
        epoch.close()
        seeds.restore_generators(generators)


def _agree_on_turns(run: Run, own: int) -> int:
    """Sharded models gather parameters in forward, so ranks with fewer batches run along: how many turns there are."""
    return max(run._entered().gather_objects(own, "a step of run.evaluate")) if run._is_sharded else own
