"""`instep diagnose`: what went wrong in a run, or where each rank of a running one is now."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from instep.cli.arguments import CommandParser
from instep.diagnose.engine import diagnose
from instep.diagnose.now import describe_now, is_running
from instep.diagnose.run_view import read_json, read_run
from instep.errors import UsageError
from instep.records.finding import Finding
from instep.records.run_dir import RunDir
from instep.report.terminal import format_findings

_FOLLOW_SECONDS = 1.0
_SEEN_BY_THE_LAUNCHER = ("crash/signal", "memory/killed", "crash/exception")


def run(argv: list[str]) -> int:
    parser = CommandParser(
        "diagnose",
        "Judges a finished, killed or still running run from its run directory.\n"
        "Of a running one it says where each rank is; --follow says so every second until it ends.",
        "instep diagnose runs/train-20260101-120000",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder that `instep run` named at its start or end")
    parser.add_argument("--follow", action="store_true", help="of a running run: refresh every second until it ends")
    parser.add_argument(
        "--replay", action="store_true", help="do the operation that made the first NaN again, from its kept inputs"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    options = parser.parse_args(argv)
    root = find_run(Path(options.run_dir))
    if options.replay:
        sys.stdout.write(replay_all(root))
        return 0
    while options.follow and is_running(root):
        print(describe_now(read_run(root)), flush=True)
        time.sleep(_FOLLOW_SECONDS)
    findings = judge_again(root)
    if options.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=1))
        return 0
    if is_running(root):
        print(describe_now(read_run(root)))
    sys.stdout.write(format_findings(findings) or "nothing to report: no rule found a fault in this run\n")
    return 0


def judge_again(root: Path) -> list[Finding]:
    """What the rules find, after what only the launcher could see: how a rank's process ended."""
    kept: Any = read_json(RunDir(root).findings) or []
    crashes = [Finding.from_json(row) for row in kept if row["id"] in _SEEN_BY_THE_LAUNCHER]
    found = diagnose(root)
    return [*(one for one in crashes if one.id not in {each.id for each in found}), *found]


def replay_all(root: Path) -> str:
    """What each kept operation gives when it is done again. Raises UsageError when the run has kept none."""
    paths = [path for rank in RunDir(root).ranks() if (path := RunDir(root).rank(rank).replay).is_file()]
    if not paths:
        raise UsageError(
            f"{str(root)!r} holds no operation to replay: none of its ranks saw a loss become NaN or infinite on the CPU. "
            "Without --replay the run is judged from what its ranks noted."
        )
    from instep.launch.probe.replay import replay  # imports torch

    try:
        return "\n".join(replay(path) for path in paths)
    except ValueError as error:
        raise UsageError(f"{error}. Run the script again to have it kept anew.") from None


def find_run(path: Path) -> Path:
    """The folder with the ranks' files: the one given, or its peer. Raises UsageError."""
    if not path.is_dir():
        raise UsageError(
            f"there is no run directory {str(path)!r}. Runs are kept in runs/, one folder each; see: ls runs"
        )
    if RunDir(path).ranks():
        return path
    peer = read_json(RunDir(path).peer)
    other = Path(str(peer["peer"])) if peer else None
    if other is not None and RunDir(other).ranks():
        return other
    raise UsageError(
        f"{str(path)!r} holds no files of ranks (rank0, rank1, ...), so there is nothing to judge. "
        "Give the folder that `instep run` names at its start or end."
    )
