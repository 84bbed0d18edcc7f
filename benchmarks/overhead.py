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


def work(args: argparse.Namespace) -> None:
    """What each rank does."""
    from rounds import join, measure
    from tasks import TASKS

    rank, size = join()
    measured = measure(TASKS["tiny"](), rank, size, args.rounds, args.block_steps, args.dir)
    if rank == 0:
        args.worker.write_text(json.dumps(asdict(measured)))


def report(measured: dict, size: int) -> dict:
    seconds = measured["seconds"]
    rows = {}
    print(f"\n{size} process{'es' if size > 1 else ''}: microseconds per step, and over the loop by hand")
    print(
        f"{'':18} {'p10':>7} {'median':>7} {'mean':>7} {'spread':>7}   {'median more [95 %]':24} ratio of blocks [95 %]"
    )
    for name, blocks in seconds.items():
        times, ratio = summarise(blocks), paired_ratio(blocks, seconds["by hand"])
        more = paired_difference(blocks, seconds["by hand"])
        rows[name] = {**asdict(times), "more": asdict(more), "ratio": asdict(ratio)}
        columns = f"{name:18} {times.p10:7.0f} {times.median:7.0f} {times.mean:7.0f} {times.spread:7.0f}"
        print(
            columns
            + (
                ""
                if name == "by hand"
                else f"   {f'{more.median:+.0f} [{more.low:+.0f}, {more.high:+.0f}]':24} {ratio}"
            )
        )
    for name in measured["missing"]:
        print(f"{name:18} not installed, left out")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="What the training loop costs per step.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--block-steps", type=int, default=88, help="steps of a variant in a row; an epoch is 22")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dir", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)

    rows = {}
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch, "measured.json")
            options = [
                "--rounds",
                args.rounds,
                "--block-steps",
                args.block_steps,
                "--worker",
                result,
                "--dir",
                f"{scratch}/run",
            ]
            command = [sys.executable, __file__, *map(str, options)]
            run_ranks(command, size, None, f"{scratch}/log.txt", timeout_seconds=600)
            rows[size] = report(json.loads(result.read_text()), size)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
