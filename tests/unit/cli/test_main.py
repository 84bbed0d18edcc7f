"""The command `instep`: dispatch, help, and mistakes as one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import instep
from instep.cli import main as cli
from instep.errors import CheckpointError

CLI = Path(cli.__file__).parent
NOT_COMMANDS = {"__init__", "main", "arguments"}


def test_every_file_of_a_command_has_a_row() -> None:
    files = {path.stem for path in CLI.glob("*.py")} - NOT_COMMANDS
    with_run = {name for name in files if "def run(argv" in (CLI / f"{name}.py").read_text(encoding="utf-8")}
    assert with_run <= set(cli.COMMANDS)
    assert with_run == set(cli.existing_commands())


def test_texts_name_only_commands_that_exist() -> None:
    absent = "|".join(sorted(set(cli.COMMANDS) - set(cli.existing_commands()))) or "(?!)"
    for path in CLI.parent.rglob("*.py"):
        named = re.findall(rf"instep (?:{absent})\b", path.read_text(encoding="utf-8"))
        assert not named, f"{path} speaks of {named}"


def test_help_lists_commands_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in cli.existing_commands():
        assert f"  {name} " in out
    assert "example: instep run -n 2 train.py" in out
    assert cli.main([]) == 0
    assert capsys.readouterr().out == out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"instep {instep.__version__}\n"


@pytest.mark.parametrize("name", cli.existing_commands())
def test_help_of_a_command_ends_with_an_example(capsys: pytest.CaptureFixture[str], name: str) -> None:
    try:
        code = cli.main([name, "--help"])
    except SystemExit as left:  # argparse leaves so
        code = left.code
    out = capsys.readouterr().out
    assert code == 0
    assert f"instep {name}" in out
    assert "example" in out.lower()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["setings"], "instep: 'setings' is not a command. Nearest: settings. See: instep --help\n"),
        (["train.py", "-x"], "instep: 'train.py' is not a command; to start a script: instep run train.py -x\n"),
        (["-n", "2"], "instep: '-n' is not a command; to start a script: instep run -n 2\n"),
        (["settings", "--jsn"],
         "instep: settings: unrecognized arguments: --jsn. See: instep settings --help\n"),
        (["explain", "a", "b"], "instep: explain: unrecognized arguments: b. See: instep explain --help\n"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_sentence_and_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr() == ("", sentence)


def test_an_error_of_ours_is_its_text_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(argv: list[str]) -> int:
        raise CheckpointError("there is no checkpoint in runs/x.")

    monkeypatch.setattr("instep.cli.settings.run", fail)
    assert cli.main(["settings"]) == 1
    assert capsys.readouterr().err == "instep: there is no checkpoint in runs/x.\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m instep settings | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.returncode == 0


def test_python_m_instep_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "instep", "nothing"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("instep: 'nothing' is not a command.")


def test_a_folder_without_a_program_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "-n", "2", str(tmp_path)]) == 2
    assert "is a directory without a __main__.py" in capsys.readouterr().err
