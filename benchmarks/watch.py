"""What does watching cost? Steps of about 5 and 50 ms under `instep run`, with its probe and without it.

    python benchmarks/watch.py                     # 1 and 2 processes, both step lengths; 5 minutes on a quiet machine
    python benchmarks/watch.py --ranks 2 --milliseconds 5 --rounds 100

The ranks are started by `instep run`, each on a core of its own. In the same processes, in turn: short blocks of steps
with all wrappers, hooks and the looks of the watching thread in place, and blocks with torch's own functions put back
and the thread idle. Which comes first changes from round to round. Both ranks change at the same step, and the first steps
of a block, in which Python adapts to what was exchanged, are not timed. A round is about 0.2 s, so that what else happens
on the machine hits both of its blocks; its ratio is that of their times, and the median over all rounds counts.

What cannot be switched off inside of a run is told by itself: the launcher, which looks at the ranks five times a second
from a process of its own, as a share of one core.
"""

from __future__ import annotations

import argparse
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
rounds. ratio: time of a watched block over that of the unwatched block next to it. processor: the same for the processor
time of the whole rank, with all its threads; it tells more than the clock on a busy machine. launcher: share of one core."""
WIDTHS = {5: 1200, 50: 3800}
SETTLE_STEPS = 3
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
    seconds: Blocks = {"watched": [], "unwatched": []}
    processor: Blocks = {"watched": [], "unwatched": []}
    before, started = launcher_seconds(), time.perf_counter()
    for number in range(args.rounds):
        for name in sorted(seconds, reverse=bool(number % 2)):
            switch(name == "watched")
            run_block(steps, SETTLE_STEPS)
            used = time.process_time()
            seconds[name].append(run_block(steps, args.block_steps))
            processor[name].append([(time.process_time() - used) / args.block_steps] * args.block_steps)
    share = (launcher_seconds() - before) / (time.perf_counter() - started)
    switch(True)
    if rank == 0:
        args.worker.write_text(json.dumps({"seconds": seconds, "processor": processor, "launcher": share}))
    if dist.is_initialized():
        dist.destroy_process_group()


def make_switch() -> Any:
    """Puts torch's own functions back and lets the watching thread sleep on, and all of it again."""
    import torch.optim.optimizer as optimizer

    from instep.launch.probe.patching import REPLACED
    from instep.launch.probe.watcher import Watcher

    hooks: tuple[Any, ...] = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    kept, look = [dict(table) for table in hooks], Watcher._look

    def switch(watched: bool) -> None:
        for owner, name, original, wrapper in REPLACED:
            setattr(owner, name, wrapper if watched else original)
        for table, rows in zip(hooks, kept):
            table.clear()
            if watched:
                table.update(rows)
        Watcher._look = look if watched else _do_nothing  # type: ignore[method-assign]

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


def table(size: int, milliseconds: int, measured: dict[str, Any]) -> str:
    watched, unwatched = measured["seconds"]["watched"], measured["seconds"]["unwatched"]
    more, ratio = paired_difference(watched, unwatched), paired_ratio(watched, unwatched)
    used, used_before = measured["processor"]["watched"], measured["processor"]["unwatched"]
    more_used, used_ratio = paired_difference(used, used_before), paired_ratio(used, used_before)
    return (
        f"{size} process{'es' if size > 1 else ''}, about {milliseconds} ms: "
        f"{summarise(unwatched).median / 1e3:.2f} ms unwatched, {summarise(watched).median / 1e3:.2f} ms watched\n"
        f"  more {more.median:+.0f} us [{more.low:+.0f}, {more.high:+.0f}]   ratio {ratio}   launcher {measured['launcher']:.2%}\n"
        f"  processor: {summarise(used_before).median / 1e3:.2f} ms, more {more_used.median:+.0f} us "
        f"[{more_used.low:+.0f}, {more_used.high:+.0f}]   ratio {used_ratio}"
    )


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
            tables.append(table(size, milliseconds, start(size, options)))
            print(tables[-1], flush=True)
    if args.out:
        write_page(args.out, "What watching a run costs", [NOTE, "\n".join(tables)], load)


if __name__ == "__main__":
    main()
