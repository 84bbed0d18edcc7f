"""Findings as they are printed: the same lines everywhere, plain text that reads well in a log too."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from instep.records.finding import Evidence, Finding

_WIDTH = 118
_INDENT = " " * 8


def format_findings(findings: Iterable[Finding]) -> str:
    """All findings, the most certain first, an empty line between them; an empty text when there are none."""
    order = {"certain": 0, "likely": 1, "possible": 2}
    ordered = sorted(findings, key=lambda finding: order[finding.certainty])
    return "\n".join(format_finding(finding) for finding in ordered)


def format_finding(finding: Finding) -> str:
    """certainty, title and id on the first line; then what was seen, why, what to do, where to read on."""
    lines = [f"{finding.certainty}: {finding.title}  [{finding.id}]"]
    for evidence in finding.evidence:
        lines += _entry("saw", _cite(evidence))
    lines += _entry("why", finding.cause)
    if finding.where is not None and str(finding.where) not in finding.title + finding.cause:
        source = f": {finding.where.source}" if finding.where.source else ""
        lines += _entry("at", f"{finding.where}{source}")
    for step in finding.fix:
        lines += _entry("do", step)
    lines += _entry("more", f"instep explain {finding.id}")
    return "\n".join(lines) + "\n"


def _cite(evidence: Evidence) -> str:
    return f"{evidence.fact}  ({evidence.source})" if evidence.source else evidence.fact


def _entry(word: str, text: str) -> list[str]:
    """A labelled line, wrapped under itself; a text of several lines keeps them."""
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines += textwrap.wrap(paragraph, _WIDTH - len(_INDENT), break_long_words=False, break_on_hyphens=False) or [""]
    first, *rest = lines
    return [f"  {word:<6}{first}", *(_INDENT + line for line in rest)]
