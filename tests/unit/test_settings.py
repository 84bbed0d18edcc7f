"""Argument beats variable beats pyproject.toml beats default; a mistake is one sentence with the place and the cure."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import instep.settings as settings
from instep.cli.settings import run as run_command
from instep.errors import UsageError
from instep.overrides import RUN_ARGUMENTS, read_override

TRAIN_RUN = Path(settings.__file__).parent / "train" / "run.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as working directory, and no variables of ours."""
    monkeypatch.chdir(tmp_path)
    for row in settings.ROWS:
        monkeypatch.delenv(row.variable, raising=False)
    return tmp_path


def write_project(folder: Path, table: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(f"[tool.instep]\n{table}\n")
    return path


def test_default_comes_last(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.read_setting("stall_after").source == "default"
    assert settings.read_setting("stall_after").value == 30.0
    path = write_project(elsewhere, "stall-after = 45")
    assert settings.read_setting("stall_after").source == str(path)
    assert settings.read_setting("stall_after").value == 45.0
    monkeypatch.setenv("INSTEP_STALL_AFTER", "2min")
    assert settings.read_setting("stall_after").source == "INSTEP_STALL_AFTER"
    assert settings.read_setting("stall_after").value == 120.0
    assert settings.read_setting("stall_after", 7.0).source == "argument"
    assert settings.read_setting("stall_after", 7.0).value == 7.0


def test_project_file_is_found_above(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(elsewhere, "watch = false")
    inner = elsewhere / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert settings.read_setting("watch").value is False


@pytest.mark.parametrize("table", ["trackers = ['tensorboard', 'mlflow']", "trackers = 'tensorboard, mlflow'"])
def test_several_trackers_may_be_named(elsewhere: Path, table: str) -> None:
    write_project(elsewhere, table)
    assert settings.read_setting("trackers").value == ["tensorboard", "mlflow"]


def test_a_false_argument_beats_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_FORK", "1")
    assert settings.read_setting("fork", False).value is False


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        (
            "INSTEP_WATCH",
            "maybe",
            "INSTEP_WATCH: 'maybe' is not a switch; allowed: 1, true, yes, on, 0, false, no, off.",
        ),
        ("INSTEP_ON_STALL", "die", "INSTEP_ON_STALL: 'die' is not possible; allowed: report, stop."),
        ("INSTEP_STALL_AFTER", "0", "INSTEP_STALL_AFTER: '0' has to be longer than no time at all."),
        ("INSTEP_SET", "[1]", 'INSTEP_SET: \'[1]\' has to be a JSON object of texts, as {"micro_batch": "4"}.'),
    ],
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, sentence: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError) as caught:
        settings.read_all()
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("stall = 3", "{path}: [tool.instep] has no setting 'stall'. Nearest: on-stall, stall-after."),
        ("on-stall = 'die'", "{path}: on-stall: 'die' is not possible; allowed: report, stop."),
        ("watch = []", "{path}: watch = [] has to be a text, a number, true or false."),
    ],
)
def test_a_bad_project_file_is_named(elsewhere: Path, table: str, sentence: str) -> None:
    path = write_project(elsewhere, table)
    with pytest.raises(UsageError) as caught:
        settings.read_all()
    assert str(caught.value) == sentence.format(path=path)


def test_a_project_file_that_is_no_toml_is_named(elsewhere: Path) -> None:
    path = write_project(elsewhere, "watch =")
    with pytest.raises(UsageError, match=r"is not valid TOML: .* Mend it, or start from another folder\.") as caught:
        settings.read_all()
    assert str(caught.value).startswith(str(path))


def test_set_replaces_arguments_of_run_by_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"micro_batch": "4", "clip_norm": "none", "exact": "true", "clip_value": "0.5", "dir": "runs/x"}
    monkeypatch.setenv("INSTEP_SET", json.dumps(texts))
    arguments = {"global_batch": 64, "micro_batch": 8, "clip_norm": 1.0}
    assert settings.overrides() == texts
    assert settings.override_run_arguments(arguments) == {
        "global_batch": 64, "micro_batch": 4, "clip_norm": None, "exact": True, "clip_value": 0.5, "dir": "runs/x",
    }  # fmt: skip
    assert arguments["micro_batch"] == 8


def test_without_set_arguments_stay() -> None:
    assert settings.override_run_arguments({"global_batch": 64}) == {"global_batch": 64}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("micro_bach", "4", "--set micro_bach=4: instep.Run has no argument 'micro_bach'. Allowed: global_batch,"),
        ("micro_batch", "four", "--set micro_batch=four: 'four' is not a whole number."),
        ("clip_norm", "x", "--set clip_norm=x: 'x' is not a number."),
        ("exact", "1", "--set exact=1: '1' is not possible; allowed: true, false."),
        ("global_batch", "none", "--set global_batch=none: 'none' is not a whole number."),
    ],
)  # fmt: skip
def test_a_bad_set_is_named(name: str, text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_override(name, text)
    assert str(caught.value).startswith(sentence)


@pytest.mark.skipif(not TRAIN_RUN.is_file(), reason="instep.Run is not there")
def test_set_knows_exactly_the_arguments_of_run() -> None:
    tree = ast.parse(TRAIN_RUN.read_text(encoding="utf-8"))
    run = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run")
    init = next(node for node in run.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert {argument.arg for argument in init.args.kwonlyargs} == RUN_ARGUMENTS.keys()


def test_command_shows_value_and_source(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_ON_STALL", "stop")
    monkeypatch.setenv("INSTEP_ON_STAL", "stop")
    assert run_command([]) == 0
    out = capsys.readouterr().out
    assert 'on_stall = "stop"  (from: INSTEP_ON_STALL)' in out
    assert "stall_after = 30.0  (from: default)" in out
    assert "INSTEP_ON_STAL is set, but no setting reads it; those that exist: INSTEP_RUN_DIR, " in out


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [row.name for row in settings.ROWS]
    assert all(row["source"] == "default" and row["value"] == row["default"] for row in rows)
