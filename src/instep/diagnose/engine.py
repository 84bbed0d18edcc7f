"""All rules over one run: what they find, consequences folded into causes, the finding to act on first in front."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from instep.diagnose import rules
from instep.diagnose.naming import name_ranks
from instep.diagnose.run_view import RunView, read_run
from instep.records.finding import Evidence, Finding
from instep.records.run_dir import RunDir, write_json

Check = Callable[[RunView], Iterable[Finding]]

_CERTAINTY = {"certain": 0, "likely": 1, "possible": 2}
_STOPS_RUNS = ("numbers/silent-pairing",)  # ends in a hang sooner or later, so it comes before the rest of its family
# Of an end that is none of the program's own.
_REASONS = (
    "startup",
    "crash",
    "hang",
    "memory/out-of-memory",
    "memory/killed",
    *_STOPS_RUNS,
    "numbers/forward-past-wrapper",
)
_AFTER_THE_END = ("hang/process-does-not-end", "hang/backend-does-not-end")  # all work had been done before
_FAMILIES = ("startup", "crash", "hang", "nonfinite", "numbers", "memory", "storage", "speed")


@cache
def find_rules() -> dict[str, Check]:
    """Every rule by its id; found by walking the folder."""
    found: dict[str, Check] = {}
    for module in pkgutil.walk_packages(rules.__path__, f"{rules.__name__}."):
        if not module.ispkg:
            family, name = module.name.rsplit(".", 2)[1:]
            found[f"{family}/{name}".replace("_", "-")] = importlib.import_module(module.name).check
    return found


def diagnose(run_dir: Path) -> list[Finding]:
    """The findings of a run, the one to act on first in front. Reads files only; torch is not imported."""
    run = read_run(Path(run_dir))
    return [name_hosts(finding, run) for finding in judge(run)]


def name_hosts(finding: Finding, run: RunView) -> Finding:
    """In a run on several nodes: where the ranks of a finding ran, unless it says so."""
    hosts = list(dict.fromkeys(run.hosts[rank] for rank in finding.ranks if rank in run.hosts))
    if not hosts or any(host in fact.fact for host in hosts for fact in finding.evidence):
        return finding
    fact = Evidence(f"{name_ranks(finding.ranks)} ran on {', '.join(hosts[:8])}", "nodes.json")
    return replace(finding, evidence=(*finding.evidence, fact))


def judge(run: RunView, checks: dict[str, Check] | None = None) -> list[Finding]:
    found = [finding for name, check in (checks or find_rules()).items() for finding in _ask(name, check, run)]
    broke_off = run.stall is not None or any(view.failure is not None for view in run.ranks)
    return order(fold(found), broke_off)


def _ask(name: str, check: Check, run: RunView) -> Iterator[Finding]:
    """What one rule finds. A rule that fails costs its own finding only: the others still have to be heard."""
    try:
        yield from list(check(run))
    except Exception:  # noqa: BLE001  # a mistake in one rule must not take the report with it
        print(f"instep: the rule {name} failed; please report this:\n{traceback.format_exc()}", file=sys.stderr)


def fold(findings: list[Finding]) -> list[Finding]:
    """Drops what another finding explains. `explains` may name a family as `hang/*`; it keeps the ids that were there."""
    kept: list[Finding] = []
    for finding in findings:
        by = [one for one in findings if one is not finding and _explains(one, finding)]
        if not any(not _explains(finding, one) or findings.index(one) < findings.index(finding) for one in by):
            kept.append(finding)
    return [_with_named(finding, findings) for finding in kept]


def _explains(cause: Finding, consequence: Finding) -> bool:
    return any(fnmatch(consequence.id, pattern) for pattern in cause.explains) and cause.id != consequence.id


def _with_named(finding: Finding, all_findings: list[Finding]) -> Finding:
    named = {one.id for one in all_findings if one is not finding and _explains(finding, one)}
    return replace(finding, explains=tuple(sorted(named)))


def order(findings: Iterable[Finding], broke_off: bool = False) -> list[Finding]:
    """The most certain first; of a run that broke off or stands still what may be the reason for that before all else."""

    def key(finding: Finding) -> tuple[bool, int, int, str]:
        family = finding.id.partition("/")[0]
        place = _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)
        is_reason = broke_off and (family in _REASONS or finding.id in _REASONS) and finding.id not in _AFTER_THE_END
        return not is_reason, _CERTAINTY[finding.certainty], -1 if finding.id in _STOPS_RUNS else place, finding.id

    return sorted(findings, key=key)


def write_findings(run_dir: Path, findings: list[Finding]) -> None:
    write_json(RunDir(run_dir).findings, [finding.as_json() for finding in findings])
