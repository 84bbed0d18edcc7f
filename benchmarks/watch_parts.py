"""Where does the cost of watching come from? Processor time of each hook of the probe, with warm caches and cold ones.

    python benchmarks/watch_parts.py                # half a minute
    python benchmarks/watch_parts.py --rounds 1000  # narrower

One process, alone in a gloo group. What the hooks wrap is replaced by stubs that do next to nothing (backward gives one
number to the backend, as DistributedDataParallel does with its buckets), so that the difference between a call with the
hook and one without is the hook. Each is timed on its own; the median over rounds counts.
warm: one step right after the other. cold: before each call a small network goes forward and backward, of which the
weights do not fit into a core's own cache, as in a real step; every line of Python code and every object has then to
be fetched again, which is what a script pays. A call that was interrupted does not move the median.

thread: the thread that looks at the rank some times a second, over some seconds of such work: how often it woke, what
a look takes of the processor, and how long the look lasted, in which it holds the interpreter's lock or waits for it.
start: time and memory of putting everything in place in a process that has imported torch.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from intervals import median_of
from page import load_before, write_page

PARTS = ("data", "forward", "backward", "step")
NOTE = """Processor time that the hooks of one optimizer step add, in microseconds: the median over rounds of a call with the hook minus
one without it. Brackets: 95 %, bootstrap over rounds."""
_WIDTH = 700  # weights and gradients of three such layers: 12 MB
_CHANGES, _SETTLE = 4, 120  # between with and without; steps after each, in which Python adapts to what was exchanged
Call = Callable[[], object]


def put_stubs() -> None:
    """In place of what takes long. Before the probe, which then wraps the stubs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    output, number, wait = torch.zeros(2, 2), torch.zeros(1), dist.Work.wait  # a wait that no hook sees, as in C++

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return output

    def backward(*args: Any, **kwargs: Any) -> None:
        wait(dist.group.WORLD.allreduce([number]))  # type: ignore[union-attr]

    DistributedDataParallel.forward = forward  # type: ignore[method-assign]
    torch.autograd.backward = backward  # type: ignore[assignment]


def make_parts() -> dict[str, Call]:
    """One call for each part of a step of a script that uses DistributedDataParallel."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    class Still(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    data = TensorDataset(torch.randn(200_000, 4), torch.zeros(200_000))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 1, 0))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer, inputs = Still(model.parameters(), lr=0.1), torch.zeros(2, 64)
    loss = model.module(inputs).square().mean()
    for _ in range(3):  # past the passes whose batches are printed each time
        next(iter(loader))
    iterator = iter(loader)
    return {
        "data": lambda: next(iterator),
        "forward": lambda: model(inputs),
        "backward": loss.backward,
        "step": optimizer.step,
    }


def make_work() -> Call:
    """A network's forward and backward, which leave nothing of ours in the caches."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(3)]
    model, inputs = nn.Sequential(*layers), torch.randn(16, _WIDTH)
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(model(inputs).square().mean(), parameters)


