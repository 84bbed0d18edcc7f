"""Arguments of a script that torch.distributed.launch used to pass and torchrun does not."""

from __future__ import annotations

import ast

from instep.diagnose.source import load
from instep.records.finding import CallSite


def find_local_rank_argument(near: CallSite | None) -> CallSite | None:
    """Where the file still has the argument `--local_rank`, which now keeps its default on every rank."""
    source = load(near.file) if near else None
    for node in ast.walk(source.tree) if source else ():
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument" and source is not None:
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
            if any(name in ("--local_rank", "--local-rank") for name in names):
                return source.site(node)
    return None
