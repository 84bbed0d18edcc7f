"""What a script may pass to Run and run.loader by mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import instep

DATA = TensorDataset(torch.randn(8, 3))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dir": 5}, "dir=5 has to be the path of a directory, or None, which writes nothing."),
        ({"dir": ""}, "dir='' has to be the path of a directory"),
        ({"dir": "a\0b"}, "dir='a\\x00b' has to be the path of a directory"),
        ({"dir": b"runs"}, "dir=b'runs' has to be the path of a directory"),
        ({"exact": "yes"}, "exact='yes' has to be True or False."),
        ({"global_batch": 10**30}, f"global_batch={10**30} has to be at most 2147483647."),
    ],
)
def test_names_the_argument(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(instep.UsageError, match="^" + re.escape(text)):
        instep.Run(**{"global_batch": 4, **arguments})


def test_a_directory_may_be_a_path() -> None:
    instep.Run(global_batch=4, dir=Path("runs"))


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        (DATA, {"batch_size": 4}, "run.loader has no batch_size=. Samples per forward pass are Run(micro_batch=...)"),
        (DATA, {"sampler": [1]}, "run.loader has no sampler=. Give it to a DataLoader"),
        (DATA, {"shufle": True}, "run.loader has no shufle=. Allowed: shuffle, drop_last, collate_fn, num_workers"),
        ({"train": DATA, "test": DATA}, {}, "run.loader was given a dict with the keys 'train', 'test'"),
        ((torch.zeros(8, 3), torch.zeros(8, 1)), {}, "run.loader was given a tuple of 2 tensors with 8 rows each"),
    ],
)
def test_says_what_to_give(source: Any, options: dict[str, Any], text: str) -> None:
    with instep.Run(global_batch=4) as run, pytest.raises(instep.UsageError, match="^" + re.escape(text)):
        run.loader(source, **options)


def test_a_loader_is_no_dataset() -> None:
    with (
        instep.Run(global_batch=4) as run,
        pytest.raises(instep.UsageError, match=re.escape("what run.loader has returned")),
    ):
        run.loader(run.loader(DATA))


@pytest.mark.parametrize(
    "source", [{i: DATA[i] for i in range(8)}, [torch.zeros(3), torch.ones(3)], [torch.zeros(3)] * 8]
)
def test_samples_in_a_dict_or_a_list_are_a_dataset(source: Any) -> None:
    with instep.Run(global_batch=2) as run:
        run.loader(source)
