"""What the ranks' wrapped models were called with, side by side, for scripts that cut their batches by hand."""

from __future__ import annotations

import ast

from instep.diagnose.model_facts import same_group, wraps
from instep.diagnose.run_view import RunView
from instep.diagnose.slices import definitions
from instep.diagnose.source import load
from instep.records.finding import CallSite

MIN_CALLS = 8
_DRAWS = ("rand", "randn", "rand_like", "randn_like", "normal", "empty_like")


def find_equal_inputs(run: RunView) -> tuple[int, int, CallSite] | None:
    """How many forwards of a wrapped model had the same inputs on all ranks, how many were compared, and their line.
    None unless nearly all were the same, with different inputs from call to call."""
    for wrapper in wraps(run.ranks[0]):
        members = same_group(run, wrapper)
        if len(members) != run.world_size:
            continue
        tables = [
            {row["call"]: tuple(row["prints"]) for row in view.named("inputs") if row["wrapper"] == wrapper}
            for view in members
        ]
        calls = [call for call in tables[0] if all(call in table for table in tables) and any(tables[0][call])]
        equal = [call for call in calls if len({table[call] for table in tables}) == 1]
        varied = len({tables[0][call] for call in equal})
        if len(equal) < MIN_CALLS or len(equal) < 0.9 * len(calls) or varied < len(equal) // 2:
            continue
        row = next(row for row in members[0].named("inputs") if row["wrapper"] == wrapper)
        site = members[0].site(row["site"])
        if site is not None:
            return len(equal), len(calls), site
    return None


def find_cut(site: CallSite) -> CallSite | None:
    """Where a script takes the inputs of a forward out of a set of its own: an index in what they are made of.

    None when they are made up on the spot, as by `torch.randn` in a trial: nothing is shared out there.
    """
    source = load(site.file)
    statement = source.statement_at(site.line) if source else None
    if source is None or statement is None:
        return None
    function = source.function_at(site.line)
    for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call) and node.args):
        for node in definitions(source, call.args[0], function):
            for part in ast.walk(node):
                if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Load):
                    return source.site(part)
                if isinstance(part, ast.Call) and getattr(part.func, "attr", "") in _DRAWS:
                    return None
    return None
