"""`instep run`: starts the ranks of a program as torchrun does, watches them, says what went wrong."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import instep
from instep.errors import UsageError
from instep.launch.help import HELP
from instep.launch.launch import BrokenTorch, Outcome, count_devices, launch
from instep.launch.link.sharing import Sharing, describe_first
from instep.launch.meeting import read_nodes
from instep.launch.options import Parsed, parse
from instep.launch.stall import Told, watch_for_stalls
from instep.launch.watch import Hooks
from instep.overrides import read_override
from instep.records.finding import Finding
from instep.records.launch_spec import LaunchSpec, Program
from instep.records.parallel import read_parallel
from instep.records.run_dir import RunDir, keep_json
from instep.report.terminal import format_findings
from instep.settings import read_setting

_EXPLAIN_A_STALL = (
    "numbers/silent-pairing",
    "numbers/forward-past-wrapper",
    "crash/exception",
)  # findings of other families that are the cause of one
_NEEDED_BYTES = 1 << 18  # for a rank's page and the first of its notes
# Certain findings after which a rank never goes on, of which the launcher by itself knows too little.
_HOPELESS = ("hang/lock-across-fork", "hang/transfer-without-partner")
# Families of findings that explain why a rank ended; one of them makes the launcher's own finding needless.
_EXPLAIN_AN_END = ("crash", "memory", "hang", "nonfinite", "startup", "storage")


def run(argv: list[str]) -> int:
    parsed = parse(argv)
    if parsed.ours["help"]:
        print(HELP, end="")
        return 0
    if parsed.program is None:
        raise UsageError("no script was given. Write it after the options, as in `instep run -n 2 train.py`.")
    _check_program(parsed.program)
    try:
        spec = make_spec(parsed, parsed.program)
        outcome = launch(spec, parsed.words, make_hooks(spec), say)
    except BrokenTorch as error:
        print(error, file=sys.stderr, end="")
        say("torch cannot be imported, so no rank was started; mend that first: python -c 'import torch'")
        return 1
    try:
        report(spec, outcome)
    finally:
        if outcome.sharing is not None:
            outcome.sharing.nodes.close()
    return outcome.code


def say(text: str) -> None:
    """A line of the launcher itself."""
    print("\n".join(f"instep: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def make_spec(parsed: Parsed, program: Program) -> LaunchSpec:
    """Everything that a launch needs to know, checked; the run directory is made. Raises UsageError."""
    ours = parsed.ours
    read_nodes(parsed.torch["nnodes"])
    overrides = read_setting("set").value | read_overrides(ours["set"])
    switches = {name: read_setting(name, ours[name]).value for name in ("stall_after", "on_stall")}
    profile = read_profile(ours["profile"])
    num_ranks = count_ranks(parsed.torch["nproc_per_node"], program)
    run_dir = make_run_dir(ours["run_dir"], program)
    spec = LaunchSpec(
        program=program,
        num_local_ranks=num_ranks,
        run_dir=str(run_dir.root),
        torch_options=parsed.torch,
        overrides=overrides,
        watch=read_setting("watch", False if ours["no_watch"] else None).value,
        stall_after_seconds=switches["stall_after"],
        on_stall=switches["on_stall"],
        profile=profile,
        quiet_ranks=read_setting("quiet_ranks", ours["quiet_ranks"] or None).value,
        fork=read_setting("fork", False if ours["no_fork"] else None).value,
    )
    keep_json(run_dir.launch, spec.as_json() | _circumstances(parsed))
    return spec


def _circumstances(parsed: Parsed) -> dict[str, Any]:
    """What launch.json tells beside the request: when, where, with which versions."""
    torch = importlib.util.find_spec("torch")
    version = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    lines = version.read_text(encoding="utf-8").splitlines() if version and version.is_file() else []
    found = next((line.split("=")[1].strip(" '\"") for line in lines if line.startswith("__version__")), None)
    return {
        "started_at": time.time(),
        "command": sys.argv,
        "torchrun_words": list(parsed.words),
        "folder": os.getcwd(),
        "host": os.uname().nodename,
        "versions": {"instep": instep.__version__, "torch": found, "python": sys.version.split()[0]},
    }


def _check_program(program: Program) -> None:
    if program.kind in ("script", "run_path") and not os.path.exists(program.target):
        near = f" (looked in {os.getcwd()})" if not os.path.isabs(program.target) else ""
        raise UsageError(f"there is no script {program.target!r}{near}. Check the path; for a module use -m.")
    if program.kind == "script" and os.path.isdir(program.target) and not list(Path(program.target).glob("__main__*")):
        raise UsageError(
            f"{program.target!r} is a directory without a __main__.py, so there is nothing to run in it. "
            "Name the script, or for a module use -m."
        )


def count_ranks(text: str, program: Program) -> int:
    try:
        count = int(text)
    except ValueError:
        return count_devices(text, say, program)
    if count < 1:
        raise UsageError(f"-n {text} starts no rank. Allowed: 1 or more, auto, cpu, gpu, xpu.")
    return count


def read_overrides(words: list[str]) -> dict[str, str]:
    """`--set name=value`, several times. Raises UsageError for a name or a value that instep.Run cannot take."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--set {word}: write it as NAME=VALUE, as in --set micro_batch=4.")
        read_override(name, value)
        if name == "parallel":
            _check_split(value)
        found[name] = value
    return found


