import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from instep.errors import UsageError
from instep.train.observe.metrics_file import FLUSH_SECONDS, MetricsFile, as_line, lines_before


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def no_failure(text: str) -> None:
    raise AssertionError(text)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_numbers_that_are_not_finite_are_null_and_named():
    line = as_line({"step": 3, "loss": float("nan"), "grad_norm": float("-inf"), "x": 1.5})
    expected = {"step": 3, "loss": None, "grad_norm": None, "x": 1.5, "nonfinite": {"loss": "nan", "grad_norm": "-inf"}}
    assert json.loads(line, parse_constant=no_failure) == expected


def test_writes_at_once_first_and_then_by_time(tmp_path):
    clock = Clock()
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, no_failure, clock)
    file.add({"step": 0})
    assert read(path) == [{"step": 0}]
    file.add({"step": 1})
    assert read(path) == [{"step": 0}]
    clock.now += FLUSH_SECONDS
    file.add({"step": 2})
    assert read(path) == [{"step": 0}, {"step": 1}, {"step": 2}]
    file.close()


def test_the_newest_object_is_written_over_while_it_changes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, no_failure)
    file.add({"step": 0, "text": "a long one"})
    file.flush()
    assert file.record is not None
    file.record["text"] = "b"
    file.flush()
    assert path.read_text() == '{"step":0,"text":"b"}\n'
    file.record["more"] = 1
    file.add({"step": 1})
    file.close()
    assert read(path) == [{"step": 0, "text": "b", "more": 1}, {"step": 1}]


def test_rewind_drops_steps_from_the_restored_one_on_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(as_line({"step": step}) for step in range(6)) + '{"step":6,"lo')
    file = MetricsFile(path, no_failure)
    file.rewind(4)
    file.add({"step": 4, "again": True})
    file.close()
    assert read(path) == [{"step": 0}, {"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}]


def test_a_second_run_in_the_directory_never_repeats_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(as_line({"step": step}) for step in range(6)))
    file = MetricsFile(path, no_failure)
    file.add({"step": 2, "again": True})
    file.close()
    assert read(path) == [{"step": 0}, {"step": 1}, {"step": 2, "again": True}]


def test_opening_and_closing_keeps_what_is_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0}\n')
    MetricsFile(path, no_failure).close()
    assert path.read_text() == '{"step":0}\n'


@pytest.mark.parametrize("content", [b"", b"no json\n", b'{"step":"2"}\n[1]\n', b'{"step":5}\n{"step":6'])
def test_nothing_before_a_step_that_the_file_does_not_hold(content):
    assert lines_before(content, 3) == 0


def test_a_place_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UsageError, match=r"^metrics cannot be written to .*metrics\.jsonl: .+\. Give Run\(dir=\.\.\.\)"
    ):
        MetricsFile(tmp_path / "file" / "metrics.jsonl", no_failure)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path):
    said: list[str] = []
    file = MetricsFile(tmp_path / "metrics.jsonl", said.append)
    file.add({"step": 0})
    file._file.close()
    file._file = Path("/dev/full").open("r+b", buffering=0)  # noqa: SIM115 - file.close() closes it
    for step in range(1, 4):
        file.add({"step": step})
        file.flush()
    file.close()
    assert len(said) == 1
    assert "cannot be written any more (No space left on device); training goes on without it" in said[0]


def test_what_was_flushed_survives_sigkill(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from instep.train.observe.metrics_file import MetricsFile
file = MetricsFile(Path(sys.argv[1]), print)
for step in range(100):
    file.add({"step": step})
file.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "metrics.jsonl"
    ended = subprocess.run([sys.executable, "-c", script, str(path)], env={**os.environ}, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert [line["step"] for line in read(path)] == list(range(100))
