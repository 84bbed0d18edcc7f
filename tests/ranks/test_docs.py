"""The tutorial's scripts do what the tutorial says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial" / "first-run.md"


def read_scripts() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def run(folder: Path, *command: str, code: int = 0) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def last_loss(folder: Path) -> float:
    line = (folder / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(line)["loss"]


def test_tutorial_comes_to_the_same_loss_on_one_two_and_three_processes(tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    for folder in (one, several):
        folder.mkdir()
        (folder / "train.py").write_text(read_scripts()[0])
    run(one, "train.py", "6")
    run(several, "-m", "instep", "run", "-n", "2", "train.py", "5")
    said = run(several, "-m", "instep", "run", "-n", "3", "train.py", "6")
    assert "continues after step 99" in said
    assert last_loss(several) == pytest.approx(last_loss(one), rel=1e-5)


def test_tutorial_shows_the_finding_that_its_broken_script_gives(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(read_scripts()[1])
    said = run(tmp_path, "-m", "instep", "run", "-n", "2", "--stall-after", "4", "ddp.py", code=124)
    shown = re.findall(r"^certain: .*$", TUTORIAL.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(shown) == 1
    assert shown[0] in said.splitlines()


def consoles(text: str) -> list[tuple[str, list[str]]]:
    """Commands of the console blocks, and what is printed under each."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((re.sub(r"\s{2,}#.*", "", line[2:]), []))
            else:
                found[-1][1].append(line)
    return found


def masked(line: str) -> str:
    """Numbers, and what follows from them, may be others elsewhere."""
    return re.sub(r"\d[\d,.]*(?:e[+-]?\d+)?", "#", re.sub(r"/\S+/(?=\w+\.py)", "", line)).rstrip()


def is_progress(line: str) -> bool:
    """A line that is printed when a second has passed."""
    return re.match(r"(?:\[#\] )?step #/# ", line) is not None


def play(folder: Path, command: str) -> tuple[str, int]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {"PATH": path}
    if command.startswith("python "):
        environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other are slow where the cores are busy
    done = subprocess.run(
        f"exec {command}", shell=True, cwd=folder, env=environ, text=True, timeout=300, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout, done.returncode


def assert_printed(said: str, shown: list[str]) -> None:
    """Every line shown is printed, in this order."""
    lines = [masked(line) for line in said.splitlines()]
    for line in map(masked, shown):
        if line and line != "..." and not is_progress(line):
            assert line in lines, f"{line!r} is not printed after what comes before it:\n{said}"
            lines = lines[lines.index(line) + 1 :]


@pytest.mark.slow
def test_commands_of_the_tutorial_print_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(read_scripts()[0])
    (tmp_path / "ddp.py").write_text(read_scripts()[1])
    commands = consoles(TUTORIAL.read_text(encoding="utf-8"))
    assert len(commands) == 9
    for command, shown in commands:
        if not command.startswith("pip "):
            said, code = play(tmp_path, command)
            assert code == (124 if "ddp.py" in command else 0), said
            assert_printed(said, shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_commands_of_the_readme_print_what_it_shows(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(read_scripts()[0].replace("int(sys.argv[1])", "20"))
    (tmp_path / "ddp.py").write_text(read_scripts()[1])
    text = (TUTORIAL.parents[2] / name).read_text(encoding="utf-8")
    for command, shown in consoles(text):
        if command.startswith("instep "):
            said, code = play(tmp_path, command)
            assert code == (124 if "ddp.py" in command else 0), said
            assert_printed(said, shown)
    table: list[str] = re.findall(r"^\| `(instep [^`]+)`", text, flags=re.MULTILINE)
    assert len(table) >= 6
    names: dict[str, str] = {"RUN_DIR": "runs/digits", "DIR": "runs/digits", "ID": "hang/some-ranks-only"}
    for command in table:
        said, code = play(tmp_path, " ".join(names.get(word, word) for word in command.split()))
        assert code == 0, f"{command}: {said}"
