"""The script's command line for each number of processes."""

from __future__ import annotations

import pytest

from instep.errors import UsageError
from instep.records.launch_spec import Program
from instep.verify.divide import divide_arguments, program_for, read_divide, read_single


@pytest.mark.parametrize(
    ("given", "divided"),
    [
        (("--batch-size", "32", "--lr", "1"), ("--batch-size", "16", "--lr", "1")),
        (("--batch_size=32",), ("--batch_size=16",)),
        (("--lr", "1", "--batch-size=32"), ("--lr", "1", "--batch-size=16")),
        (("batch_size=32", "x"), ("batch_size=16", "x")),
    ],
)
def test_both_spellings_are_divided(given: tuple[str, ...], divided: tuple[str, ...]) -> None:
    for name in ("batch-size", "batch_size:int", "--batch-size"):
        assert divide_arguments(given, read_divide(name), 2) == divided


def test_a_float_is_divided_without_rounding() -> None:
    assert divide_arguments(("--tokens", "10"), read_divide("tokens:float"), 4) == ("--tokens", "2.5")


def test_an_argument_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(UsageError) as caught:
        divide_arguments(("--epochs", "3", "data"), read_divide("batch-size"), 2)
    assert str(caught.value) == (
        "--divide batch-size: the script's command line has no --batch-size to divide; its arguments here are --epochs. "
        "Give it with the value for one process, as in `train.py --batch-size 32`. A script that does not take its batch "
        "size as an argument needs no --divide: without it, the batch size of its DataLoaders is divided."
    )


@pytest.mark.parametrize(
    ("value", "ranks", "text"),
    [
        ("25", 2, "--divide batch-size: 25 cannot be divided by 2 processes. Nearest that can: 24, 26."),
        ("3", 4, "--divide batch-size: 3 cannot be divided by 4 processes. Nearest that can: 4."),
        ("many", 2, "--divide batch-size: its value 'many' is not a number (int)."),
    ],
)
def test_values_that_cannot_be_divided(value: str, ranks: int, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        divide_arguments(("--batch-size", value), read_divide("batch-size"), ranks)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("batch:text", "--divide batch:text: 'text' is no kind of number. Allowed: int, float."),
        ("--", "--divide '--' names no argument. Write it as in --divide batch-size."),
    ],
)
def test_what_divide_cannot_mean(given: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_divide(given)
    assert str(caught.value) == text


def test_another_command_line_for_one_process() -> None:
    assert read_single("python3 train.py --batch 64") == Program("script", "train.py", ("--batch", "64"))
    assert read_single("-m pack.train x") == Program("module", "pack.train", ("x",))
    with pytest.raises(UsageError, match="--single names no script"):
        read_single("python")
    with pytest.raises(UsageError, match="is not a command line: No closing quotation"):
        read_single("train.py 'a")


def test_each_size_gets_its_program() -> None:
    program = Program("script", "train.py", ("--batch-size", "8"))
    divided, single = read_divide("batch-size"), read_single("single.py")
    assert program_for(program, 1, None, single).target == "single.py"
    assert program_for(program, 2, None, single) == program
    assert program_for(program, 4, divided, None).args == ("--batch-size", "2")
