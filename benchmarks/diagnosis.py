"""Does the diagnosis name the fault? Runs a folder of scripts with known faults, and the healthy ones among them.

    python benchmarks/diagnosis.py CASES        # CASES/expected.json beside CASES/scripts/NAME_*.py
    python benchmarks/diagnosis.py CASES --only c001 k01
    python benchmarks/diagnosis.py --healthy examples/*.py

expected.json maps a name to {"kind", "rank", "file_line_contains"}; kind is hang, crash, wrong_result, memory, slow,
launch, or none for a script without a fault. A row is right when the first finding is of a fitting family, names the
rank (where one is expected) and the line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = {
    "hang": ("hang", "numbers", "crash"),  # a rank that leaves others behind ends in an error on some backends
    "crash": ("crash", "startup"),
    "wrong_result": ("numbers",),
    "memory": ("memory",),
    "slow": ("speed",),
    "launch": ("startup", "numbers"),
}
ENDS = 400  # seconds, for one script


@dataclass(frozen=True)
class Row:
    name: str
    expected: str
    found: str
    line: str
    right: bool
    seconds: float


def run(script: Path, is_ill: bool) -> tuple[list[dict[str, Any]], float]:
    """Findings of one script on two ranks, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "instep", "run", "-n", "2", "--stall-after", "8"]
        command += ["--on-stall", "stop"] if is_ill else []
        started = time.monotonic()
        subprocess.run(
            [*command, "--run-dir", f"{folder}/run", str(script.resolve())],
            cwd=folder, capture_output=True, timeout=ENDS, check=False,
        )  # fmt: skip
        findings = json.loads((Path(folder) / "run" / "findings.json").read_text())
        return findings, time.monotonic() - started


def judge(name: str, wanted: dict[str, Any], findings: list[dict[str, Any]], seconds: float) -> Row:
    found = ", ".join(f"{one['certainty']} {one['id']}" for one in findings) or "nothing"
    if wanted["kind"] == "none":
        return Row(name, "nothing", found, "", not findings, seconds)
    first = findings[0] if findings else None
    where = (first or {}).get("where") or {"file": "", "line": 0, "source": ""}
    lines = [wanted[key] for key in ("file_line_contains", "alt_line_contains") if wanted.get(key)]
    named = any(line in where["source"] for line in lines)
    family = first is not None and first["id"].split("/")[0] in FAMILIES[wanted["kind"]]
    rank = wanted.get("rank")
    ranked = rank is None or (first is not None and rank in first["ranks"])
    at = f"{Path(where['file']).name}:{where['line']}{'' if named else ' (another line)'}{'' if ranked else ' (another rank)'}"
    return Row(name, wanted["kind"], found, at, family and ranked and named, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="?", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--healthy", nargs="*", type=Path, default=[])
    args = parser.parse_args()
    known = json.loads((args.cases / "expected.json").read_text()) if args.cases else {}
    work = [(name, next(args.cases.glob(f"scripts/{name}_*.py")), wanted) for name, wanted in known.items()]
    work += [(path.stem, path, {"kind": "none"}) for path in args.healthy]
    rows: list[Row] = []
    print(f"{'':4}{'case':28}{'expected':14}{'found':58}{'line':44}seconds")
    for name, script, wanted in work:
        if args.only and name not in args.only:
            continue
        row = judge(name, wanted, *run(script, wanted["kind"] != "none"))
        rows.append(row)
        print(
            f"{'ok' if row.right else '--':4}{row.name:28}{row.expected:14}{row.found:58}{row.line:44}{row.seconds:.0f}",
            flush=True,
        )
    print(f"{sum(row.right for row in rows)} of {len(rows)} right")
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
