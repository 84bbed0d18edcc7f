"""What cannot be trained on is said in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from data_sources import Split, loader_of, tensors
from instep import UsageError


class Ragged(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(index + 1)


class Endless(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


class RaggedStream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        for index in range(40):
            yield {"a": 1} if index % 2 else {"b": 1}


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        list(loader_of(source, **options).start_epoch(0).next_step())
    return str(error.value)


def test_an_empty_dataset() -> None:
    expected = "the dataset given to run.loader is empty (length 0). Check the path or filter that made it."
    assert refusal(TensorDataset(torch.zeros(0, 3))) == expected
    assert refusal([]) == expected
    assert refusal(DataLoader(TensorDataset(torch.zeros(0)), 2)) == expected
    assert refusal(DataLoader(tensors(), 2, sampler=[])) == expected.replace("dataset", "sampler")


def test_a_dataset_that_drop_last_leaves_without_a_step() -> None:
    assert refusal(TensorDataset(torch.zeros(10)), drop_last=True) == (
        "the dataset has 10 samples, fewer than global_batch=16, and drop_last=True drops the only step of an epoch. "
        "Leave drop_last out, or set global_batch to at most 10."
    )


def test_a_dataset_without_a_length() -> None:
    assert refusal(Endless()) == (
        "an Endless has __getitem__ but no __len__, so the end of an epoch is unknown. "
        "Add __len__, or give a DataLoader with a sampler."
    )


def test_samples_that_do_not_fit_together() -> None:
    assert refusal(Ragged()) == (
        "the samples at positions 0, 1 of the dataset cannot be joined into a micro-batch: stack expects each tensor "
        "to be equal size, but got [1] at entry 0 and [2] at entry 1. Give collate_fn= a function that joins a list "
        "of samples (by padding them, say), or make the samples alike."
    )


def test_samples_of_a_type_that_cannot_be_joined() -> None:
    text = refusal([object() for _ in range(40)], micro_batch=16)
    assert text.startswith("the samples at positions 0, 1, 2, 3, 4, 5, 6, 7, ... of the dataset cannot be joined")
    assert "found <class 'object'>" in text


def test_samples_of_a_stream_that_do_not_fit_together() -> None:
    assert refusal(RaggedStream(), micro_batch=4, global_batch=4).startswith(
        "the samples of stream 0 cannot be joined into a micro-batch: there is no key 'b' in every sample."
    )


def test_an_error_of_the_users_own_code_stays_as_it_is() -> None:
    def collate(samples: Any) -> Any:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        list(loader_of(tensors(), collate_fn=collate).start_epoch(0).next_step())


def test_what_is_no_dataset_at_all() -> None:
    assert refusal(5) == (
        "run.loader was given an int. Allowed: a dataset with __getitem__ and __len__, an iterable dataset, or a "
        "torch DataLoader."
    )
    assert refusal("data/") == refusal(5).replace("an int", "a str")
    assert refusal(Dataset).startswith("run.loader was given a type.")


def test_what_can_be_read_only_once() -> None:
    assert refusal(index for index in range(9)) == (
        "a generator given to run.loader can be read only once. "
        "Give a dataset, or an object whose __iter__ starts anew."
    )


def test_shuffling_an_iterable() -> None:
    assert refusal(Split(), shuffle=True) == (
        "shuffle=True cannot be had for a Split, which is only read from front to back. "
        "Shuffle inside its __iter__, or give a dataset with __getitem__ and __len__."
    )


@pytest.mark.parametrize("number", [-1, 1.5, True, "2"])
def test_a_number_of_workers_that_is_none(number: Any) -> None:
    assert refusal(tensors(), num_workers=number) == f"num_workers={number!r} has to be a whole number of at least 0."


def test_a_prefetch_factor_that_is_none() -> None:
    text = refusal(tensors(), num_workers=1, prefetch_factor=0)
    assert text == "prefetch_factor=0 has to be a whole number of at least 1."


def test_a_ready_batch_that_is_no_micro_batch() -> None:
    text = refusal(DataLoader([torch.zeros(3), torch.zeros(3)], batch_size=None))
    assert text == (
        "an item of the dataset is a batch of 3 samples, but micro_batch=2: with batch_size=None an item is one "
        "micro-batch. Set micro_batch=3 in Run, or let the dataset make batches of at most 2."
    )
