"""What does a checkpoint cost? 100 M parameters with AdamW (1.2 GB), two ranks of one machine, replicated.

    python benchmarks/checkpoint.py                 # six rounds, a few minutes, 10 GB of memory, 8 GB of disk
    python benchmarks/checkpoint.py --rounds 3 --millions 25 --dir /mnt/disk

Against torch.save on rank 0 with a barrier, torch.distributed.checkpoint.save, and its async_save in a thread. Methods take
turns round by round. *blocked*: until training may change the weights again. *durable*: until the files are synced
to disk (for the others their files are synced after they say that they are done). Between saves each rank computes, as
training would.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from links import run_ranks

METHODS = ("instep", "torch.save", "DCP", "DCP async")


def work(args: argparse.Namespace) -> None:
    """What each rank does."""
    import torch
    import torch.distributed as dist

    from instep.train.checkpoint.state import capture
    from instep.train.world import join_world

    warnings.simplefilter("ignore")
    world = join_world()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(args.millions)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors, values = capture({"model": model}, {"optimizer": optimizer})
    model.zero_grad(set_to_none=True)
    folder = Path(args.dir)
    methods = make_methods(folder, world, tensors, values, {"model": model.state_dict(), "opt": optimizer.state_dict()})
    think(5.0)  # the steps before the first save, in which memory is got ahead
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    for number in range(args.rounds):
        for name in METHODS[number % 4 :] + METHODS[: number % 4]:
            place = folder / f"{name.replace(' ', '-')}-{number}"
            dist.barrier()
            os.sync()
            dist.barrier()
            began = time.perf_counter()
            finish = methods[name](place, number)
            blocked = time.perf_counter() - began
            think(0.5)
            where = finish()
            dist.barrier()
            durable = time.perf_counter() - began
            num_bytes = sum(path.stat().st_size for path in where.rglob("*") if path.is_file())
            rows[name].append({"blocked": blocked, "durable": durable, "bytes": num_bytes})
            dist.barrier()
            if world.is_main:
                shutil.rmtree(where)
            dist.barrier()
    everyone = world.gather_objects(rows)
    if world.is_main:
        args.worker.write_text(json.dumps(everyone))
    methods["close"](folder, 0)
    dist.barrier()
    dist.destroy_process_group()


def think(seconds: float) -> None:
    """Computes for about that long."""
    import torch

    matrix, until = torch.ones(500, 500), time.perf_counter() + seconds
    while time.perf_counter() < until:
        matrix = (matrix @ matrix).tanh()


def make_methods(folder: Path, world: Any, tensors: Any, values: Any, nested: Any) -> dict[str, Callable[..., Any]]:
    """Each saves, and returns what waits until it is on disk and names the folder."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    from instep.train.checkpoint.store import Checkpoints

    checkpoints = Checkpoints(folder, world, keep=None)
    checkpoints.reserve(tensors)
    # a stager that is kept reuses its memory; pinned memory needs a GPU
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )

    def ours(place: Path, number: int) -> Callable[[], Path]:
        checkpoints.save(tensors, values, step=number + 1)

        def finish() -> Path:
            checkpoints.wait()
            return folder / "checkpoints" / f"step-{number + 1}"

        return finish

    def plain(place: Path, number: int) -> Callable[[], Path]:
        if world.is_main:
            place.mkdir()
            torch.save(nested, place / "all.pt")
        dist.barrier()
        return lambda: sync(place, world)

    def dcp_plain(place: Path, number: int) -> Callable[[], Path]:
        dcp.save(nested, checkpoint_id=place)
        return lambda: sync(place, world)

    def dcp_async(place: Path, number: int) -> Callable[[], Path]:
        future = dcp.async_save(nested, checkpoint_id=place, async_stager=stager, process_group=group)

        def finish() -> Path:
            getattr(future, "upload_completion", future).result()
            dist.barrier()
            return sync(place, world)

        return finish

    group = dist.new_group(backend="gloo")
    return {
        "instep": ours,
        "torch.save": plain,
        "DCP": dcp_plain,
        "DCP async": dcp_async,
        "close": lambda *_: checkpoints.close(),
    }


def sync(place: Path, world: Any) -> Path:
    if world.is_main:
        for path in place.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    return place


def report(everyone: list[dict[str, list[dict[str, float]]]]) -> None:
    print(f"{'':12} {'blocked, first':>15} {'blocked, later':>24} {'durable, later':>24} {'bytes':>14}")
    for name in METHODS:
        rounds = [
            {key: max(rank[name][index][key] for rank in everyone) for key in ("blocked", "durable", "bytes")}
            for index in range(len(everyone[0][name]))
        ]
        later = rounds[1:]
        print(
            f"{name:12} {rounds[0]['blocked']:13.2f} s {spread([each['blocked'] for each in later]):>24} "
            f"{spread([each['durable'] for each in later]):>24} {rounds[0]['bytes']:14,.0f}"
        )


def spread(seconds: list[float]) -> str:
    """Median, and the least and the most."""
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--millions", type=int, default=100, help="parameters")
    parser.add_argument("--dir", help="where to write (default: a temporary folder)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--worker", str(answer), "--dir", folder]
        command += ["--rounds", str(args.rounds), "--millions", str(args.millions)]
        log = f"{folder}/log.txt"
        try:
            run_ranks(command, 2, None, log, 1800)
        except RuntimeError:
            print(Path(log).read_text()[-4000:], file=sys.stderr)
            raise
        import torch

        print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {args.millions} M parameters")
        print(f"load of the machine before {before:.1f}, after {os.getloadavg()[0]:.1f}\n")
        report(json.loads(answer.read_text()))


if __name__ == "__main__":
    main()
