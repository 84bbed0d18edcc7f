"""A results page: what was asked, on what hardware, when, by which command, and the figures."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BUSY = 0.5  # other processes that want a core, on average over the minute before, above which figures are provisional


def processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def hardware() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {processor()}, {memory:.0f} GiB of memory, no GPU used, {platform.system()} {platform.release()}"


def software() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "accelerate", "lightning-fabric", "deepspeed"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    source = Path(__file__).parent
    commit = subprocess.run(
        ["git", "-C", source, "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return ", ".join([*found, f"instep at {commit.stdout.strip() or 'no commit'}"])


def load_before() -> float:
    """Processes that wanted a core in the minute before the measurement; ask before it starts."""
    return os.getloadavg()[0]


def write_page(path: Path, title: str, figures: list[str], load: float) -> None:
    """figures: text tables, as printed. Marks the page provisional when the machine was busy before the measurement."""
    words = [word for word, before in zip(sys.argv[1:], sys.argv) if "--out" not in (word, before)]
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
    provisional = (
        f"**Provisional**: before the start {load:.1f} other processes wanted the {os.cpu_count()} cores, so that "
        "times are inflated and intervals wide.\n\n"
    )
    tables = "\n\n".join(f"```\n{table.strip()}\n```" for table in figures)
    path.write_text(
        f"# {title}\n\n{provisional if load > BUSY else ''}"
        f"- Hardware: {hardware()}\n- Software: {software()}\n- Date: {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC\n"
        f"- Command: `{command}`\n\n{tables}\n"
    )
