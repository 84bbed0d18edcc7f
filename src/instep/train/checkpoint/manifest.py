"""What a checkpoint says about itself: complete.json, its files and their checksums. Needs no torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from instep.records.run_dir import CheckpointDir
from instep.train.checkpoint.durable_file import CHUNK_BYTES, FileEntry, write_durably

FORMAT = "instep checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """sequence: counts the saves of a run directory, so that the newest is known even after going back to an older
    step; metric, best: what `save` was given; versions: of python, torch and instep; files: all but complete.json."""

    step: int
    sequence: int
    saved_at: str
    world_size: int
    files: dict[str, FileEntry]
    metric: float | None = None
    best: str | None = None
    versions: dict[str, str] | None = None

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def as_json(self) -> dict[str, Any]:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return {**body, "crc32": _body_checksum(body)}


class Damage(Exception):
    """What is wrong with a checkpoint, in words that name the file."""


def read_manifest(directory: Path) -> Manifest:
    """Raises Damage when the checkpoint was not finished, is not ours, or its complete.json is damaged."""
    path = CheckpointDir(directory).complete
    if not directory.is_dir():
        raise Damage(f"{directory.name} is {'not a directory' if directory.exists() else 'missing'}")
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damage(f"{_short(path)} is missing: not finished, or not a checkpoint of instep") from None
    except OSError as error:
        raise Damage(f"{_short(path)} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise Damage(f"{_short(path)} is damaged: it is not JSON") from None
    return _parse(data, path)


def _parse(data: Any, path: Path) -> Manifest:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise Damage(f"{_short(path)} was not written by instep")
    body = {key: value for key, value in data.items() if key != "crc32"}
    if data.get("crc32") != _body_checksum(body):
        raise Damage(f"{_short(path)} is damaged: its checksum does not match")
    if body.pop("version") != VERSION:
        raise Damage(f"{_short(path)} has format version {data['version']}; this instep reads version {VERSION}")
    body.pop("format")
    if CheckpointDir(path.parent).step not in (None, body["step"]):  # None: it was moved to a name of the user's
        raise Damage(f"{_short(path)} belongs to the checkpoint of step {body['step']}")
    files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
    return Manifest(files=files, **body)


def find_damage(directory: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """What is wrong with the files of a checkpoint, a sentence each; nothing when it is whole.

    names: look only at these (ranks share the work); the cheap checks run for all files in any case.
    """
    problems = list(_find_strangers(directory, manifest))
    names = set(manifest.files if names is None else names)
    for name, entry in manifest.files.items():
        problem = _check_file(directory / name, entry, read=name in names)
        if problem:
            problems.append(problem)
    return problems


def _find_strangers(directory: Path, manifest: Manifest) -> Iterable[str]:
    for path in sorted(directory.glob("*.safetensors")):
        if path.name not in manifest.files:
            yield f"{_short(path)} is foreign: it is not part of this checkpoint"


def _check_file(path: Path, entry: FileEntry, read: bool) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.bytes:
            return f"{_short(path)} has {num_bytes} bytes instead of {entry.bytes}"
        with open(path, "rb") as file:  # opened even when not read through: permissions count
            crc32 = checksum_of(file) if read else entry.crc32
    except FileNotFoundError:
        return f"{_short(path)} is missing"
    except OSError as error:
        return f"{_short(path)} cannot be read: {error.strerror}"
    if crc32 != entry.crc32:
        return f"{_short(path)} does not hold what was saved: its checksum is {crc32} instead of {entry.crc32}"
    return None


def checksum_of(file: BinaryIO) -> str:
    crc, buffer = 0, bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        crc = zlib.crc32(view[:count], crc)
    return f"{crc:08x}"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    text = json.dumps(manifest.as_json(), indent=1) + "\n"
    write_durably(CheckpointDir(directory).complete, text.encode())


def _body_checksum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
