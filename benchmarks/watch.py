"""What does watching cost? Steps of about 5 and 50 ms, with the probe of `instep run` and without it.

    python benchmarks/watch.py                     # 1 and 2 processes, both step lengths; some minutes
    python benchmarks/watch.py --ranks 2 --milliseconds 5 --rounds 10

In the same processes, in turn: blocks of steps with all wrappers and hooks in place, and blocks with torch's own
functions put back. The thread that looks five times a second runs in both; what it takes is measured by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from intervals import paired_difference, paired_ratio, summarise
from links import run_ranks
from page import load_before, write_page

NOTE = """An MLP whose width is chosen so that a step (batch of 32, SGD, one thread per process, gloo) takes about the time named,
fed by a DataLoader with a DistributedSampler, wrapped in DistributedDataParallel on two processes. Intervals: 95 %, bootstrap over
rounds. ratio: time of a watched block over that of the unwatched block next to it. thread: processor time of the watching
thread, as a share of the time of a run. The processor time of the main thread tells more than the clock on a busy machine."""
WIDTHS = {5: 1200, 50: 3800}


def work(args: argparse.Namespace) -> None:
    """What each rank does. The probe has to be in place before anything is imported from torch's names."""
    rank_dir = Path(tempfile.mkdtemp())
    from instep.launch.probe import install

    install(rank_dir)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    switch = make_switch()
    steps = make_steps(args.milliseconds)
    run_block(steps, 40)
    seconds: dict[str, list[list[float]]] = {"watched": [], "unwatched": []}
    processor: dict[str, list[list[float]]] = {"watched": [], "unwatched": []}
    before, started = thread_seconds(), time.perf_counter()
    for number in range(args.rounds):
        for name in sorted(seconds, reverse=bool(number % 2)):
            switch(name == "watched")
            if dist.is_initialized():
                dist.barrier()
            used = time.thread_time()
            seconds[name].append(run_block(steps, args.block_steps))
            processor[name].append([(time.thread_time() - used) / args.block_steps] * args.block_steps)
    share = (thread_seconds() - before) / (time.perf_counter() - started)
    switch(True)
    if int(os.environ.get("RANK", "0")) == 0:
        args.worker.write_text(json.dumps({"seconds": seconds, "processor": processor, "thread": share}))
    if dist.is_initialized():
        dist.destroy_process_group()


def make_switch() -> Any:
    """Puts torch's own functions back, and the wrappers again."""
    from torch.optim import optimizer

    from instep.launch.probe.patching import REPLACED

    hooks = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    kept = [dict(table) for table in hooks]

    def switch(watched: bool) -> None:
        for owner, name, original, wrapper in REPLACED:
            setattr(owner, name, wrapper if watched else original)
        for table, rows in zip(hooks, kept):
            table.clear()
            if watched:
                table.update(rows)

    return switch


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


def thread_seconds() -> float:
    """Processor time so far of the thread that watches; 0 where there is none, as with one process without a group."""
    import threading

    watcher = next((thread for thread in threading.enumerate() if thread.name == "instep-watch"), None)
    if watcher is None or watcher.native_id is None:
        return 0.0
    fields = Path(f"/proc/self/task/{watcher.native_id}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def table(size: int, milliseconds: int, measured: dict[str, Any]) -> str:
    watched, unwatched = measured["seconds"]["watched"], measured["seconds"]["unwatched"]
    more, ratio = paired_difference(watched, unwatched), paired_ratio(watched, unwatched)
    used, used_before = measured["processor"]["watched"], measured["processor"]["unwatched"]
    more_used, used_ratio = paired_difference(used, used_before), paired_ratio(used, used_before)
    return (
        f"{size} process{'es' if size > 1 else ''}, about {milliseconds} ms: "
        f"{summarise(unwatched).median / 1e3:.2f} ms unwatched, {summarise(watched).median / 1e3:.2f} ms watched\n"
        f"  more {more.median:+.0f} us [{more.low:+.0f}, {more.high:+.0f}]   ratio {ratio}   thread {measured['thread']:.2%}\n"
        f"  processor time of the main thread: {summarise(used_before).median / 1e3:.2f} ms, more {more_used.median:+.0f} us "
        f"[{more_used.low:+.0f}, {more_used.high:+.0f}]   ratio {used_ratio}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What watching a run costs per step.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--milliseconds", type=int, nargs="+", default=[5, 50], choices=sorted(WIDTHS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--block-steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="write a results page here as well")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.milliseconds = args.milliseconds[0]
        return work(args)
    load, tables = load_before(), []
    for size in args.ranks:
        for milliseconds in args.milliseconds:
            steps = args.block_steps if milliseconds == 5 else max(5, args.block_steps // 5)
            with tempfile.TemporaryDirectory() as scratch:
                result = Path(scratch, "measured.json")
                options = ["--rounds", args.rounds, "--block-steps", steps, "--milliseconds", milliseconds]
                command = [sys.executable, __file__, *map(str, [*options, "--worker", result])]
                run_ranks(command, size, None, f"{scratch}/log.txt", timeout_seconds=600)
                tables.append(table(size, milliseconds, json.loads(result.read_text())))
            print(tables[-1], flush=True)
    if args.out:
        write_page(args.out, "What watching a run costs", [NOTE, "\n".join(tables)], load)


if __name__ == "__main__":
    main()