def time_parts(
    parts: dict[str, Call], switch: Any, kind: str, rounds: int, between: Call | None
) -> dict[str, list[float]]:
    """Seconds that each part takes more with its hooks than without, per round. kind: of the steps, watched or counted."""
    more: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(_CHANGES):
        taken: dict[str, list[list[float]]] = {kind: [], "bare": []}
        for one, rows in taken.items():
            switch(one)
            for _ in range(_SETTLE):
                for call in parts.values():
                    call()
            for _ in range(rounds // _CHANGES):
                rows.append([time_once(call, between) for call in parts.values()])
        for on, off in zip(*taken.values()):
            for name, with_hook, without in zip(parts, on, off):
                more[name].append(with_hook - without)
    switch("watched")
    return more


def time_once(call: Call, between: Call | None) -> float:
    if between is not None:
        between()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def watch_thread(work: Call, seconds: float) -> str:
    """What the watching thread takes while the main thread works and leaves marks."""
    from instep.launch.probe.recorder import current
    from instep.launch.probe.watcher import Watcher

    looks: list[tuple[float, float]] = []
    original = Watcher._look

    def look(self: Any) -> None:
        used, started = time.thread_time(), time.perf_counter()
        original(self)
        looks.append((time.thread_time() - used, time.perf_counter() - started))

    recorder = current()
    assert recorder is not None
    Watcher._look = look  # type: ignore[method-assign]
    before, started = read_thread(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        work()
        recorder.mark(3)
    after, lasted = read_thread(), time.perf_counter() - started
    Watcher._look = original  # type: ignore[method-assign]
    used, elapsed = ([row[column] * 1e6 for row in looks] for column in (0, 1))
    return (
        f"thread: {len(looks) / lasted:.1f} looks/s, {(after[1] - before[1]) / lasted:.1f} times on a core/s, "
        f"{(after[0] - before[0]) / lasted:.3%} of a core\n"
        f"  a look: {statistics.median(used):.0f} us of the processor (longest {max(used):.0f}), "
        f"lasts {statistics.median(elapsed):.0f} us (longest {max(elapsed):.0f})"
    )


def read_thread() -> tuple[float, int]:
    """Of the watching thread so far: processor seconds, and how often it got a core."""
    watcher = next(thread for thread in threading.enumerate() if thread.name == "instep-watch")
    fields = Path(f"/proc/self/task/{watcher.native_id}/schedstat").read_text().split()
    return int(fields[0]) / 1e9, int(fields[2])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def start() -> str:
    """Puts the probe in place. Says what that cost."""
    import torch  # noqa: F401  ranks start from a process that has imported it
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401
    from torch.utils.data import DataLoader  # noqa: F401

    put_stubs()
    gc.collect()
    before, known, started = resident_bytes(), len(sys.modules), time.perf_counter()
    from instep.launch.probe import install

    install(Path(tempfile.mkdtemp()))
    taken, grown = time.perf_counter() - started, resident_bytes() - before
    return f"start: {taken * 1e3:.0f} ms, {grown / 2**20:.1f} MiB, {len(sys.modules) - known} modules"


def table(measured: dict[str, dict[str, list[float]]]) -> str:
    """measured: by the head of a column."""
    lines = ["".join([f"{'hooks of':8}", *(f"{head:>24}" for head in measured)])]
    for name in (*PARTS, "a step"):
        cells = [
            parts[name] if name in parts else [sum(row) for row in zip(*parts.values())] for parts in measured.values()
        ]
        lines.append("".join([f"{name:8}", *(f"{show(cell):>24}" for cell in cells)]))
    return "\n".join(lines)


def show(seconds: list[float]) -> str:
    import numpy as np

    found = median_of(np.array(seconds) * 1e6, 2000)
    return f"{found.median:.1f} [{found.low:.1f}, {found.high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="What each hook of the probe costs per step.")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=6.0, help="to look at the watching thread")
    parser.add_argument("--out", type=Path, help="write a results page here as well")
    args = parser.parse_args()
    load, began = load_before(), start()
    import torch
    import torch.distributed as dist
    from watch import make_switch

    from instep.launch.probe import gradients, recorder

    # The steps are short to the probe however busy the machine is.
    recorder._SHORT_SECONDS = gradients._SHORT_SECONDS = math.inf
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    switch, parts, work = make_switch(), make_parts(), make_work()
    for _ in range(100):  # past the first steps, of which more is kept
        for call in parts.values():
            call()
    measured: dict[str, dict[str, list[float]]] = {}
    for kind in ("counted", "watched"):
        measured[f"{kind}, cold"] = time_parts(parts, switch, kind, args.rounds, work)
        measured[f"{kind}, warm"] = time_parts(parts, switch, kind, 2 * args.rounds, None)
    figures = f"{table(measured)}\n{watch_thread(work, args.seconds)}\n{began}"
    dist.destroy_process_group()
    print(figures)
    if args.out:
        write_page(args.out, "What each hook of the probe costs", [NOTE, figures], load)


if __name__ == "__main__":
    main()
