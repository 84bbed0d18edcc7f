"""What does watching cost? Steps of about 5 and 50 ms under `instep run`, with its probe and without it.

    python benchmarks/watch.py                     # 1 and 2 processes, both step lengths; 10 minutes on a quiet machine
    python benchmarks/watch.py --ranks 2 --milliseconds 5 --rounds 100

The ranks are started by `instep run`, each on a core of its own. In the same processes, in turn, short blocks of steps of
three kinds: watched, with all that the probe does; counted, as most short steps are once the first have gone by; and bare,
with torch's own functions put back and the watching thread idle. Their order changes from round to round. All ranks change
at the same step, and the first steps of a block, in which Python adapts to what was exchanged, are not timed. A round is a
fraction of a second, so that what else happens on the machine hits all of its blocks; its ratios are those of their times,
and the median over all rounds counts. `a run` is put together from watched and counted blocks as the probe mixes them in
steps of this length, after the first 20 seconds and 1024 steps, in which all are watched.

What cannot be switched off inside of a run is told by itself: the launcher, which looks at the ranks five times a second
from a process of its own, as a share of one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from intervals import paired_difference, paired_ratio, summarise
from page import load_before, write_page

NOTE = """An MLP whose width is chosen so that a step (batch of 32, SGD, one thread per process, gloo) takes about the time named,
fed by a DataLoader with a DistributedSampler, wrapped in DistributedDataParallel on two processes. Intervals: 95 %, bootstrap over
rounds. ratio: time of a block over that of the bare block next to it. processor: the same for the processor time of the whole
rank, with all its threads; it tells more than the clock on a busy machine. a run: watched and counted steps as the probe mixes
them. launcher: share of one core."""
WIDTHS = {5: 1200, 50: 3800}
SETTLE_STEPS = 3
KINDS = ("bare", "counted", "watched")
Blocks = dict[str, list[list[float]]]


def work(args: argparse.Namespace) -> None:
    """What each rank does."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    switch = make_switch()
    steps = make_steps(args.milliseconds)
    run_block(steps, 60)
    seconds: Blocks = {kind: [] for kind in KINDS}
    processor: Blocks = {kind: [] for kind in KINDS}
    before, started = launcher_seconds(), time.perf_counter()
    for number in range(args.rounds):
        first = number % len(KINDS)
        for kind in (*KINDS[first:], *KINDS[:first])[:: 1 if number % 2 else -1]:
            switch(kind)
            run_block(steps, SETTLE_STEPS)
            used = time.process_time()
            seconds[kind].append(run_block(steps, args.block_steps))
            processor[kind].append([(time.process_time() - used) / args.block_steps] * args.block_steps)
    share = (launcher_seconds() - before) / (time.perf_counter() - started)
    switch("watched")
    if rank == 0:
        args.worker.write_text(json.dumps({"seconds": seconds, "processor": processor, "launcher": share}))
    if dist.is_initialized():
        dist.destroy_process_group()


def make_switch() -> Any:
    """Sets what the probe does from here on: one of the three kinds."""
    import torch.optim.optimizer as optimizer

    from instep.launch.probe.patching import REPLACED
    from instep.launch.probe.recorder import current
    from instep.launch.probe.watched_steps import WatchedSteps
    from instep.launch.probe.watcher import Watcher

    hooks: tuple[Any, ...] = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    kept, look = [dict(table) for table in hooks], Watcher._look
    recorder, chooser = current(), next(one for one in gc.get_objects() if isinstance(one, WatchedSteps))
    assert recorder is not None
    chooser._next_choice = chooser._wake_at = 1 << 60  # type: ignore[assignment]  # here the blocks choose

    def switch(kind: str) -> None:
        is_on = kind != "bare"
        for owner, name, original, wrapper in REPLACED:
            setattr(owner, name, wrapper if is_on else original)
        for table, rows in zip(hooks, kept):
            table.clear()
            if is_on:
                table.update(rows)
        Watcher._look = look if is_on else _do_nothing  # type: ignore[method-assign]
        recorder.flush()
        recorder.rests += 1
        recorder.only_counts = kind == "counted"

    return switch


