"""A script under `instep run` is what it is under `python` and under torchrun."""

from __future__ import annotations

import json
import py_compile
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from instep.records.launch_spec import Program
from launching import SCRIPTS, Launcher, Watched

DIFFERS = {  # by their nature, between any two runs
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "OUT",
    "INSTEP_RUN_DIR",
    "INSTEP_TEST_MARK",
    "OMP_NUM_THREADS",
}


def read_facts(prefix: str, rank: int) -> dict[str, Any]:
    with open(f"{prefix}{rank}") as file:
        facts = json.load(file)
    facts["torch"].pop("random")
    facts["environment"] = {name: value for name, value in facts["environment"].items() if name not in DIFFERS}
    return facts


@pytest.fixture(params=["in front", "in the background"])
def _started_by_a_shell(request: pytest.FixtureRequest) -> Iterator[None]:
    """A shell has what it starts with & ignore Ctrl-C. Under nohup, unlike under torchrun, ranks go on ignoring SIGHUP."""
    ignored = (signal.SIGINT, signal.SIGQUIT) if request.param == "in the background" else ()
    chosen = {signal.SIGHUP: signal.SIG_DFL} | dict.fromkeys(ignored, signal.SIG_IGN)
    before = {number: signal.signal(number, handler) for number, handler in chosen.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_started_by_a_shell")
@pytest.mark.parametrize("words", [[str(SCRIPTS / "facts.py")], ["--no-fork", "-m", "pack.facts"]])
def test_a_rank_sees_what_it_sees_under_torchrun(launch: Launcher, words: list[str]) -> None:
    program = [word for word in words if word != "--no-fork"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *program, "a", "--b=1"]
    variables = {"PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}
    theirs = launch.environment(OUT=str(launch.folder / "theirs"), **variables)
    subprocess.run(torchrun, cwd=launch.folder, env=theirs, stdin=subprocess.DEVNULL, check=True, timeout=60)
    ended = launch.run("--no-watch", "-n", "2", *words, "a", "--b=1", OUT=str(launch.folder / "ours"), **variables)
    assert (ended.code, ended.out) == (0, ""), ended.err
    for rank in (0, 1):
        assert read_facts(str(launch.folder / "ours"), rank) == read_facts(str(launch.folder / "theirs"), rank)


def test_unseeded_ranks_draw_different_numbers(launch: Launcher) -> None:
    launch.script("import random, numpy, torch\nprint(random.random(), numpy.random.rand(), float(torch.rand(())))")
    drawn = [line.split()[1:] for line in launch.run("-n", "2", "train.py").out.splitlines()]
    assert len(drawn) == 2 and not set(drawn[0]) & set(drawn[1])


def test_does_what_scripts_do(launch: Launcher) -> None:
    ended = launch.run("-n", "2", str(SCRIPTS / "behaves.py"), "--steps", "3", seconds=120)
    assert ended.code == 0, ended.err
    batches = "[[0, 1, 4], [9, 16, 25]]"
    expected = ["args 3 behaves.py", "sibling 7", "data some data", "object 5 __main__ 5"]
    expected += [f"loader {method} {batches}" for method in ("fork", "spawn", "forkserver")]
    expected += ["pool [2, 4]", "backward True", "thread", "atexit"]
    for rank in (0, 1):
        assert [line[4:] for line in ended.out.splitlines() if line.startswith(f"[{rank}] ")] == expected
    assert sorted(ended.err_lines) == ["[0] to stderr", "[1] to stderr"]


ENDS = {
    "raises": "def f(x):\n    raise ValueError('bad')\n\nf(1)\n",
    "cause": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error\n",
    "syntax": "def f(:\n    pass\n",
    "import": "import no_such_module\n",
    "code": "import sys\nsys.exit(7)\n",
    "words": "import sys\nsys.exit('too few samples')\n",
    "os_exit": "import os\nos._exit(9)\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "thread": "import threading\nthreading.Thread(target=lambda: 1 / 0).start()\n",
    "atexit": "import atexit\natexit.register(print, 'bye')\nraise SystemExit(4)\n",
    "encoded": "# -*- coding: latin-1 -*-\nprint(len('\xe9'))\n",
    "killed": "import os\nos.kill(os.getpid(), 9)\n",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_it_does_under_python(watched: Watched, name: str) -> None:
    program = watched.script(ENDS[name].encode("latin-1"))
    alone = subprocess.run([sys.executable, "-u", program.target], capture_output=True, text=True)
    ended = watched.run(program)
    assert ended.code == (128 - alone.returncode if alone.returncode < 0 else alone.returncode), ended.err
    assert ended.out == alone.stdout
    theirs = [line for line in ended.err.splitlines() if not line.startswith("instep: ")]
    assert without_numbers(theirs) == without_numbers(alone.stderr.splitlines())


def test_a_hook_of_the_scripts_prints_its_errors(watched: Watched) -> None:
    program = watched.script(
        "import sys\nsys.excepthook = lambda *a: print('my hook:', a[1])\nraise ValueError('bad')\n"
    )
    ended = watched.run(program)
    assert (ended.code, ended.out) == (1, "my hook: bad\n")
    assert ended.err.splitlines()[1:] == ["ValueError: bad", f"  at {program.target}:3: raise ValueError('bad')"]


def without_numbers(lines: list[str]) -> list[str]:
    return [re.sub(r"0x[0-9a-f]+|Thread-\d+", "#", line) for line in lines]


def test_runs_folders_modules_and_compiled_files(watched: Watched) -> None:
    text = "import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n"
    path = watched.folder / "train.py"
    watched.script(text)
    (watched.folder / "folder").mkdir()
    watched.script(text, name="folder/__main__.py")
    py_compile.compile(str(path), str(watched.folder / "compiled.pyc"))
    folder = str(watched.folder / "folder")
    for kind, target in (
        ("script", folder),
        ("script", str(watched.folder / "compiled.pyc")),
        ("run_path", str(path)),
        ("module", "this"),
    ):
        ended = watched.run(Program(kind, target, ("x",)))  # type: ignore[arg-type]
        assert ended.code == 0, ended.err
        assert ended.out.startswith("The Zen of Python" if target == "this" else "['x']\n")


def test_runs_a_command_that_is_no_script(launch: Launcher) -> None:
    ended = launch.run("-n", "2", "--no-python", "sh", "-c", "echo rank $RANK; exit $RANK")
    assert (ended.code, sorted(ended.out.splitlines())) == (1, ["[0] rank 0", "[1] rank 1"])


def test_names_a_command_that_is_not_there(launch: Launcher) -> None:
    ended = launch.run("--no-python", "no-such-command")
    assert ended.code == 127
    assert "cannot run 'no-such-command': No such file or directory" in ended.err


def test_names_a_script_that_is_not_there(launch: Launcher) -> None:
    ended = launch.run("no.py")
    assert ended.code == 2
    assert (
        ended.err
        == f"instep: there is no script 'no.py' (looked in {launch.folder}). Check the path; for a module use -m.\n"
    )


def test_a_module_that_is_not_there_ends_as_under_python(launch: Launcher) -> None:
    ended = launch.run("-m", "no_such_module")
    assert ended.code == 1
    assert ended.err_lines[0] == f"{sys.executable}: No module named no_such_module"
