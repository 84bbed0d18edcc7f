"""A disk without room costs what is kept of a run, and nothing else."""

from __future__ import annotations

import subprocess
import sys

from launching import Launcher

PRINTS = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
os.write(1, b"\\xff" + b"x" * 5000 + b"\\n")
if dist.get_rank() == 1:
    raise ValueError("mine")
dist.barrier()
"""


def test_a_full_disk_costs_the_files_only(launch: Launcher) -> None:
    # A limit on the size of files: every write beyond the first kilobyte fails, as on a disk that is full.
    words = [sys.executable, "-m", "instep", "run", "-n", "2", "--run-dir", "run", launch.script(PRINTS)]
    ended = subprocess.run(
        ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *words],
        cwd=launch.folder,
        env=launch.environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    err = ended.stderr.decode(errors="replace")
    assert ended.returncode == 1, err
    assert ended.stdout.count(b"x" * 5000) == 2
    assert "ValueError: mine" in err
    assert "Traceback" not in err.split("ValueError: mine")[1], err  # the launcher's own would come last
    assert "run cannot be written (File too large); this run's files are in" in err
