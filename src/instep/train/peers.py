"""The two directories of a run, that of `instep run` and that of `Run(dir=...)`, name each other."""

from __future__ import annotations

from pathlib import Path

from instep.records.run_dir import RunDir


def name_peers(directory: Path | None, launched_from: str | None) -> None:
    """Call it on one rank, once `directory` is there. launched_from: what `instep run` calls its directory, if it runs."""
    if directory is None or launched_from is None:
        return
    ours, theirs = RunDir(directory), RunDir(Path(launched_from))
    # A variable that was left in a shell names a directory that no launcher is at work in.
    if theirs.launch.is_file() and ours.root.resolve() != theirs.root.resolve():
        ours.name_peer(theirs.root)
        theirs.name_peer(ours.root)
