"""What was passed to a collective, as it is noted and read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.launch.probe.collectives import _root
from instep.records.recording import DTYPES, Mark, pack_given


@pytest.mark.parametrize(("elements", "dtype", "root"), [(0, 0, -1), (7, 1, 0), (1 << 30, 5, 1023)])
def test_comes_back_as_it_was_packed(elements: int, dtype: int, root: int) -> None:
    mark = Mark("enter-collective", "broadcast", 0, 0, 0, 0, 0, pack_given(elements, dtype, root), 0.0)
    assert mark.given == (elements, DTYPES[dtype], None if root < 0 else root)


def test_every_type_that_is_named_is_one_of_torchs() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES if name)


@pytest.mark.parametrize(
    ("name", "args", "options", "root"),
    [
        ("broadcast", (None, 2), {}, 2),
        ("broadcast", (None,), {"src": 1}, 1),
        ("gather", (None, None, 3), {}, 3),
        ("gather", (None,), {}, 0),
        ("broadcast", (None,), {"group_src": 1}, 1),
        ("all_reduce", (None, 2), {}, -1),
    ],
)
def test_the_root_is_read_as_the_call_names_it(name: str, args: Any, options: dict[str, Any], root: int) -> None:
    assert _root(name, args, options) == root
