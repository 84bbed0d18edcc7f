"""What the user gave as data, read once: a dataset, an iterable or a DataLoader, and how it wants to be read."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from instep.errors import UsageError
from instep.train.slots import Slots

MOST_COLUMNS = 8  # tensors in a list that may be the columns of a dataset and not its samples


@dataclass(frozen=True)
class WorkerOptions:
    """The DataLoader's own arguments about processes; None: not given."""

    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    timeout: float = 0


@dataclass(frozen=True)
class Source:
    """sampler: gives positions; batch_sampler: gives lists of them, each a micro-batch; neither: our own order.

    prebatched: an item of the dataset is a ready micro-batch. collate_fn is None for torch's default.
    """

    dataset: Any
    is_stream: bool
    shuffle: bool = False
    drop_last: bool = False
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    prebatched: bool = False
    collate_fn: Callable[[Any], Any] | None = None
    workers: WorkerOptions = field(default_factory=WorkerOptions)


def read_source(
    given: Any,
    slots: Slots,
    say: Callable[[str], None],
    *,
    shuffle: bool | None,
    drop_last: bool,
    collate_fn: Callable[[Any], Any] | None,
    workers: WorkerOptions,
) -> Source:
    """Raises UsageError for what cannot be trained on."""
    _check_kind(given)
    if isinstance(given, DataLoader):
        if shuffle is not None or drop_last or collate_fn is not None:
            raise UsageError(
                "shuffle, drop_last and collate_fn belong to the DataLoader that run.loader was given. "
                "Set them there, or give run.loader the dataset itself."
            )
        source = _read_dataloader(given, slots, say)
        source = replace(source, workers=_override(source.workers, workers))
    else:
        is_stream = _is_stream(given)
        if is_stream and shuffle:
            raise UsageError(
                f"shuffle=True cannot be had for {_name(given)}, which is only read from front to back. "
                "Shuffle inside its __iter__, or give a dataset with __getitem__ and __len__."
            )
        source = Source(given, is_stream, bool(shuffle), bool(drop_last), collate_fn=collate_fn, workers=workers)
    _check_workers(source.workers)
    if not source.is_stream:
        check_size(source, slots)
    return source


def num_samples(source: Source) -> int | None:
    """Samples (or ready micro-batches) of an epoch; None when the sampler does not say."""
    if source.batch_sampler is not None:
        return None
    counted = source.dataset if source.sampler is None else source.sampler
    return length(counted)


def check_size(source: Source, slots: Slots) -> None:
    """Raises UsageError for an epoch without a single step."""
    if length(source.dataset) is None and source.sampler is None and source.batch_sampler is None:
        raise UsageError(
            f"{_name(source.dataset)} has __getitem__ but no __len__, so the end of an epoch is unknown. "
            "Add __len__, or give a DataLoader with a sampler."
        )
    count = num_samples(source)
    if count == 0 or length(source.dataset) == 0:
        what = "dataset" if length(source.dataset) == 0 else "sampler"
        raise UsageError(f"the {what} given to run.loader is empty (length 0). Check the path or filter that made it.")
    step_size = slots.count if source.prebatched else slots.global_batch
    if count is not None and source.drop_last and count < step_size:
        raise UsageError(
            f"the dataset has {count} samples, fewer than global_batch={slots.global_batch}, and drop_last=True drops "
            f"the only step of an epoch. Leave drop_last out, or set global_batch to at most {count}."
        )


