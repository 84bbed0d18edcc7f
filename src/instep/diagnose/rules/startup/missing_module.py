"""A module that the script imports is not there.

## What it sees
ModuleNotFoundError, the line that imports, the ranks it happened on, and the interpreter and folder they ran with.

## Why it matters
The rank ends before it meets the others.

## What to do
Install the package for the interpreter that is named, or start the script from the folder that holds the module. `instep run script.py`
puts the script's folder on the path, as `python script.py` does; `-m package.module` puts the current folder there.

## When it is wrong
Scripts that catch the error and go on without the module are not reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from instep.diagnose.frames import source_line
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding

_NAMED = re.compile(r"No module named '?([\w.]+)'?")


def check(run: RunView) -> Iterator[Finding]:
    found = [(view, view.error) for view in run.ranks if view.error and view.error["type"] == "ModuleNotFoundError"]
    if not found:
        return
    view, error = found[0]
    match = _NAMED.search(error["message"])
    module = match.group(1) if match else "a module"
    frame = error["frames"][0] if error["frames"] else None
    where = CallSite(frame["file"], frame["line"], source_line(frame["file"], frame["line"])) if frame else None
    near = find_near(module, where, run.launch.get("folder"))
    ranks = tuple(one.rank for one, _ in found)
    some = f" on {name_ranks(ranks)} only" if len(ranks) < run.world_size else ""
    yield Finding(
        id="startup/missing-module",
        title=f"there is no module {module!r}{some}",
        cause=f"{short(where)} imports it, and no folder on the path of this interpreter holds it."
        + (f" {near} has that name, but its folder is not on the path." if near else ""),
        fix=(
            f"start from the folder of {near.name}, or set PYTHONPATH={near.parent}"
            if near
            else f"install what provides {module.partition('.')[0]!r} for the interpreter that runs the ranks",
        ),
        evidence=(view.cite(f"{error['type']}: {error['message'].splitlines()[0][:160]}", "failure.json"),),
        certainty="certain",
        ranks=ranks if some else (),
        where=where,
        explains=("crash/*", "hang/*"),
    )


def find_near(module: str, where: CallSite | None, folder: str | None) -> Path | None:
    """A file or package of that name in the folders around the script or the one it was started from."""
    name = module.partition(".")[0]
    starts = [Path(where.file).parent] if where else []
    starts += [Path(folder)] if folder else []
    for start in starts:
        for place in (start, start.parent, start / "src"):
            for path in (place / f"{name}.py", place / name):
                if path.is_file() or (path / "__init__.py").is_file():
                    return path
    return None
