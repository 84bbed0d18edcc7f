"""Step time and memory of each split: a GPT of 50 M parameters on 2 and on 4 processes, beside the same written by hand.

    python benchmarks/parallel.py                          # all splits; about twenty-five minutes
    python benchmarks/parallel.py --splits zero3 --ranks 2 --rounds 4

All variants of a split train in the same processes, in turn, on the same samples from the same weights; the losses of
the first steps are compared before anything is timed. Memory is measured in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from intervals import paired_ratio, summarise
from links import run_ranks
from page import load_before, write_page

# For times: glibc keeps what is freed. Else it depends on the order in which variants were made whether one gets its memory
# back as fresh pages, step after step, which costs up to a tenth of one.
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
SAME = 1e-3  # largest relative difference of a loss that is put down to the order of sums
NOTE = """GPT of 49.6 M parameters, 2 sequences of 64 tokens per rank and step, AdamW (fused), 1 thread per process, gloo.
by hand: as the tutorials have it, with a fused optimizer: DistributedDataParallel, ZeroRedundancyOptimizer over it (zero1),
FSDP2 with each block a unit, parallelize_module with the plan that instep gets, 1F1B over equally many blocks per stage.
instep, gloo: with INSTEP_SHARED_MEMORY=off, through the same sockets as by hand (gradients of shards by all-to-all).
time over by hand: of a block of steps of the variant over that by hand just before or after; below 1 is faster.
Intervals: bootstrap over rounds. For times, glibc keeps freed memory in all variants alike. memory: the most that a process
had in two steps, once training had settled, over what it had before its model, the largest over ranks; shared: the rank's
part of memory that ranks map together, on top.
hybrid: 2 copies of 2 shards. shard x tensor: 2 shards of halves of each layer. recomputed: every block runs a second time in
backward. tensor: all ranks take the whole batch. pipeline: each sequence is a micro-batch, instep chooses the cut.
deepspeed, where it is installed: its ZeRO with the same fused optimizer of PyTorch, without overlap_comm."""


def work(args: argparse.Namespace) -> None:
    """What each rank does."""
    import torch.distributed as dist
    from rounds import join, measure
    from split_memory import measure_peak
    from split_variants import gpt_50m, of_split

    rank, size = join()
    split = args.splits[0]
    if args.memory:
        peak = measure_peak(of_split(split, None)[0][args.memory], rank, size)
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, (peak.private, peak.shared))
        result: Any = {"private": max(p for p, _ in everyone), "shared": max(s for _, s in everyone)}
    else:
        chosen = lambda directory: of_split(split, directory)  # noqa: E731
        result = asdict(measure(gpt_50m(size), rank, size, args.rounds, args.block_steps, args.dir, chosen, 4))
    if rank == 0:
        args.worker.write_text(json.dumps(result))


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """For processes started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def launch(split: str, size: int, *words: object) -> dict[str, Any]:
    from split_memory import ENVIRONMENT

    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "measured.json")
        options = [*words, "--splits", split, "--worker", result, "--dir", f"{scratch}/run"]
        command = [sys.executable, __file__, *map(str, options)]
        with environment(ENVIRONMENT if "--memory" in words else KEEPS_MEMORY):
            run_ranks(command, size, None, f"{scratch}/log.txt", timeout_seconds=1800)
        return json.loads(result.read_text())


def table(split: str, size: int, measured: dict[str, Any], peaks: dict[str, dict[str, int]]) -> str:
    from rounds import largest_difference

    seconds = measured["seconds"]
    differences = largest_difference(measured["losses"], "by hand")
    lines = [
        f"{split}, {size} processes: milliseconds per step, megabytes per rank",
        f"{'':14} {'p10':>7} {'median':>7} {'spread':>7}   {'time over by hand [95 %]':24} {'memory':>7} {'shared':>7}   losses differ",
    ]
    for name, blocks in seconds.items():
        times = summarise(blocks)
        milliseconds = " ".join(f"{value / 1e3:7.1f}" for value in (times.p10, times.median, times.spread))
        ratio = paired_ratio(blocks, seconds["by hand"])
        difference = differences.get(name, 0.0)
        verdict = f"{difference:.1e}" + ("" if difference <= SAME else "  NOT THE SAME TRAINING")
        memory = " ".join(f"{peaks[name][kind] / 1e6:7.1f}" for kind in ("private", "shared"))
        lines.append(f"{name:14} {milliseconds}   {ratio!s:24} {memory}   {verdict}")
    return "\n".join(lines + (against_arithmetic(size, peaks) if split == "zero3" else []))


def against_arithmetic(size: int, peaks: dict[str, dict[str, int]]) -> list[str]:
    """What the parts of `zero3` come to, beside what was measured."""
    from split_memory import activation_bytes, arithmetic

    lines, activations = [], activation_bytes(size)
    for name, peak in peaks.items():
        if name == "deepspeed":  # which gathers and sends in other portions
            continue
        parts = arithmetic(size, activations, sent=3 if peak["shared"] else 4)
        said = f"shards {parts.shards / 1e6:.1f} + gathered and sent {parts.gathered / 1e6:.1f} + growing {parts.growing / 1e6:.1f}"
        off = peak["private"] / parts.total - 1
        lines.append(f"{name:14} arithmetic: {said} = {parts.total / 1e6:.1f}, measured {off:+.1%}")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Step time and memory of each split.")
    parser.add_argument("--splits", nargs="+", default=None, metavar="SPLIT")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block-steps", type=int, default=1, help="steps of a variant in a row")
    parser.add_argument("--out", type=Path, help="write a results page here as well")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--dir", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        return work(args)
    from split_variants import SPLITS, of_split

    load, tables = load_before(), []
    for size in args.ranks:
        for split in args.splits or [name for name, split in SPLITS.items() if size in split.sizes]:
            measured = launch(split, size, "--rounds", args.rounds, "--block-steps", args.block_steps)
            peaks = {name: launch(split, size, "--memory", name) for name in of_split(split, None)[0]}
            tables.append(table(split, size, measured, peaks))
            print(f"\n{tables[-1]}", flush=True)
    if args.out:
        write_page(args.out, "What each split costs", [NOTE, *tables], load)


if __name__ == "__main__":
    main()
