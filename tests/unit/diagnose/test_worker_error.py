"""An error in a worker process of a data loader is told by what happened there."""

from __future__ import annotations

from pathlib import Path

from instep.diagnose.rules.crash.exception import _in_a_worker, _what

TOLD = """Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "{script}", line 2, in __getitem__
    return VOCAB[word]
KeyError: 'zebra'
"""


def error(folder: Path, message: str) -> dict[str, object]:
    script = folder / "captions.py"
    script.write_text("def __getitem__(word):\n    return VOCAB[word]\n")
    return {"type": "KeyError", "message": message.replace("{script}", str(script))}


def test_the_line_in_the_worker_is_named(tmp_path: Path) -> None:
    where = _in_a_worker(error(tmp_path, TOLD))
    assert where is not None and where.source == "return VOCAB[word]"
    assert _what(error(tmp_path, TOLD)) == ("KeyError", "'zebra', in DataLoader worker process 0")


def test_another_error_has_its_own_words(tmp_path: Path) -> None:
    assert _in_a_worker(error(tmp_path, "'zebra'\nmore")) is None
    assert _what(error(tmp_path, "'zebra'\nmore")) == ("KeyError", "'zebra'")
