"""Lines near a line: where the user's source says a word, or gives another name to the inner model."""

from __future__ import annotations

import ast

from instep.diagnose.source import load
from instep.records.finding import CallSite


def line_with(site: CallSite | None, *words: str) -> CallSite | None:
    """The site itself when its line has one of the words, else the nearest line above in the same function that has."""
    source = load(site.file) if site else None
    if site is None or source is None:
        return site
    function = source.function_at(site.line)
    first = getattr(function, "lineno", 1)
    for line in range(site.line, first - 1, -1):
        if any(word in source.site(line).source.partition("#")[0] for word in words):
            return source.site(line)
    return site


def inner_call(site: CallSite | None) -> CallSite | None:
    """Near a site, the call of `x.module` or of a variable that was made from it."""
    source = load(site.file) if site else None
    if site is None or source is None:
        return site
    aliases = {
        target.id
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign) and ".module" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(source.function_at(site.line)) if isinstance(node, ast.Call)]
    inner = [node for node in calls if _is_inner(node.func, aliases) and node.lineno <= site.line]
    return source.site(max(inner, key=lambda node: node.lineno)) if inner else site


def _is_inner(called: ast.expr, aliases: set[str]) -> bool:
    if isinstance(called, ast.Name):
        return called.id in aliases
    return isinstance(called, ast.Attribute) and called.attr == "module"
