"""What a reduce-scatter and an all-gather of one block cost on the CPU: gloo's own ways beside those of instep.

    python benchmarks/shard_traffic.py                # 2 and 4 processes on the loopback interface
    python benchmarks/shard_traffic.py --rate 1gbit   # 2, in network namespaces with that much between them (root)

4.9 million numbers in fp32, as one block of the GPT of `parallel.py` has, with the copy into the memory to send from.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from intervals import summarise
from links import run_ranks, why_no_hosts
from page import load_before, write_page
from rounds import join
from torch import Tensor

NUMEL = 4_924_416  # of a block, divisible by 2, 3 and 4
CPU = torch.device("cpu")


class Gloo:
    """What FSDP2 does by itself."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None) -> None:
        if op is None:
            dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group)
        else:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)


def scatter(comm: Any, given: Tensor, rank: int, size: int) -> None:
    inside = comm.allocate((NUMEL,), dtype=given.dtype, device=CPU)
    inside.copy_(given)
    output = comm.allocate((NUMEL // size,), dtype=given.dtype, device=CPU)
    comm(output_tensor=output, input_tensor=inside, group=dist.group.WORLD, op=dist.ReduceOp.SUM)


def gather(comm: Any, given: Tensor, rank: int, size: int) -> None:
    output = comm.allocate((NUMEL,), dtype=given.dtype, device=CPU)
    own = output.narrow(0, rank * NUMEL // size, NUMEL // size)
    own.copy_(given[: NUMEL // size])
    comm(output_tensor=output, input_tensor=own, group=dist.group.WORLD)


def work(args: argparse.Namespace) -> None:
    """What each rank does: all variants in turn, round after round."""
    import warnings

    from instep.train.reduce.shard_traffic import PiecewiseScatter, SharedGather, SharedScatter
    from instep.train.reduce.shared_memory import SharedSum
    from instep.train.world import World

    warnings.simplefilter("ignore", FutureWarning)  # torch renames its functions
    rank, size = join()
    group: Any = dist.group.WORLD
    ways: dict[str, tuple[Callable[..., None], Any]] = {
        "reduce-scatter, gloo": (scatter, Gloo()),
        "reduce-scatter, all-to-all": (scatter, PiecewiseScatter(group)),
        "all-gather, gloo": (gather, Gloo()),
    }
    if not args.rate:
        waits = SharedSum(group, World(rank, size, rank, size, CPU, host_group=group))
        ways["reduce-scatter, shared memory"] = scatter, SharedScatter(waits)
        ways["all-gather, shared memory"] = gather, SharedGather(waits)
    given, seconds = torch.randn(NUMEL), {name: [] for name in ways}
    for _ in range(args.rounds + 2):
        for name, (move, comm) in ways.items():
            dist.barrier()
            start = time.perf_counter()
            move(comm, given, rank, size)
            seconds[name].append(time.perf_counter() - start)
    dist.barrier()
    if rank == 0:
        args.worker.write_text(json.dumps({name: [times[2:]] for name, times in seconds.items()}))


def table(size: int, where: str, measured: dict[str, list[list[float]]]) -> str:
    lines = [f"{size} processes, {where}: milliseconds for 19.7 MB", f"{'':30} {'p10':>7} {'median':>7} {'spread':>7}"]
    for name in sorted(measured, reverse=True):
        times = summarise(measured[name])
        lines.append(f"{name:30} " + " ".join(f"{us / 1e3:7.2f}" for us in (times.p10, times.median, times.spread)))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Reduce-scatter and all-gather on the CPU.")
    parser.add_argument("--rate", help="limit of the link between two processes, as tc writes it: 1gbit")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write a results page here as well")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        return work(args)
    if args.rate and (reason := why_no_hosts()):
        parser.error(f"--rate {args.rate}: {reason}; leave it out to measure on the loopback interface")
    load, tables = load_before(), []
    for size in (2,) if args.rate else (2, 4):
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch, "measured.json")
            words = ["--worker", result, "--rounds", args.rounds, *(["--rate", args.rate] if args.rate else [])]
            command = [sys.executable, __file__, *map(str, words)]
            run_ranks(command, size, args.rate, f"{scratch}/log.txt", timeout_seconds=600)
            tables.append(table(size, args.rate or "loopback", json.loads(result.read_text())))
            print(f"\n{tables[-1]}", flush=True)
    if args.out:
        write_page(args.out, "Reduce-scatter and all-gather of one block on the CPU", tables, load)


if __name__ == "__main__":
    main()
