"""A run that was broken off while its ranks stood still is judged from their pages, one that was going on is not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from instep.diagnose.engine import diagnose
from instep.records.recording import Page, read_page
from instep.records.run_dir import RunDir

CASES = Path(__file__).parents[2] / "cases"


def load_recording() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recording", CASES / "recording.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def broken_off(tmp_path: Path) -> RunDir:
    """A run that hangs, without what its launcher noted of that."""
    load_recording().unpack(CASES / "hang" / "some_ranks_only", tmp_path)
    run_dir = RunDir(tmp_path)
    run_dir.stall.unlink()
    for rank in (0, 1):
        run_dir.rank(rank).snapshot.unlink()
    return run_dir


def stop(run_dir: RunDir, seconds: float, reason: str) -> None:
    """As the launcher notes it: so many seconds after the last rank did something."""
    pages = [read_page(run_dir.rank(rank).page) for rank in (0, 1)]
    newest = max(page.by_wall_clock(last_mark(page)) for page in pages if page is not None)
    run_dir.exits.write_text(json.dumps({"stop": {"reason": reason, "at": newest + seconds}}))


def last_mark(page: Page) -> float:
    mark = page.last_mark()
    assert mark is not None
    return mark.when


def test_ctrl_c_on_ranks_that_stand_still_is_followed_by_the_cause(broken_off: RunDir) -> None:
    stop(broken_off, 15.0, "interrupted")
    first = diagnose(broken_off.root)[0]
    assert (first.id, first.certainty, first.ranks) == ("hang/some-ranks-only", "likely", (0,))
    assert first.where is not None and "dist.barrier()  # wait for the file" in first.where.source
    assert "for 15 s" in first.evidence[0].fact and first.evidence[0].source == "rank0/page.bin"


@pytest.mark.parametrize(("seconds", "reason"), [(4.0, "interrupted"), (15.0, "failed")])
def test_a_short_pause_and_an_end_of_its_own_are_no_stall(broken_off: RunDir, seconds: float, reason: str) -> None:
    stop(broken_off, seconds, reason)
    assert not [one for one in diagnose(broken_off.root) if one.id.startswith("hang/")]
