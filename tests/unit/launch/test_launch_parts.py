"""Small parts of the launcher: variables, logs, meeting of nodes, channel, files of a run."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from instep.cli.run import make_run_dir, read_overrides, read_profile
from instep.errors import UsageError
from instep.launch import channel
from instep.launch.local import needs_agent, open_store
from instep.launch.logs import plan_logs, read_streams
from instep.launch.meeting import check_meeting, describe_waiting, read_nodes
from instep.launch.options import parse
from instep.launch.worker_env import choose_threads, count_cores, local_variables, our_variables
from instep.records.launch_spec import Program


def options(*words: str) -> dict[str, Any]:
    return parse([*words, "t.py"], {}).torch


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (Program("script", "examples/train.py"), "train"),
        (Program("module", "package.train"), "train"),
        (Program("command", "/bin/echo"), "echo"),
        (Program("script", "folder/"), "folder"),
    ],
)
def test_a_program_has_a_short_name(program: Program, name: str) -> None:
    assert program.short_name == name


def test_one_machine_needs_no_agent() -> None:
    assert not any(
        needs_agent(options(*words), {}) for words in ([], ["--standalone"], ["--master-port", "1"], ["--nnodes=1"])
    )


@pytest.mark.parametrize(
    "words", [["--nnodes", "2"], ["--nnodes", "1:2"], ["--rdzv-backend", "c10d"], ["--logs-specs", "x"]]
)
def test_a_meeting_needs_the_agent(words: list[str]) -> None:
    assert needs_agent(options(*words), {})


def test_virtual_local_rank_shows_one_device() -> None:
    def variables(environ: dict[str, str], rank: int) -> dict[str, str]:
        wanted = options("--virtual-local-rank")
        return local_variables(
            wanted, local_rank=rank, num_ranks=2, address=("h", 1), run_id="x", restart=0, environ=environ
        )

    seen = variables({"CUDA_VISIBLE_DEVICES": "4,6"}, 1)
    assert (seen["LOCAL_RANK"], seen["CUDA_VISIBLE_DEVICES"]) == ("0", "6")
    assert variables({}, 1)["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(
        UsageError, match=r"local rank 1 has no device: CUDA_VISIBLE_DEVICES=4 names 1. Start at most 1"
    ):
        variables({"CUDA_VISIBLE_DEVICES": "4"}, 1)


def test_overrides_travel_as_an_object_of_texts() -> None:
    assert our_variables("/r", {"seed": "1"}) == {"INSTEP_RUN_DIR": "/r", "INSTEP_SET": '{"seed": "1"}'}
    assert our_variables("/r", {}) == {"INSTEP_RUN_DIR": "/r"}


def test_threads_share_the_cores() -> None:
    assert choose_threads(1, {}) is None
    assert choose_threads(2, {"OMP_NUM_THREADS": "3"}) is None
    assert choose_threads(1000, {}) == 1
    assert choose_threads(2, {}) == max(1, count_cores() // 2)


def test_streams_are_chosen_for_all_or_by_rank() -> None:
    assert read_streams("--tee", "3", 2) == {0: 3, 1: 3}
    assert read_streams("--tee", "0:1,1:2", 2) == {0: 1, 1: 2}
    with pytest.raises(UsageError, match=r"--tee has to be 0, 1, 2 or 3, or pairs of local rank and that.*but is '4'"):
        read_streams("--tee", "4", 2)


def test_log_files_lie_where_torchrun_puts_them(tmp_path: Path) -> None:
    plan = plan_logs(options("--log-dir", str(tmp_path), "-r", "1", "-t", "0:2"), 2, "id", "")
    files = plan.files(0, 0)
    assert Path(files["stdout"]).parts[-3:] == ("attempt_0", "0", "stdout.log")
    assert Path(files["tee_stderr"]).parts[-3:] == ("attempt_0", "0", "stderr.log")
    assert Path(files["stdout"]).parents[2].name.startswith("id_") and Path(files["stdout"]).parents[3] == tmp_path


def test_nothing_is_made_without_log_options(tmp_path: Path) -> None:
    plan = plan_logs(options("--local-ranks-filter", "1"), 2, "id", str(tmp_path / "logs"))
    assert (plan.files(0, 0), plan.files(1, 0)) == ({"shown": False}, {"shown": True})
    assert not (tmp_path / "logs").exists()


def test_says_what_is_wrong_with_log_options(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=f"--log-dir {file} is a file. Name a folder"):
        plan_logs(options("--log-dir", str(file)), 1, "id", "")
    with pytest.raises(UsageError, match="--local-ranks-filter has to be numbers with commas, as in 0,1, but is 'a'"):
        plan_logs(options("--local-ranks-filter", "a"), 1, "id", "")


def test_numbers_of_nodes() -> None:
    assert (read_nodes("2"), read_nodes("1:4")) == ((2, 2), (1, 4))
    for text in ("x", "0", "3:2"):
        with pytest.raises(UsageError, match="--nnodes"):
            read_nodes(text)


def test_refuses_a_node_that_has_no_place() -> None:
    with pytest.raises(UsageError, match=r"--node-rank 2 is not one of 2 nodes \(--nnodes 2\). Allowed: 0 to 1."):
        check_meeting(options("--nnodes", "2", "--node-rank", "2", "--master-addr", "127.0.0.1"))


def test_refuses_a_second_node_without_an_address() -> None:
    with pytest.raises(
        UsageError, match="--nnodes 2 needs the address of node 0: --master-addr HOST --master-port PORT"
    ):
        check_meeting(options("--nnodes", "2", "--node-rank", "1"))


def test_names_a_host_without_an_address() -> None:
    with pytest.raises(
        UsageError, match=r"the host 'no-such-host.invalid' .of no-such-host.invalid:29500. has no address"
    ):
        check_meeting(options("--nnodes", "2", "--master-addr", "no-such-host.invalid"))


def test_names_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
        with pytest.raises(UsageError, match=f"node 0 cannot listen on port {port} .*Address already in use"):
            check_meeting(options(*words))
        with pytest.raises(
            UsageError, match=f"--master-port {port} cannot be used on this machine: Address already in"
        ):
            open_store(options("--master-port", str(port)))


def test_two_stores_never_share_a_port() -> None:
    first, one = open_store(options())
    second, other = open_store(options())
    with first, second:
        assert one[1] != other[1]


def test_tells_which_address_was_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        wanted = options("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
        assert f"127.0.0.1:{port} answers, but after 15 s fewer than 2 nodes have come there" in describe_waiting(
            wanted, 15
        )
    text = describe_waiting(wanted, 15)
    assert f"the first node cannot be reached at 127.0.0.1:{port} after 15 s: Connection refused" in text


def test_a_channel_carries_messages_and_files() -> None:
    ours, theirs = channel.open_channel()
    reader, writer = os.pipe()
    with ours, theirs:
        channel.send(ours, {"a": "x" * 100_000}, (writer,))
        channel.send(ours, {"b": 2})
        message, files = channel.receive(theirs)
        assert (len(message["a"]), len(files)) == (100_000, 1)
        os.write(files[0], b"through")
        assert os.read(reader, 100) == b"through"
        assert channel.receive(theirs) == ({"b": 2}, [])
        ours.close()
        with pytest.raises(channel.Closed):
            channel.receive(theirs)
    for file in (reader, writer, *files):
        os.close(file)


def test_overrides_are_checked_before_anything_starts() -> None:
    assert read_overrides(["seed=1", "seed=2", "dir=a=b"]) == {"seed": "2", "dir": "a=b"}
    with pytest.raises(UsageError, match=r"--set micro_batch: write it as NAME=VALUE"):
        read_overrides(["micro_batch"])
    with pytest.raises(UsageError, match=r"instep.Run has no argument 'batch'"):
        read_overrides(["batch=1"])
    with pytest.raises(UsageError, match=r"^--set parallel=zero4: parallel='zero4' is not a way to split a model"):
        read_overrides(["parallel=zero4"])


def test_a_range_of_steps() -> None:
    assert (read_profile("3:5"), read_profile(None)) == ((3, 5), None)
    with pytest.raises(
        UsageError, match="--profile has to be FIRST:LAST, two steps in order, as in 10:20, but is '5:3'"
    ):
        read_profile("5:3")


def test_every_run_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    roots = {make_run_dir(None, Program("script", "train.py")).root for _ in range(3)}
    assert len(roots) == 3
    assert all(root.parent == tmp_path / "runs" and root.name.startswith("train-") for root in roots)


def test_a_folder_that_cannot_be_made_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    run_dir = make_run_dir(str(tmp_path / "file" / "run"), Program("script", "train.py"))
    assert run_dir.root.is_dir() and run_dir.root.parent == tmp_path
    assert "cannot be written (Not a directory); this run's files are in" in capsys.readouterr().err
