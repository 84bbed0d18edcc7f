"""Packing the run directory of a script as a test case, and opening it again somewhere else.

    python tests/cases/recording.py tests/cases/hang/uneven_batches

runs script.py in that folder under `instep run` and keeps what the ranks left behind in run.tar.xz.
"""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from instep.records import recording as layout

FOLDER = b"{folder of the case}"
KEPT = ("events.jsonl", "page.bin", "snapshot.json", "failure.json", "crash.txt", "stacks.txt")
NO_PROCESS = 2_000_000_000  # in place of the pid: no process of the machine that reads it has this number
CASES = Path(__file__).parent


def script_of(case: Path) -> Path:
    """Healthy cases share a folder of scripts; an ill one has its own."""
    own = case / "script.py"
    return own if own.is_file() else case.parent / "scripts" / f"{case.name}.py"


def pack(run_dir: Path, case: Path) -> None:
    with tarfile.open(case / "run.tar.xz", "w:xz") as archive:
        files = [path for name in KEPT for path in sorted(run_dir.glob(f"rank*/{name}"))]
        files += [path for name in ("stall.json", "pairing.json") if (path := run_dir / name).is_file()]
        for path in files:
            data = path.read_bytes().replace(str(script_of(case).resolve().parent).encode(), FOLDER)
            if path.name == "page.bin":
                data = bytearray(data)
                struct.pack_into("<i", data, 8, NO_PROCESS)
            if data:
                entry = tarfile.TarInfo(str(path.relative_to(run_dir)))
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(bytes(data)))


def unpack(case: Path, run_dir: Path) -> None:
    """The run directory of a case, as if it had run from the case's own folder."""
    with tarfile.open(case / "run.tar.xz") as archive:
        for entry in archive.getmembers():
            file = archive.extractfile(entry)
            assert file is not None
            target = run_dir / entry.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read().replace(FOLDER, str(script_of(case).resolve().parent).encode()))
    assert layout.read_page(run_dir / "rank0" / "page.bin") is not None, f"{case}: recorded with another layout"


def record(case: Path) -> int:
    script = script_of(case).resolve()
    case.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "instep", "run", "-n", "2", "--stall-after", "6", "--on-stall", "stop"]
        done = subprocess.run([*command, "--run-dir", folder, str(script)], timeout=120, check=False)
        pack(Path(folder), case)
    return done.returncode


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, "exit code", record(Path(name)))
