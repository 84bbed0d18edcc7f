"""`instep checkpoints DIR`: lists, verifies, compares and converts checkpoints, without a GPU and without the script.

Listing and verifying need no torch; comparing and converting import it.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

from instep.cli.arguments import CommandParser
from instep.errors import CheckpointError, UsageError
from instep.records.run_dir import CheckpointDir, RunDir
from instep.train.checkpoint.manifest import Damage, Manifest, find_damage, read_manifest
from instep.train.checkpoint.retention import choose_best
from instep.units import format_bytes

MOST_LINES = 20  # of a comparison; --json has all


@dataclass(frozen=True)
class Row:
    """One checkpoint as listed. problems: empty when it is whole, as far as it was looked at."""

    path: str
    manifest: Manifest | None
    problems: list[str]


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if sum(map(bool, (options.verify, options.compare, options.export))) > 1:
        raise UsageError("checkpoints: --verify, --compare and --export are three things; ask for one at a time.")
    path = Path(options.dir)
    if not path.exists():
        raise UsageError(f"checkpoints: {path} does not exist.")
    if options.compare:
        return _compare(path, options)
    if options.export:
        return _export(path, Path(options.export), options)
    return _list(path, options)


def _parser() -> CommandParser:
    parser = CommandParser(
        "checkpoints",
        "Lists, verifies, compares and converts checkpoints.\n"
        "DIR is a run directory or one checkpoint in it; --export also takes a file or folder of weights in another\n"
        "format (torch.save, safetensors, Hugging Face, torch.distributed.checkpoint).",
        "instep checkpoints runs/gpt --verify",
    )
    parser.add_argument("dir", metavar="DIR")
    parser.add_argument("--verify", action="store_true", help="read every file through; exit code 1 if one is damaged")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two steps in DIR, or two paths")
    parser.add_argument("--export", metavar="FILE", help="write the weights as FILE, .safetensors or .pt (torch.save)")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint to export (default: the newest)")
    parser.add_argument("--model", metavar="NAME", help="which model to export, where there are several")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _list(path: Path, options: Namespace) -> int:
    rows = [_look_at(directory, options.verify) for directory in _directories(path)]
    if options.json:
        print(json.dumps([_row_json(row) for row in rows], indent=1))
    elif not rows:
        print(f"no checkpoints in {path}")
    else:
        print("\n".join(_describe(rows, options.verify)))
    return 1 if options.verify and any(row.problems for row in rows) else 0


def _look_at(directory: CheckpointDir, verify: bool) -> Row:
    try:
        manifest = read_manifest(directory.root)
    except Damage as damage:
        return Row(str(directory.root), None, [str(damage)])
    return Row(str(directory.root), manifest, find_damage(directory.root, manifest, None if verify else ()))


def _row_json(row: Row) -> dict[str, object]:
    described = asdict(row.manifest) if row.manifest else {}
    return {"path": row.path, "whole": not row.problems, "problems": row.problems, **described}


def _describe(rows: list[Row], verified: bool) -> list[str]:
    manifests = [row.manifest for row in rows if row.manifest is not None]
    newest = max(manifests, key=lambda each: each.sequence, default=None)
    best = choose_best(manifests)
    lines: list[str] = []
    for row in rows:
        found, notes = row.manifest, []
        if found is not None:
            ranks = f"{found.world_size} rank{'s' if found.world_size > 1 else ''}"
            notes = [format_bytes(found.bytes), found.saved_at, f"by {ranks}"]
            notes += [f"metric {found.metric:.6g}"] if found.metric is not None else []
            notes += ["best"] if found is best else []
            notes += ["newest"] if found is newest else []
        state = "damaged" if row.problems else "whole, checksums verified" if verified else "complete"
        lines.append(f"{Path(row.path).name}  {'  '.join([*notes, state])}")
        lines += [f"    {problem}" for problem in row.problems]
    return lines


def _directories(path: Path) -> list[CheckpointDir]:
    """All checkpoints of a run directory (or of the one that it names as its other half), or the one that is meant."""
    if CheckpointDir(path).step is not None or CheckpointDir(path).complete.exists():
        return [CheckpointDir(path)]
    for run_dir in (RunDir(path), RunDir(path.resolve().parent)):
        if run_dir.checkpoints.is_dir() and (run_dir.root == path or run_dir.checkpoints == path.resolve()):
            return run_dir.list_checkpoints()
    if RunDir(path).peer.exists():
        other = json.loads(RunDir(path).peer.read_text(encoding="utf-8"))["peer"]
        return RunDir(Path(other)).list_checkpoints()
    return []


def _choose(path: Path, step: int | None) -> Path:
    """The checkpoint that is meant: of that step, or the newest. A path that is none of ours stays as it is."""
    directories = _directories(path)
    if not directories and step is None:
        return path
    chosen = [each for each in directories if each.step == step] if step is not None else directories
    rows = [row for row in (_look_at(each, False) for each in chosen) if row.manifest is not None]
    if not rows:
        there = ", ".join(str(each.step) for each in directories) or "none"
        wanted = f"no complete checkpoint of step {step}" if step is not None else "no complete checkpoint"
        raise UsageError(f"checkpoints: {path} has {wanted}; steps there: {there}.")
    return Path(max(rows, key=lambda row: row.manifest.sequence if row.manifest else 0).path)


def _compare(path: Path, options: Namespace) -> int:
    from instep.train.checkpoint.compare import compare_checkpoints

    a, b = (_choose(path, int(name)) if name.isdecimal() else _choose(Path(name), None) for name in options.compare)
    found = compare_checkpoints(a, b)
    if options.json:
        print(json.dumps(asdict(found), indent=1))
        return 0
    lines = found.lines()
    print(f"{a} and {b}: {found.summary()}")
    print(
        "\n".join(lines[:MOST_LINES] + ([f"... and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []))
    )
    return 0


def _export(path: Path, target: Path, options: Namespace) -> int:
    from instep.train.checkpoint.interchange import convert_weights

    if target.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"checkpoints: --export {target}: the name has to end in .safetensors or .pt.")
    source = _choose(path, options.step) if path.is_dir() else path
    try:
        num_tensors = convert_weights(source, target, options.model)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}.") from None
    if options.json:
        print(json.dumps({"from": str(source), "to": str(target), "tensors": num_tensors}))
    else:
        print(f"{target}: {num_tensors} tensors, {format_bytes(target.stat().st_size)}, from {source}")
    return 0
