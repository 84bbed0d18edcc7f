"""How fast do two processes train? A GPT of 10.8 M parameters, an MLP of 25 M and a convnet with batch norm.

    python benchmarks/throughput.py                     # on the loopback interface; about ten minutes
    python benchmarks/throughput.py --rate 1gbit        # two network namespaces with 1 Gbit between them (root)
    python benchmarks/throughput.py --tasks mlp --rounds 4

Against DistributedDataParallel as it comes, the same with a fused optimizer, Accelerate and Lightning Fabric. All
train on the same samples from the same weights; the losses of the first steps are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from intervals import paired_ratio, summarise
from links import run_ranks, why_no_hosts
from page import load_before, write_page

NOTE = """GPT of 10.8 M parameters (4 x 64 tokens per rank), MLP of 25 M (16 samples), convnet of 1.1 M with batch norm (16 images).
AdamW, 1 thread per process, gloo. All variants in the same processes, in turn: blocks of steps, round after round.
speed: time of a block of DistributedDataParallel over that of the variant, so that more is faster. Intervals: bootstrap
over rounds. losses differ: largest relative difference of a loss in the first steps, where all see the same samples."""
SAME = 1e-3  # largest relative difference of a loss that is put down to the order of sums


def work(args: argparse.Namespace) -> None:
    """What each rank does."""
    from rounds import join, measure
    from tasks import TASKS
    from variants import available, of_exactness

    rank, size = join()
    choose = of_exactness if args.exact else available
    measured = measure(TASKS[args.tasks[0]](), rank, size, args.rounds, args.block_steps, args.dir, choose)
    if rank == 0:
        args.worker.write_text(json.dumps(asdict(measured)))


def table(task: str, measured: dict, where: str) -> str:
    from rounds import largest_difference

    seconds = measured["seconds"]
    differences = largest_difference(measured["losses"], "by hand")
    lines = [
        f"{task}, 2 processes, {where}: milliseconds per step; speed: over DistributedDataParallel, and over it fused",
        f"{'':18} {'p10':>7} {'median':>7} {'spread':>7}   {'speed [95 %]':22} {'over fused [95 %]':22} losses differ",
    ]
    for name, blocks in seconds.items():
        times = summarise(blocks)
        speed, over_fused = (paired_ratio(seconds[other], blocks) for other in ("by hand", "by hand, fused"))
        milliseconds = " ".join(f"{value / 1e3:7.1f}" for value in (times.p10, times.median, times.spread))
        difference = differences.get(name, 0.0)
        verdict = f"{difference:.1e}" + ("" if difference <= SAME else "  NOT THE SAME TRAINING")
        lines.append(f"{name:18} {milliseconds}   {speed!s:22} {over_fused!s:22} {verdict}")
    return "\n".join(lines + [f"{name:18} not installed, left out" for name in measured["missing"]])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed of two processes.")
    parser.add_argument("--exact", action="store_true", help="compare exact=True with the default and plain PyTorch")
    parser.add_argument("--tasks", nargs="+", default=["gpt", "mlp", "conv"], choices=["gpt", "mlp", "conv", "tiny"])
    parser.add_argument("--rate", help="limit of the link between the two processes, as tc writes it: 1gbit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block-steps", type=int, default=4, help="steps of a variant in a row")
    parser.add_argument("--out", type=Path, help="write a results page here as well")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dir", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        return work(args)
    if args.rate and (reason := why_no_hosts()):
        parser.error(f"--rate {args.rate}: {reason}; leave it out to measure on the loopback interface")

    load, tables, where = load_before(), [], args.rate or "loopback"
    for task in args.tasks:
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch, "measured.json")
            options = ["--tasks", task, "--rounds", args.rounds, "--block-steps", args.block_steps]
            options += ["--exact"] if args.exact else []
            command = [sys.executable, __file__, *map(str, [*options, "--worker", result, "--dir", f"{scratch}/run"])]
            run_ranks(command, 2, args.rate, f"{scratch}/log.txt", timeout_seconds=1800)
            tables.append(table(task, json.loads(result.read_text()), where))
            print(f"\n{tables[-1]}", flush=True)
    if args.out:
        question = "What exact=True costs" if args.exact else "How fast two processes train"
        write_page(args.out, f"{question}, {where}", [NOTE, *tables], load)


if __name__ == "__main__":
    main()
