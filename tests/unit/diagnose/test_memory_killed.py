"""A rank that the kernel killed for memory: which process, how much it had, of what, and what grew."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from instep.diagnose.engine import judge
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records import recording as layout
from instep.records.event import Event
from instep.records.recording import Page

MIB = 1 << 20
WHY = "The cgroup's memory limit of 2.0 GiB was reached, and the kernel killed for it 1 time."


def page(rank: int, steps: int, resident: int, size: int = 2) -> Page:
    data = bytearray(layout.PAGE_BYTES)
    layout.HEADER.pack_into(data, 0, layout.MAGIC, layout.VERSION, 2_000_000_000 + rank, rank, size, 0.0, 0.0)
    struct.pack_into("<Q", data, layout.NUM_STEPS, steps)
    struct.pack_into("<Q", data, layout.RESIDENT_BYTES, resident)
    return Page(bytes(data))


def killed(memory: str | None = WHY, *events: Event, steps: int = 108, resident: int = 1900 * MIB) -> RunView:
    failure = {"exit_code": -9, "ended_at": 9.0, "peak_bytes": 1950 * MIB, "memory": memory, "error": None}
    kinds: dict[str, Any] = {"optimizer": "AdamW", "parameters": 40 * MIB, "gradients": 40 * MIB, "device": "cpu"}
    kinds |= {"optimizer_state": 80 * MIB, "peak": 500 * MIB}
    notes = (Event("memory", 1.0, 8, {"used": 400 * MIB}), Event("memory-kinds", 1.0, 32, kinds), *events)
    return RunView(
        Path(),
        (
            RankView(0, page(0, steps, 390 * MIB), (), exit={"code": -15, "ended_at": 9.5, "by_us": True}),
            RankView(1, page(1, steps, resident), notes, failure=failure),
        ),
    )


def test_says_which_process_how_much_of_what_and_how_it_grew() -> None:
    (finding,) = judge(killed())
    assert finding.id == "memory/killed" and finding.ranks == (1,) and finding.certainty == "certain"
    assert finding.title == "rank 1 (process 2000000001) was killed because memory ran out; it had used 1.9 GiB"
    assert finding.cause == f"{WHY} Memory grew by about 15 MiB with every step, after the first ones too."
    facts = [one.fact for one in finding.evidence]
    assert "rank 1 had used 1.9 GiB at most" in facts
    assert (
        "after step 32: parameters 40 MiB, gradients 40 MiB, optimizer state 80 MiB; at the highest 1.9 GiB, "
        "of which activations, data, Python and torch itself 1.75 GiB"
    ) in facts
    assert "400 MiB after step 8, 1.86 GiB after step 108" in facts


def test_names_the_line_that_keeps_what_grew(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("history = []\nfor step in range(100):\n    history.append(step)\n")
    facts = {"file": str(script), "function": "<module>", "name": "history", "line": 2, "growth": 900 * MIB}
    (finding,) = judge(killed(WHY, Event("kept-graphs", 5.0, 96, facts | {"history": [[8, 8], [96, 96]]})))
    assert finding.id == "memory/killed" and finding.explains == ("memory/kept-graphs",)
    assert finding.where is not None and finding.where.line == 3
    assert finding.cause.endswith("What grew is history in <module>, which keeps results with their graphs (line 3).")
    assert finding.fix == (f"keep .item() or .detach() there: {script}:3",)


def test_without_growth_the_step_itself_is_too_large() -> None:
    (finding,) = judge(killed(resident=410 * MIB))
    assert finding.cause == WHY
    assert finding.fix[0] == "use a smaller micro-batch or fewer ranks on this machine"


def test_a_kill_that_nobody_counted_is_not_blamed_on_memory() -> None:
    assert [one for one in judge(killed(memory=None)) if one.id == "memory/killed"] == []