def _do_nothing(watcher: Any) -> None:
    pass


def make_steps(milliseconds: int) -> Any:
    """Yields after each optimizer step, for ever."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    torch.manual_seed(0)
    width, size = WIDTHS[milliseconds], int(os.environ.get("WORLD_SIZE", "1"))
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    sampler = DistributedSampler(data, size, int(os.environ.get("RANK", "0")))
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model: nn.Module = nn.Sequential(*layers)
    model = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        epoch += 1
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            yield


def run_block(steps: Any, count: int) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(count):
        next(steps)
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def launcher_seconds() -> float:
    """Processor time so far of the process that watches the ranks: the parent of the one that they were forked from."""
    parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    return int(Path(f"/proc/{parent}/schedstat").read_text().split()[0]) / 1e9


def mix(blocks: Blocks, milliseconds: float) -> list[list[float]]:
    """Blocks as a run has them: of steps of that length some are watched, and the rest is counted."""
    from instep.launch.probe.recorder import WINDOW
    from instep.launch.probe.watched_steps import choose_period

    period = choose_period(milliseconds / 1e3)
    share = WINDOW / period if period else 1.0
    pairs = zip(blocks["watched"], blocks["counted"])
    return [[share * one + (1 - share) * two for one, two in zip(*pair)] for pair in pairs]


def table(size: int, measured: dict[str, Any]) -> str:
    seconds, processor = measured["seconds"], measured["processor"]
    bare = summarise(seconds["bare"]).median / 1e3
    lines = [f"{size} process{'es' if size > 1 else ''}, {bare:.2f} ms bare; launcher {measured['launcher']:.2%}"]
    rows = {kind: (seconds[kind], processor[kind]) for kind in KINDS[1:]}
    for name, (times, used) in [*rows.items(), ("a run", (mix(seconds, bare), mix(processor, bare)))]:
        more, ratio = paired_difference(times, seconds["bare"]), paired_ratio(times, seconds["bare"])
        more_used, used_ratio = paired_difference(used, processor["bare"]), paired_ratio(used, processor["bare"])
        lines += [
            f"  {name:8} {more.median:+5.0f} us [{more.low:+.0f}, {more.high:+.0f}]   ratio {ratio}"
            f"   processor {more_used.median:+5.0f} us [{more_used.low:+.0f}, {more_used.high:+.0f}]   {used_ratio}"
        ]
    return "\n".join(lines)


def start(size: int, options: list[Any]) -> dict[str, Any]:
    """Runs the ranks to their end. Returns what rank 0 has measured."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "measured.json")
        launch = ["-m", "instep", "run", "-n", size, "--run-dir", f"{scratch}/run", __file__]
        command = [sys.executable, *map(str, [*launch, *options, "--worker", result])]
        ended = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
        )
        if ended.returncode:
            raise RuntimeError(f"the ranks ended with {ended.returncode}:\n{(ended.stdout + ended.stderr)[-4000:]}")
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="What watching a run costs per step.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--milliseconds", type=int, nargs="+", default=[5, 50], choices=sorted(WIDTHS))
    parser.add_argument("--rounds", type=int, default=300, help="of 5 ms steps; a quarter of it for steps of 50 ms")
    parser.add_argument("--block-steps", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write a results page here as well")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.milliseconds = args.milliseconds[0]
        return work(args)
    load, tables = load_before(), []
    for size in args.ranks:
        for milliseconds in args.milliseconds:
            is_short = milliseconds == 5
            steps, rounds = (args.block_steps, args.rounds) if is_short else (4, max(1, args.rounds // 4))
            options = ["--rounds", rounds, "--block-steps", steps, "--milliseconds", milliseconds]
            tables.append(table(size, start(size, options)))
            print(tables[-1], flush=True)
    if args.out:
        write_page(args.out, "What watching a run costs", [NOTE, "\n".join(tables)], load)


if __name__ == "__main__":
    main()
