"""What does the loop cost? A model of 5,000 parameters, so that a step is little else than the loop around it.

    python benchmarks/overhead.py                       # one process, then two; about a minute
    python benchmarks/overhead.py --ranks 1 --rounds 5

Against the loop by hand (DistributedDataParallel on two processes), Accelerate and Lightning Fabric, where installed.
instep runs with all that is on by default: progress, metrics.jsonl, the check for finite gradients.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from intervals import paired_difference, paired_ratio, summarise
from links import run_ranks
from page import load_before, write_page

NOTE = """A 64-64-10 MLP on scikit-learn's digits, 64 samples per step, AdamW, 1 thread per process, gloo.
All variants in the same processes, in turn: blocks of steps, round after round. Intervals: bootstrap over rounds.
spread: 25th to 75th percentile. median more: difference of a block's median step from that of the loop by hand.
ratio: time of a block over that of the loop by hand (DistributedDataParallel on two processes)."""


def work(args: argparse.Namespace) -> None:
    """What each rank does."""
    from rounds import join, measure
    from tasks import TASKS

    rank, size = join()
    measured = measure(TASKS["tiny"](), rank, size, args.rounds, args.block_steps, args.dir)
    if rank == 0:
        args.worker.write_text(json.dumps(asdict(measured)))


def table(measured: dict, size: int) -> str:
    seconds = measured["seconds"]
    lines = [
        f"{size} process{'es' if size > 1 else ''}: microseconds per step, and over the loop by hand",
        f"{'':18} {'p10':>7} {'median':>7} {'mean':>7} {'spread':>7}   {'median more [95 %]':24} ratio [95 %]",
    ]
    for name, blocks in seconds.items():
        times = summarise(blocks)
        line = f"{name:18} {times.p10:7.0f} {times.median:7.0f} {times.mean:7.0f} {times.spread:7.0f}"
        if name != "by hand":
            more, ratio = paired_difference(blocks, seconds["by hand"]), paired_ratio(blocks, seconds["by hand"])
            line += f"   {f'{more.median:+.0f} [{more.low:+.0f}, {more.high:+.0f}]':24} {ratio}"
        lines.append(line)
    return "\n".join(lines + [f"{name:18} not installed, left out" for name in measured["missing"]])


def main() -> None:
    parser = argparse.ArgumentParser(description="What the training loop costs per step.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--block-steps", type=int, default=88, help="steps of a variant in a row; an epoch is 22")
    parser.add_argument("--out", type=Path, help="write a results page here as well")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dir", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)

    load, tables = load_before(), []
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch, "measured.json")
            options = ["--rounds", args.rounds, "--block-steps", args.block_steps]
            command = [sys.executable, __file__, *map(str, [*options, "--worker", result, "--dir", f"{scratch}/run"])]
            run_ranks(command, size, None, f"{scratch}/log.txt", timeout_seconds=900)
            tables.append(table(json.loads(result.read_text()), size))
            print(f"\n{tables[-1]}", flush=True)
    if args.out:
        write_page(args.out, "What the training loop costs per step", [NOTE, *tables], load)


if __name__ == "__main__":
    main()