def _check_split(text: str) -> None:
    try:
        read_parallel(text)
    except UsageError as error:
        raise UsageError(f"--set parallel={text}: {error}") from error


def read_profile(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise UsageError(f"--profile has to be FIRST:LAST, two steps in order, as in 10:20, but is {text!r}.")
    return int(first), int(last)


def make_run_dir(wanted: str | None, program: Program) -> RunDir:
    """The folder of this run, made. Where it cannot be written, a temporary one, said in one line."""
    chosen = read_setting("run_dir", wanted).value
    name = f"{program.short_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        run_dir = RunDir(_make_folder(Path(chosen)) if chosen else _make_new_folder(Path("runs"), name))
        run_dir.forget()
        return run_dir
    except OSError as error:
        root = Path(tempfile.mkdtemp(prefix=f"instep-{name}-"))
        say(
            f"{error.filename or chosen or 'runs'} cannot be written ({error.strerror}); this run's files are in {root}"
        )
        return RunDir(root)


def _make_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    _check_room(path)
    return path.absolute()


def _check_room(path: Path) -> None:
    """A folder may exist and yet not be writable, or on a disk that is full. Raises OSError."""
    with tempfile.TemporaryFile(dir=path) as file:  # closing it writes the rest
        file.write(bytes(_NEEDED_BYTES))


def _make_new_folder(parent: Path, name: str) -> Path:
    """A folder of its own for each run, also for two that start in the same second."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1000):
        path = parent / (f"{name}-{number}" if number else name)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        _check_room(path)
        return path.absolute()
    raise OSError(0, "a thousand runs have this name", str(parent / name))


def make_hooks(spec: LaunchSpec) -> Hooks:
    """What diagnosis does while ranks run, where it is there: it looks for stalls, and says what it knows of one."""
    if not spec.watch:
        return Hooks()
    run_dir = RunDir(Path(spec.run_dir))

    told: set[tuple[str, str]] = set()

    def describe() -> Told:
        findings = [
            one
            for one in diagnose_run(run_dir)
            if one.id.startswith(("hang/", "startup/")) or one.id in _EXPLAIN_A_STALL
        ]
        keep_json(run_dir.findings, [finding.as_json() for finding in findings])
        hopeless = any(one.id in _HOPELESS and one.certainty == "certain" for one in findings)
        news = [one for one in findings if (one.id, one.title) not in told]  # the rest is said again at the end
        told.update((one.id, one.title) for one in news)
        return Told(format_findings(news), hopeless)

    return Hooks(on_tick=watch_for_stalls(run_dir, spec.stall_after_seconds, spec.on_stall == "stop", describe))


def diagnose_run(run_dir: RunDir) -> list[Finding]:
    """What diagnosis makes of the files of this run. Its own failure is said, and takes nothing else with it."""
    try:
        from instep.diagnose.engine import diagnose

        return list(diagnose(run_dir.root))
    except Exception as error:  # noqa: BLE001  # the exit code and the failing rank's words must come out in any case
        say(f"this run could not be diagnosed ({type(error).__name__}: {error})")
        return []


def report(spec: LaunchSpec, outcome: Outcome) -> None:
    """The last words: the failing rank's own, then the findings, which are kept in findings.json too."""
    run_dir = RunDir(Path(spec.run_dir))
    elsewhere = _report_of_first(run_dir, outcome.sharing)
    text = outcome.failure_text + (elsewhere if elsewhere is not None else _own_report(spec, run_dir, outcome))
    if text:
        sys.stderr.write(text)
        sys.stderr.flush()
    if outcome.code != 0:
        say(f"exit code {outcome.code}; logs of all ranks are in {_short(run_dir.root)}")


def _own_report(spec: LaunchSpec, run_dir: RunDir, outcome: Outcome) -> str:
    """The findings of all ranks that are known here, printed and kept."""
    findings = diagnose_run(run_dir) if spec.watch and run_dir.ranks() else []
    explained = any(one.id.split("/")[0] in _EXPLAIN_AN_END or one.id in _EXPLAIN_A_STALL for one in findings)
    elsewhere = outcome.sharing.crashes() if outcome.sharing is not None else []
    crashes = [*([outcome.crash] if outcome.crash is not None else []), *map(Finding.from_json, elsewhere)]
    found = findings if explained else [*crashes[:1], *findings]
    rows = [finding.as_json() for finding in found]
    keep_json(run_dir.findings, rows)
    if outcome.sharing is not None:
        outcome.sharing.tell_report(rows)
    return format_findings([finding for finding in found if not _was_printed(finding, outcome.sharing)])


def _was_printed(finding: Finding, sharing: Sharing | None) -> bool:
    """An exception of a rank of this machine has said all in its own words."""
    return finding.id == "crash/exception" and (sharing is None or bool(set(finding.ranks) & set(sharing.nodes.ranks)))


def _report_of_first(run_dir: RunDir, sharing: Sharing | None) -> str | None:
    """On the other nodes of a run on several: where the findings are, if any; None where this node reports for itself."""
    findings = sharing.await_report() if sharing is not None and not sharing.nodes.is_first else None
    if sharing is None or findings is None:
        return None
    if not sharing.nodes.shares_folder:
        keep_json(run_dir.findings, findings)
    return f"instep: {describe_first(sharing.nodes)}\n" if findings else ""


def _short(path: Path) -> str:
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown
