"""`instep verify`: bad usage is one sentence, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.cli import verify
from instep.errors import UsageError


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2", "x.py"], "-n 2: verify compares at least two numbers of processes, as in -n 1,2."),
        (["-n", "1,two", "x.py"], "-n 1,two: numbers of processes are whole numbers with commas between"),
        (["--steps", "0", "x.py"], "--steps 0 compares nothing. Give 1 or more."),
        (["--timeout", "0", "x.py"], "--timeout 0 leaves no time. Give the seconds that one run may take."),
        (["gone.py"], "there is no script 'gone.py'. Check the path; for a module use -m."),
        (["-n", "2,4", "--single", "x.py", "x.py"], "--single gives a command line for one process, but -n 2,4 has no"),
        (["--divide", "batch", "x.py"], "the script's command line has no --batch to divide; it has none here."),
        ([], "verify: the following arguments are required: script"),
    ],
)
def test_bad_usage(words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    with pytest.raises(UsageError) as caught:
        verify.run(words)
    assert text in str(caught.value)


def test_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.touch()
    with pytest.raises(UsageError, match="is not empty"):
        verify.run(["--run-dir", str(tmp_path), str(script)])
    assert script.exists()


def test_sizes_are_sorted() -> None:
    assert verify.read_sizes("4, 1,2,2") == [1, 2, 4]
