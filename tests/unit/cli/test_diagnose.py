"""`instep diagnose` on folders that hold a run, and on those that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instep.cli import diagnose
from instep.errors import UsageError
from instep.launch.probe.page import open_page
from instep.records.finding import Finding
from instep.records.run_dir import RunDir


def make_run(path: Path) -> None:
    (path / "rank0").mkdir(parents=True)
    open_page(path / "rank0" / "page.bin", 0, 1)


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no run directory '.*nothing'\. Runs are kept in runs/"):
        diagnose.run([str(tmp_path / "nothing")])


def test_a_folder_without_ranks_says_which_one_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no files of ranks .* Give the folder that `instep run` names"):
        diagnose.run([str(tmp_path)])


def test_what_the_launcher_saw_is_said_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    killed = Finding("crash/signal", "rank 0 was killed by SIGKILL", "Someone killed it.", (), (), "certain", (0,))
    RunDir(tmp_path).findings.write_text(json.dumps([killed.as_json()]))
    assert diagnose.run([str(tmp_path)]) == 0
    assert "certain: rank 0 was killed by SIGKILL  [crash/signal]" in capsys.readouterr().out


def test_the_training_folder_leads_to_the_launchers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "launch")
    (tmp_path / "train").mkdir()
    RunDir(tmp_path / "train").name_peer(tmp_path / "launch")
    assert diagnose.run([str(tmp_path / "train"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
