"""How long from the command to the first barrier and to the first training step, and how much memory: against torchrun.

    python benchmarks/launch.py --ranks 2 8 --rounds 5 [--out benchmarks/results/launch_<hardware>_<date>.md]

Both launchers run the same script in turn, so that what else the machine does meets both alike: one script that only
meets, one that trains a step. Times are those of the
last rank; memory is the proportional set size (PSS) of all processes of the launch, taken while every rank has trained
one step and waits. Medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEETING = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
times = {"barrier": time.time()}
"""
STEP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 64)).square().mean().backward()
optimizer.step()
times["step"] = time.time()
"""
WAIT = """
folder = os.environ["BENCHMARK_FOLDER"]
partial = f"{folder}/.{dist.get_rank()}"
with open(partial, "w") as file:
    json.dump(times, file)
os.rename(partial, f"{folder}/rank{dist.get_rank()}")
while not os.path.exists(f"{folder}/measured"):
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""
SCRIPTS = {"meeting": MEETING + WAIT, "training": MEETING + STEP + WAIT}
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node"],
    "instep": ["-m", "instep", "run", "--run-dir", "run", "-n"],
}


def read_family(mark: str) -> list[int]:
    """Every process that carries the mark in its environment."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


def read_pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def measure(launcher: str, num_ranks: int, watch: bool, kind: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPTS[kind])
        command = [sys.executable, *LAUNCHERS[launcher], str(num_ranks)]
        if launcher == "instep" and not watch:
            command.append("--no-watch")
        environ = os.environ | {"BENCHMARK_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        before = os.times()
        start = time.time()
        process = subprocess.Popen(
            [*command, str(script)],
            cwd=folder,
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        told = await_ranks(Path(folder), num_ranks, process)
        memory = sum(map(read_pss_bytes, read_family(folder)))
        Path(folder, "measured").touch()
        _, errors = process.communicate(timeout=120)
        if process.returncode:
            raise RuntimeError(f"{launcher} ended with {process.returncode}:\n{errors}")
        after = os.times()
        reached = {f"first {name}, s": max(one[name] for one in told) - start for name in told[0]}
        return reached | {
            "command to exit, s": time.time() - start,
            "CPU of all, s": after[2] + after[3] - before[2] - before[3],
            "memory of all, MB": memory / 1e6,
        }


def await_ranks(folder: Path, num_ranks: int, process: subprocess.Popen[str]) -> list[dict[str, float]]:
    files = [folder / f"rank{rank}" for rank in range(num_ranks)]
    deadline = time.monotonic() + 300
    while not all(file.exists() for file in files):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"the ranks did not come to their first step:\n{process.communicate()[1]}")
        time.sleep(0.01)
    return [json.loads(file.read_text()) for file in files]


def compare(num_ranks: int, rounds: int, watch: bool, kind: str) -> list[str]:
    """Rows of a table."""
    seen: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in LAUNCHERS}
    for number in range(rounds):
        for launcher in LAUNCHERS if number % 2 else reversed(LAUNCHERS):
            seen[launcher].append(measure(launcher, num_ranks, watch, kind))
    rows = []
    for name in seen["instep"][0]:
        theirs, ours = (statistics.median(one[name] for one in seen[each]) for each in ("torchrun", "instep"))
        spread = " ".join(f"{one[name] / other[name]:.2f}" for one, other in zip(seen["instep"], seen["torchrun"]))
        rows.append(f"| {kind} | {num_ranks} | {name} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} | {spread} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-watch", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import torch

    load = os.getloadavg()[0]
    lines = [
        f"Launch against torchrun {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load of the machine at the start {load:.1f}, {arguments.rounds} rounds in turn, "
        f"{'not watched' if arguments.no_watch else 'watched'}. Medians; the ratio of each round last.",
        "",
        "| script | ranks | what | torchrun | instep run | ratio | ratio of each round |",
        "|---|---|---|---|---|---|---|",
    ]
    for num_ranks in arguments.ranks:
        for kind in SCRIPTS:
            lines += compare(num_ranks, arguments.rounds, not arguments.no_watch, kind)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
