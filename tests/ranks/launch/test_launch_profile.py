"""`--profile FIRST:LAST` records the steps of a script that knows nothing of it."""

from __future__ import annotations

import json

from launching import Launcher

TRAINS = """
import torch
model = torch.nn.Linear(4, 4)
optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    with torch.profiler.record_function(f"step {step}"):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    other.step()
"""


def test_records_the_steps_asked_for_on_every_rank(launch: Launcher) -> None:
    ended = launch.run("-n", "2", "--profile", "2:3", launch.script(TRAINS))
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        path = ended.run_dir / f"rank{rank}" / "trace.json"
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert {name for name in names if str(name).startswith("step ")} == {"step 2", "step 3"}
        assert f"[{rank}] instep: steps 2 to 3 are recorded in {path}" in ended.err_lines


def test_records_what_there_was_when_the_program_ends_before(launch: Launcher) -> None:
    ended = launch.run("--profile", "0:99", launch.script(TRAINS))
    assert ended.code == 0, ended.err
    events = json.loads((ended.run_dir / "rank0" / "trace.json").read_text())["traceEvents"]
    assert {"step 0", "step 5"} <= {event.get("name") for event in events}
    assert any("steps 0 to 5 are recorded in" in line for line in ended.err_lines)
