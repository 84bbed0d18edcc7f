"""What a person sees when a run fails."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import pytest

from launching import Launcher, Watched

HOST = socket.gethostname()
GONE = "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"


def test_the_first_failing_ranks_traceback_is_last_and_echoes_are_named(launch: Launcher) -> None:
    text = GONE + "if dist.get_rank() == 1:\n    raise ValueError('bad')\ndist.all_reduce(torch.ones(3))\n"
    ended = launch.run("-n", "3", launch.script(text))
    assert ended.code == 1
    lines = ended.err_lines
    start = lines.index(f"instep: rank 1 on {HOST} ended with exit code 1")
    assert lines[start - 1].startswith("instep: ranks 0 and 2 failed because of it: ")
    assert [line.strip() for line in lines[start + 1 : start + 5]] == [
        "Traceback (most recent call last):",
        f'File "{launch.folder}/train.py", line 5, in <module>',
        "raise ValueError('bad')",
        "ValueError: bad",
    ]
    assert json.loads((ended.run_dir / "rank1" / "failure.json").read_text())["error"]["where"]["line"] == 5


def test_an_error_of_ours_is_one_sentence_and_the_users_line(launch: Launcher) -> None:
    text = "from instep.errors import UsageError\n\n\ndef check():\n    raise UsageError('3 does not divide 8.')\n\n\ncheck()\n"
    ended = launch.run("-n", "2", launch.script(text))
    assert ended.code == 2
    assert ended.err_lines[:3] == [
        f"instep: ranks 0 and 1 on {HOST} stopped:",
        "UsageError: 3 does not divide 8.",
        f"  at {launch.folder}/train.py:5: raise UsageError('3 does not divide 8.')",
    ]
    assert "Traceback" not in ended.err


def test_equal_tracebacks_are_printed_once(watched: Watched) -> None:
    ended = watched.run(watched.script("import os\nraise KeyError(f'rank{os.environ[\"RANK\"]}')"), 4)
    assert ended.err.count("Traceback") == 1
    assert f"instep: ranks 0-3 on {HOST} ended with exit code 1" in ended.err


def test_a_segfault_has_its_python_line(launch: Launcher) -> None:
    ended = launch.run("-n", "2", launch.script("import ctypes\n\n\ndef f():\n    ctypes.string_at(0)\n\n\nf()\n"))
    assert ended.code == 128 + signal.SIGSEGV
    assert "crashed with SIGSEGV, an access to memory that is not its own" in ended.err
    assert f"{launch.folder}/train.py:5" in ended.err


def test_gloos_abort_is_explained(launch: Launcher) -> None:
    text = GONE + "dist.all_reduce(torch.ones(3 + 5000 * dist.get_rank()))\nimport time; time.sleep(3)\n"
    ended = launch.run("-n", "2", "--no-watch", launch.script(text))
    assert ended.code != 0
    if ended.code == 128 + signal.SIGABRT:
        assert "aborted (SIGABRT), as C++ code does after an error it cannot handle" in ended.err
        assert "train.py:4" in ended.err


def test_a_killed_rank_is_told_with_its_memory(watched: Watched) -> None:
    program = watched.script(
        "import os, signal, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    )
    ended = watched.run(program, 2)
    assert ended.code == 137
    assert f"instep: rank 1 on {HOST} was killed by SIGKILL, which nothing can catch" in ended.err


def test_an_exception_is_shown_when_its_process_does_not_end(launch: Launcher) -> None:
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\nraise ValueError('bad')\n"
    process = launch.begin(launch.script(text))
    assert process.stderr is not None
    seen = ""
    while "ValueError: bad" not in seen:
        seen += process.stderr.readline()
    assert "rank 0 has raised an exception, but its process has not ended" in seen
    process.send_signal(signal.SIGINT)
    assert launch.finish(process).code == 130


def test_a_broken_torch_is_said(launch: Launcher) -> None:
    (launch.folder / "torch").mkdir()
    (launch.folder / "torch" / "__init__.py").write_text("raise ImportError('libc10.so: no such file')\n")
    ended = launch.run(launch.script("print(1)"), PYTHONPATH=str(launch.folder))
    assert ended.code == 1
    assert ended.err.endswith(
        "ImportError: libc10.so: no such file\n"
        "instep: torch cannot be imported, so no rank was started; mend that first: python -c 'import torch'\n"
    )


def test_says_why_ranks_are_fresh_processes(launch: Launcher) -> None:
    script = launch.script("print('hi')")
    ended = launch.run("--no-fork", script)
    assert (ended.code, ended.out) == (0, "hi\n")
    assert ended.err_lines == ["instep: starting each rank as a fresh process: --no-fork"]
    ended = launch.run(script, PYTHON_EXEC="/usr/bin/env")
    assert ended.err_lines[0] == "instep: starting each rank as a fresh process: PYTHON_EXEC is /usr/bin/env"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "0", "train.py"], "-n 0 starts no rank. Allowed: 1 or more, auto, cpu, gpu, xpu."),
        (
            ["-n", "many", "train.py"],
            "-n many: Unsupported nproc_per_node value: many Allowed: a number, auto, cpu, gpu, xpu.",
        ),
        ([], "no script was given. Write it after the options, as in `instep run -n 2 train.py`."),
        (["--set", "x=1", "train.py"], "--set x=1: instep.Run has no argument 'x'."),
        (["--tee", "9", "train.py"], "--tee has to be 0, 1, 2 or 3"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(launch: Launcher, words: list[str], text: str) -> None:
    launch.script("print(1)")
    ended = launch.run(*words)
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.err and "Traceback" not in ended.err


def test_overrides_reach_the_ranks(launch: Launcher) -> None:
    script = launch.script("import os\nprint(os.environ['INSTEP_SET'], os.path.basename(os.environ['INSTEP_RUN_DIR']))")
    assert launch.run("--set", "seed=3", script).out == '{"seed": "3"} run\n'


def test_help_is_printed() -> None:
    done = subprocess.run([sys.executable, "-m", "instep", "run", "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: instep run [options] script.py")


def test_two_runs_side_by_side_do_not_meet(launch: Launcher) -> None:
    script = launch.script(GONE + "x = torch.ones(1)\ndist.all_reduce(x)\nprint(int(x))\n")
    first = launch.begin("-n", "2", script)
    second = launch.run("-n", "3", "--run-dir", "other", script)
    assert sorted(second.out.splitlines()) == ["[0] 3", "[1] 3", "[2] 3"]
    assert sorted(launch.finish(first).out.splitlines()) == ["[0] 2", "[1] 2"]
