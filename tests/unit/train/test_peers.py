"""A run's two directories name each other, so that every command takes either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import instep
from instep.records.run_dir import RunDir, write_json


def test_directories_of_launcher_and_training_name_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, trained = tmp_path / "launched", tmp_path / "trained"
    launched.mkdir()
    write_json(RunDir(launched).launch, {})
    monkeypatch.setenv("INSTEP_RUN_DIR", str(launched))
    with instep.Run(global_batch=8, dir=trained):
        pass
    assert json.loads(RunDir(launched).peer.read_text()) == {"peer": str(trained)}
    assert json.loads(RunDir(trained).peer.read_text()) == {"peer": str(launched)}


def test_a_variable_without_a_launcher_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_RUN_DIR", str(tmp_path / "nowhere"))
    with instep.Run(global_batch=8, dir=tmp_path / "trained"):
        pass
    assert not RunDir(tmp_path / "trained").peer.exists()


def test_one_directory_for_both_is_no_peer_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(RunDir(tmp_path).launch, {})
    monkeypatch.setenv("INSTEP_RUN_DIR", str(tmp_path))
    with instep.Run(global_batch=8, dir=tmp_path):
        pass
    assert not RunDir(tmp_path).peer.exists()
