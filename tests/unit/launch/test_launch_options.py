"""The option table of `instep run` against torchrun's own parser, and what it says of mistakes."""

from __future__ import annotations

import argparse

import pytest

from instep.errors import UsageError
from instep.launch.help import HELP
from instep.launch.options import OUR_OPTIONS, TORCH_OPTIONS, parse
from instep.records.launch_spec import Program

COMMAND_LINES = (
    ["train.py"],
    ["--nproc-per-node", "4", "train.py", "--nproc-per-node", "9", "-m"],
    ["--nproc_per_node=auto", "--standalone", "train.py"],
    [
        "--nnodes",
        "1:4",
        "--rdzv-backend",
        "c10d",
        "--rdzv_endpoint=h:1",
        "--rdzv-id",
        "7",
        "--rdzv-conf",
        "a=b",
        "t.py",
    ],
    ["-m", "package.train", "--x=1"],
    ["--module", "package.train"],
    ["--no-python", "echo", "-n", "hi"],
    ["--run-path", "/abs/train.py"],
    ["-r", "3", "-t3", "--log-dir", "/tmp/x", "t.py"],
    ["-r=0:1,1:2", "--tee=0:3", "--local-ranks-filter", "0,1", "t.py"],
    ["--max-restarts=3", "--monitor-interval", "0.5", "--role", "trainer", "t.py"],
    ["--node-rank", "1", "--master-addr", "h", "--master-port", "1234", "--local-addr", "10.0.0.1", "t.py"],
    ["--start-method", "fork", "--event-log-handler", "console", "--logs-specs", "x", "t.py"],
    ["--duplicate-stdout-filters", "a,,b,c", "--duplicate_stderr_filters=x", "t.py"],
    ["--numa-binding", "node", "--signals-to-handle", "SIGTERM", "--shutdown-timeout", "7", "t.py"],
    ["--virtual-local-rank", "--stand", "--max-r", "2", "t.py"],
    ["--", "train.py", "--", "x"],
)


@pytest.fixture(scope="module")
def torch_parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def test_every_option_of_torchrun_is_in_the_table(torch_parser: argparse.ArgumentParser) -> None:
    theirs = {frozenset(a.option_strings) for a in torch_parser._actions if a.option_strings and a.dest != "help"}
    assert {frozenset(option.flags) for option in TORCH_OPTIONS} == theirs


def test_arity_default_and_choices_are_torchruns(torch_parser: argparse.ArgumentParser) -> None:
    actions = {flag: action for action in torch_parser._actions for flag in action.option_strings}
    for option in TORCH_OPTIONS:
        action = actions[option.flags[0]]
        assert (option.convert is None) == (action.nargs == 0), option
        assert option.name == action.dest
        assert (list(option.default) if isinstance(option.default, tuple) else option.default) == action.default, option
        assert option.choices == tuple(action.choices or ()), option


@pytest.mark.parametrize("words", COMMAND_LINES, ids=lambda words: " ".join(words))
def test_reads_a_command_line_as_torchrun_does(words: list[str], torch_parser: argparse.ArgumentParser) -> None:
    theirs = vars(torch_parser.parse_args(words))
    ours = parse(words)
    assert ours.program is not None
    assert [ours.program.target, *ours.program.args] == [
        theirs.pop("training_script"),
        *theirs.pop("training_script_args"),
    ]
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in ours.torch.items()} == theirs


@pytest.mark.parametrize("words", COMMAND_LINES, ids=lambda words: " ".join(words))
def test_passes_on_words_that_mean_the_same(words: list[str], torch_parser: argparse.ArgumentParser) -> None:
    ours = parse(["--run-dir", "x", *words])
    assert ours.program is not None
    again = torch_parser.parse_args([*ours.words, "--", ours.program.target, *ours.program.args])
    assert vars(again) == vars(torch_parser.parse_args(words))


def test_reads_variables_as_torchrun_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    for name, value in {
        "PET_NPROC_PER_NODE": "3",
        "PET_STANDALONE": "1",
        "PET_MAX_RESTARTS": "2",
        "PET_MODULE": "0",
    }.items():
        monkeypatch.setenv(name, value)
    theirs = vars(get_args_parser().parse_args(["t.py"]))
    ours = parse(["t.py"]).torch
    assert {name: ours[name] for name in ("nproc_per_node", "standalone", "max_restarts", "module")} == {
        "nproc_per_node": theirs["nproc_per_node"],
        "standalone": theirs["standalone"],
        "max_restarts": theirs["max_restarts"],
        "module": theirs["module"],
    }
    assert (ours["nproc_per_node"], ours["standalone"], ours["max_restarts"], ours["module"]) == ("3", True, 2, False)


def test_n_is_short_for_nproc_per_node() -> None:
    assert [parse(words, {}).torch["nproc_per_node"] for words in (["-n", "4", "t.py"], ["-n4", "t.py"])] == ["4", "4"]


def test_keeps_our_options_apart() -> None:
    parsed = parse(
        [
            "--set",
            "seed=1",
            "--no-watch",
            "--set=micro_batch=4",
            "-n",
            "2",
            "--on-stall",
            "stop",
            "-m",
            "a.b",
            "--set",
            "x",
        ],
        {},
    )
    assert parsed.ours["set"] == ["seed=1", "micro_batch=4"]
    assert (parsed.ours["no_watch"], parsed.ours["on_stall"], parsed.ours["stall_after"]) == (True, "stop", None)
    assert parsed.words == ("--nproc-per-node=2", "-m")
    assert parsed.program == Program("module", "a.b", ("--set", "x"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nprocs", "2", "t.py"], "--nprocs is not an option of `instep run`. Did you mean -n?"),
        (["--max-restart=2x", "t.py"], "--max-restart has to be a whole number, but is '2x'."),
        (["--on-stall", "die", "t.py"], "--on-stall cannot be 'die'. Allowed: report, stop."),
        (["--rdzv", "x", "t.py"], "--rdzv could mean --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf."),
        (["-n"], "-n needs a value after it, as in `-n 2`."),
        (["-n", "--standalone", "t.py"], "-n needs a value after it, as in `-n 2`."),
        (["--standalone=1", "t.py"], "--standalone takes no value, but was given '1'. Write it alone."),
        (["--no-wach", "t.py"], "--no-wach is not an option of `instep run`. Did you mean --no-watch?"),
        (["-m", "--no-python", "x"], "-m runs a Python module and --no-python a command that is none"),
    ],
)
def test_says_what_is_wrong_with_a_command_line(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words, {})
    assert text in str(caught.value)


def test_names_the_variable_that_is_wrong() -> None:
    with pytest.raises(UsageError, match="the variable PET_MAX_RESTARTS has to be a whole number, but is 'x'"):
        parse(["t.py"], {"PET_MAX_RESTARTS": "x"})


def test_help_names_every_option() -> None:
    words = set(HELP.replace(",", " ").split())
    missing = [option.flags for option in (*TORCH_OPTIONS, *OUR_OPTIONS) if not words & set(option.flags)]
    assert missing == [("-h", "--help")]


def test_help_fits_a_terminal() -> None:
    assert max(map(len, HELP.splitlines())) <= 125