def length(value: Any) -> int | None:
    """len(), or None where there is none; torch's Sampler and IterableDataset may raise from it."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def is_default_collate(collate_fn: Callable[[Any], Any] | None) -> bool:
    return collate_fn is None or collate_fn is default_collate


def _check_kind(given: Any) -> None:
    """What has the methods of a dataset, but whose items are no samples."""
    if isinstance(given, Mapping) and given and 0 not in given:
        keys = ", ".join(repr(key) for key in list(given)[:5])
        raise UsageError(
            f"run.loader was given {_name(given)} with the keys {keys}, which has no samples 0, 1, 2, ... "
            "Give it one of the values, such as data['train']."
        )
    if isinstance(given, tuple | list) and 0 < len(given) <= MOST_COLUMNS and all(map(_is_array, given)):
        lengths = {len(column) for column in given}
        if len(lengths) == 1 and lengths != {len(given)} and len({tuple(column.shape) for column in given}) > 1:
            raise UsageError(
                f"run.loader was given {_name(given)} of {len(given)} tensors with {lengths.pop()} rows each: those would "
                f"be {len(given)} samples. Give torch.utils.data.TensorDataset(*tensors), whose samples are the rows."
            )


def _is_array(value: Any) -> bool:
    return len(getattr(value, "shape", ())) > 0 and hasattr(value, "__getitem__")


def _is_stream(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return True
    if isinstance(dataset, Iterator) and not hasattr(dataset, "__dict__"):  # a generator, a zip, an open file
        raise UsageError(
            f"{_name(dataset)} given to run.loader can be read only once. "
            "Give a dataset, or an object whose __iter__ starts anew."
        )
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, str | bytes | type):
        return False
    if hasattr(dataset, "__iter__") and not isinstance(dataset, str | bytes | type):
        return True
    raise UsageError(
        f"run.loader was given {_name(dataset)}. Allowed: a dataset with __getitem__ and __len__, an iterable "
        "dataset, or a torch DataLoader."
    )


def _read_dataloader(loader: DataLoader[Any], slots: Slots, say: Callable[[str], None]) -> Source:
    workers = WorkerOptions(
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers if loader.num_workers else None,
        prefetch_factor=loader.prefetch_factor,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
    )
    source = Source(
        loader.dataset,
        isinstance(loader.dataset, IterableDataset),
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        workers=workers,
    )
    if source.collate_fn is default_collate:
        source = replace(source, collate_fn=None)
    if loader.batch_sampler is None:  # batch_size=None: an item is a ready batch
        collate_fn = None if loader.collate_fn is default_convert else loader.collate_fn
        source = replace(source, prebatched=True, collate_fn=collate_fn)
        return source if source.is_stream else _keep_sampler(source, loader.sampler, say)
    batches = loader.batch_sampler
    _check_batch_size(getattr(batches, "batch_size", None), slots)
    if source.is_stream:
        return source
    if type(batches) is BatchSampler:
        return _keep_sampler(replace(source, drop_last=batches.drop_last), batches.sampler, say)
    _check_whole(batches)
    return replace(source, batch_sampler=batches)


def _keep_sampler(source: Source, sampler: Any, say: Callable[[str], None]) -> Source:
    """Plain orders become ours, which is the same for every number of ranks; any other sampler is kept."""
    count = length(source.dataset)
    if type(sampler) is SequentialSampler and len(sampler) == count:
        return source
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == length(sampler.data_source) == count
    ):
        return replace(source, shuffle=True)
    if type(sampler) is DistributedSampler:
        say("the DataLoader's DistributedSampler is replaced: instep gives each rank its part of every step itself")
        return replace(source, shuffle=sampler.shuffle)
    _check_whole(sampler)
    return replace(source, sampler=sampler)


def _check_whole(sampler: Any) -> None:
    """A sampler that gives each rank its own part would be divided twice."""
    for part in (sampler, getattr(sampler, "sampler", None)):
        replicas = getattr(part, "num_replicas", 1)
        if isinstance(replicas, int) and replicas > 1:
            raise UsageError(
                f"the sampler {type(part).__name__} gives each rank a part of its own (num_replicas={replicas}), and "
                "instep would divide that part again. Give a sampler over the whole dataset (num_replicas=1, rank=0)."
            )


def _check_batch_size(batch_size: Any, slots: Slots) -> None:
    if isinstance(batch_size, int) and batch_size != slots.micro_batch:
        raise UsageError(
            f"the DataLoader has batch_size={batch_size}, but micro_batch={slots.micro_batch}: one of its batches is "
            f"one micro-batch. Give the DataLoader batch_size={slots.micro_batch}, or Run micro_batch={batch_size}."
        )


def _override(kept: WorkerOptions, given: WorkerOptions) -> WorkerOptions:
    changed = {name: value for name, value in vars(given).items() if value is not None and name != "timeout"}
    return replace(kept, **changed)


def _check_workers(workers: WorkerOptions) -> None:
    number = workers.num_workers
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
        raise UsageError(f"num_workers={number!r} has to be a whole number of at least 0.")
    context = workers.multiprocessing_context
    if isinstance(context, str) and context not in (allowed := multiprocessing.get_all_start_methods()):
        raise UsageError(
            f"multiprocessing_context={context!r} is no way to start processes here. Allowed: {', '.join(map(repr, allowed))}."
        )
    if context is not None and not isinstance(context, str) and not hasattr(context, "Process"):
        raise UsageError(
            f"multiprocessing_context={context!r} has to be a name such as 'spawn', or a context of multiprocessing."
        )
    factor = workers.prefetch_factor
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int) or factor < 1):
        raise UsageError(f"prefetch_factor={factor!r} has to be a whole number of at least 1.")


def _name(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
