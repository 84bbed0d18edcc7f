"""Output of real ranks: whole lines, nothing lost, files where they were asked for."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from launching import Launcher, Watched


def test_lines_of_ranks_are_never_mixed(watched: Watched) -> None:
    program = watched.script(
        "import os, sys\nfor number in range(2000):\n    print(os.environ['RANK'] * 50, number)\n"
        "    print(os.environ['RANK'] * 60, number, file=sys.stderr)\n"
    )
    ended = watched.run(program, 4)
    for text, length in ((ended.out, 50), (ended.err, 60)):
        lines = text.splitlines()
        assert len(lines) == 8000
        for rank in range(4):
            mine = [line for line in lines if line.startswith(f"[{rank}] ")]
            assert mine == [f"[{rank}] {str(rank) * length} {number}" for number in range(2000)]


def test_binary_and_unfinished_output_is_kept(watched: Watched) -> None:
    program = watched.script("import os\nos.write(1, b'a\\xff\\x00b\\nno end')\n")
    ended = watched.run(program)
    assert (ended.run_dir / "rank0" / "output.log").read_bytes() == b"a\xff\x00b\nno end"
    assert ended.out.endswith("b\nno end\n")


def test_a_progress_bar_is_readable(watched: Watched) -> None:
    program = watched.script(
        "import sys\nfor percent in range(101):\n    sys.stderr.write(f'\\r{percent}%')\nsys.stderr.write('\\n')\nprint('done')\n"
    )
    ended = watched.run(program, 2)
    for rank in (0, 1):
        bars = [line for line in ended.err.splitlines() if line.startswith(f"[{rank}] ")]
        assert bars[-1] == f"[{rank}] 100%" and len(bars) <= 3
    assert (ended.run_dir / "rank0" / "output.log").read_bytes().count(b"\r") == 101


def test_a_line_is_shown_before_its_end_when_it_waits(launch: Launcher) -> None:
    process = launch.begin(launch.script("import time\nprint('loading', end='', flush=True)\ntime.sleep(600)"))
    assert process.stdout is not None
    start = time.monotonic()
    assert process.stdout.readline() == "loading\n"
    assert time.monotonic() - start < 60
    process.terminate()
    assert launch.finish(process).code == 143


def test_stdout_and_stderr_keep_their_order_when_they_go_to_one_place(launch: Launcher) -> None:
    script = launch.script(
        "import sys\nfor n in range(50):\n    print('out', n)\n    print('err', n, file=sys.stderr)\n"
    )
    with open(launch.folder / "both", "w") as both:
        process = launch.begin("-n", "2", script, into=both)
        assert process.wait(60) == 0
    lines = (launch.folder / "both").read_text().splitlines()
    expected = [f"{word} {number}" for number in range(50) for word in ("out", "err")]
    for rank in (0, 1):
        assert [line[4:] for line in lines if line.startswith(f"[{rank}] ")] == expected


def test_quiet_ranks_are_in_the_log_only(launch: Launcher) -> None:
    ended = launch.run("-n", "2", "--quiet-ranks", launch.script("import os\nprint('rank', os.environ['RANK'])"))
    assert ended.out == "[0] rank 0\n"
    assert (ended.run_dir / "rank1" / "output.log").read_text() == "rank 1\n"


TALK = "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)\n"


def test_redirects_tee_and_filters(watched: Watched) -> None:
    logs = watched.folder / "logs"
    words = ("--log-dir", str(logs), "-r", "0:1,1:3", "-t", "0:2,2:3", "--local-ranks-filter", "0,2")
    ended = watched.run(watched.script(TALK), 3, *words, "--duplicate-stdout-filters", "out")
    assert sorted(ended.out.splitlines()) == ["[2] out 2"]
    assert sorted(ended.err.splitlines()) == ["[0] err 0", "[2] err 2"]
    attempt = next(logs.glob("*/attempt_0"))
    files = {str(path.relative_to(attempt)): path.read_text() for path in attempt.rglob("*.log")}
    assert files == {
        "0/stdout.log": "out 0\n",
        "0/stderr.log": "err 0\n",
        "1/stdout.log": "out 1\n",
        "1/stderr.log": "err 1\n",
        "2/stdout.log": "out 2\n",
        "2/stderr.log": "err 2\n",
        "filtered_stdout.log": "[2] out 2\n",
    }


def test_a_redirected_error_is_in_its_file_and_in_the_report(watched: Watched) -> None:
    ended = watched.run(watched.script("raise ValueError('bad')"), 1, "-r", "3")
    log = next((ended.run_dir / "torch-logs").glob("*/attempt_0/0/stderr.log"))
    assert log.read_text().endswith("ValueError: bad\n")
    assert ended.err.endswith("ValueError: bad\n")


def test_a_prefix_of_the_users_choice(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${local_rank}|${rank}] ")
    ended = watched.run(watched.script(TALK), 2, "--role", "trainer")
    assert sorted(ended.out.splitlines()) == ["[trainer0|0] out 0", "[trainer1|1] out 1"]


def test_a_reader_that_leaves_does_not_break_the_run(launch: Launcher) -> None:
    script = launch.script("for number in range(20000):\n    print('x' * 80)\nopen('finished', 'w').close()\n")
    process = launch.begin("-n", "2", script)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert (launch.folder / "finished").exists()
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.slow
def test_a_hundred_thousand_lines_a_second_lose_none(launch: Launcher) -> None:
    script = launch.script(
        "import os, time\nstart = time.time()\nfor second in range(10):\n    for number in range(25000):\n"
        "        print(os.environ['RANK'], second * 25000 + number)\n    time.sleep(max(0, start + second + 1 - time.time()))\n"
    )
    ended = launch.run("-n", "4", "--no-watch", script, seconds=120)
    counts = [0, 0, 0, 0]
    for line in ended.out.splitlines():
        match = re.fullmatch(r"\[(\d)\] (\d) (\d+)", line)
        assert match and match[1] == match[2] and int(match[3]) == counts[int(match[1])], line
        counts[int(match[1])] += 1
    assert counts == [250000] * 4
    logs = [(Path(ended.run_dir) / f"rank{rank}" / "output.log").read_text().count("\n") for rank in range(4)]
    assert logs == counts
