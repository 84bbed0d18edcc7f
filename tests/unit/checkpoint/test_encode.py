"""State of any shape goes to JSON and tensors and comes back; what cannot is named."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy
import pytest
import torch

from instep.errors import CheckpointError, UsageError
from instep.train.checkpoint.encode import decode_state, encode_state, tensor_names


def there_and_back(value: object) -> Any:
    tensors, encoded = encode_state(value, "x")
    return decode_state(json.loads(json.dumps(encoded, allow_nan=False)), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        math.inf,
        -math.inf,
        "text",
        [1, [2.5, None]],
        (1, (2, "a")),
        {"a": 1, "b": {"c": [1]}},
        {1: "a", (2, 3): "b", None: 0, False: 1},
        {"$tensor": "not one"},
        {"$": 1},
        {1, 2},
        frozenset({"a"}),
        deque([1, 2], maxlen=4),
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({30: 1, 60: 2}),
        1 + 2j,
        b"\x00\xff",
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cpu"),
        numpy.float32(0.1),
        numpy.int64(-5),
        numpy.bool_(True),
    ],
)
def test_comes_back_equal_and_of_the_same_type(value: object) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_comes_back() -> None:
    assert math.isnan(there_and_back(math.nan))


def test_types_inside_a_dict_keep() -> None:
    back = there_and_back({True: 1, 2: 1})
    assert {type(key) for key in back} == {bool, int}


def test_maxlen_of_a_deque_keeps() -> None:
    assert there_and_back(deque([1], maxlen=7)).maxlen == 7


def test_tensors_and_arrays_come_back_and_are_named_by_their_place() -> None:
    value = {"a": [torch.arange(3), numpy.arange(4.0)], 1: torch.ones(1), "1": torch.zeros(1)}
    tensors, encoded = encode_state(value, "state")
    assert sorted(tensors) == ["state/1", "state/1~2", "state/a/0", "state/a/1"]
    assert sorted(tensor_names(encoded)) == sorted(tensors)
    back = decode_state(encoded, tensors)
    assert torch.equal(back["a"][0], torch.arange(3))
    assert isinstance(back["a"][1], numpy.ndarray)
    assert (back[1].item(), back["1"].item()) == (1.0, 0.0)


def test_default_dict_comes_back_as_a_dict() -> None:
    assert there_and_back(defaultdict(list, {"a": [1]})) == {"a": [1]}


def test_random_states_come_back() -> None:
    import random

    assert there_and_back(random.getstate()) == random.getstate()


def test_state_of_schedulers_comes_back() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    make = [
        lambda: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
        lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    ]
    for each in make:
        scheduler = each()
        assert there_and_back(scheduler.state_dict()) == scheduler.state_dict()


class Custom:
    pass


def test_other_objects_are_named_with_their_place() -> None:
    with pytest.raises(UsageError) as caught:
        encode_state({"best": [1, Custom()]}, "run.state")
    assert str(caught.value).startswith("run.state/best/1 is a ")
    assert "Custom, which a checkpoint cannot hold. It holds numbers, strings" in str(caught.value)


def test_an_unknown_kind_or_a_lost_tensor_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"'\$future' is not a kind of value"):
        decode_state({"$future": 1}, {})
    with pytest.raises(CheckpointError, match="refers to a tensor 'gone' that it does not hold"):
        decode_state({"$tensor": "gone"}, {})
    with pytest.raises(CheckpointError, match="'load' is not a type of numbers"):
        decode_state({"$dtype": "load"}, {})
