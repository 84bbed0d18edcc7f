"""A micro-batch from its positions: samples are read from the dataset and collated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert

from instep.errors import UsageError
from instep.train.data.source import Source, is_default_collate

Fetch = Callable[[Any], Any]


def choose_fetch(source: Source, micro_batch: int) -> TensorFetch | SampleFetch | ItemFetch:
    if source.prebatched:
        return ItemFetch(source.dataset, source.collate_fn, micro_batch)
    if is_default_collate(source.collate_fn):
        found = find_tensors(source.dataset)
        if found is not None:
            return TensorFetch(*found)
    return SampleFetch(source.dataset, source.collate_fn)


def find_tensors(dataset: Any) -> tuple[Sequence[torch.Tensor], Sequence[int] | None] | None:
    """The tensors behind a dataset that is only a view of them, and the rows it shows (None: all in order).

    Exact types alone: a subclass may do anything in __getitem__.
    """
    rows: Any = None
    while type(dataset) is Subset:
        rows = dataset.indices if rows is None else [dataset.indices[row] for row in rows]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    return dataset.tensors, rows


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )


def collate_samples(samples: list[Any], collate_fn: Callable[[Any], Any] | None, which: str) -> Any:
    """which: names the samples in the sentence that default_collate's error becomes."""
    if not is_default_collate(collate_fn):
        assert collate_fn is not None
        return collate_fn(samples)
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        why = f"there is no key {error} in every sample" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{which} cannot be joined into a micro-batch: {why.rstrip('.')}. Give collate_fn= a function that joins a "
            "list of samples (by padding them, say), or make the samples alike."
        ) from error


def take_ready(item: Any, convert: Callable[[Any], Any] | None, micro_batch: int) -> tuple[int, Any]:
    """An item that is a batch already, and its size. Raises UsageError when that is more than a micro-batch."""
    data = (convert or default_convert)(item)
    count = count_samples(data)
    if count > micro_batch:
        raise UsageError(
            f"an item of the dataset is a batch of {count} samples, but micro_batch={micro_batch}: with "
            f"batch_size=None an item is one micro-batch. Set micro_batch={count} in Run, or let the dataset make "
            f"batches of at most {micro_batch}."
        )
    return count, data


def count_samples(data: Any) -> int:
    """Samples in a ready micro-batch: the length of its first tensor, array or list."""
    if isinstance(data, torch.Tensor):
        return data.shape[0] if data.dim() else 1
    if isinstance(data, dict):
        return count_samples(next(iter(data.values()))) if data else 0
    if isinstance(data, tuple) or (isinstance(data, list) and data and isinstance(data[0], torch.Tensor)):
        return count_samples(data[0]) if data else 0
    return len(data) if hasattr(data, "__len__") else 1


class TensorFetch:
    """Rows of a TensorDataset, by one index operation per tensor; the same bits as stacking its samples.

    Nothing here can draw random numbers, so no generator has to be set.
    """

    draws = False

    def __init__(self, tensors: Sequence[torch.Tensor], rows: Sequence[int] | None) -> None:
        self._tensors = tensors
        self._rows = None if rows is None else _read_rows(rows, len(tensors[0]))
        self._count = len(tensors[0]) if self._rows is None else len(self._rows)
        self._is_on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        self.pinned = False

    def __call__(self, positions: Any) -> tuple[int, list[torch.Tensor]]:
        if isinstance(positions, torch.Tensor):
            rows = positions
        elif isinstance(positions, range) and self._rows is None and not self.pinned:
            start, count = positions.start, len(positions)
            return count, [tensor.narrow(0, start, count).clone() for tensor in self._tensors]
        else:
            rows = _read_rows(positions, self._count)
        if self._rows is not None:
            rows = self._rows.index_select(0, rows)
        # A tensor of its own for each micro-batch, not a window on one of the whole step: the results of some kernels
        # depend on where in memory their input begins, and the step's beginning depends on the number of ranks.
        if self.pinned:
            return rows.numel(), [self._select_pinned(tensor, rows) for tensor in self._tensors]
        if self._is_on_cpu:
            return rows.numel(), [tensor.index_select(0, rows) for tensor in self._tensors]
        return rows.numel(), [tensor.index_select(0, rows.to(tensor.device)) for tensor in self._tensors]

    def _select_pinned(self, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Into page-locked memory at once, so that the copy to the device need not be waited for."""
        if tensor.device.type != "cpu":
            return tensor.index_select(0, rows.to(tensor.device))
        out = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
        return torch.index_select(tensor, 0, rows, out=out)


def _read_rows(rows: Any, count: int) -> torch.Tensor:
    read = torch.as_tensor(rows, dtype=torch.int64)
    return torch.where(read < 0, read + count, read)  # as indexing does, from the end


class SampleFetch:
    """Samples one by one, or at once by the dataset's __getitems__, then collated."""

    draws = True

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any] | None) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn

    def __call__(self, positions: Any) -> tuple[int, Any]:
        rows: list[Any] = positions.tolist() if isinstance(positions, torch.Tensor) else list(positions)
        if getattr(self._dataset, "__getitems__", None):  # torch's own fetcher decides in the same way
            samples = self._dataset.__getitems__(rows)
        else:
            samples = [self._dataset[row] for row in rows]
        return len(rows), collate_samples(samples, self._collate_fn, _name_samples(rows))


class ItemFetch:
    """One item of a dataset whose items are ready micro-batches."""

    draws = True

    def __init__(self, dataset: Any, convert: Callable[[Any], Any] | None, micro_batch: int) -> None:
        self._dataset = dataset
        self._convert = convert
        self._micro_batch = micro_batch

    def __call__(self, positions: Any) -> tuple[int, Any]:
        (row,) = positions.tolist() if isinstance(positions, torch.Tensor) else positions
        return take_ready(self._dataset[row], self._convert, self._micro_batch)


def _name_samples(rows: list[Any], most: int = 8) -> str:
    shown = ", ".join(map(str, rows[:most]))
    return f"the samples at positions {shown}{', ...' if len(rows) > most else ''} of the dataset"
