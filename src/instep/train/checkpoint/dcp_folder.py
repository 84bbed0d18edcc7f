"""Folders that torch.distributed.checkpoint wrote, read without running what is in them.

Their `.metadata` is a pickle, and unpickling it as torch does would run whatever it names. Here it may name only the
classes that describe tensors; the tensors themselves are read with torch.load(weights_only=True).
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from instep.errors import CheckpointError
from instep.train.checkpoint.pieces import local_pieces
from instep.train.checkpoint.shards import Shard, count, find_overlap, overlap_slices
from instep.train.checkpoint.source import Described

_METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = {
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        (_METADATA, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


def _member(kind: Any, name: str) -> Any:
    """What Python 3.11 before 3.11.4 pickles a member of an enumeration as a call of: `getattr`, here of such alone."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise CheckpointError("its .metadata takes an attribute, which does not describe tensors. It is not read.")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"its .metadata names {module}.{name}, which does not describe tensors. It is not read, since that could "
            "run code. If you trust it, convert it with python -m torch.distributed.checkpoint.format_utils."
        )


class DcpFolder:
    """A Source. Entries that are no tensors are left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        metadata = _read_metadata(folder / ".metadata")
        self.described: dict[str, Described] = {}
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        self._places: dict[tuple[str, tuple[int, ...]], Any] = {}
        tensors = {name: each for name, each in metadata.state_dict_metadata.items() if hasattr(each, "chunks")}
        for name, each in tensors.items():
            self.described[name] = Described(tuple(each.size), each.properties.dtype)
        for index, place in metadata.storage_data.items():
            if index.fqn in tensors:
                self._add(index, place, tensors[index.fqn])

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, target in targets.items():
                for piece in local_pieces(target):
                    covered = 0
                    for shard in self._shards[name]:
                        overlap = find_overlap(shard, piece)
                        if overlap is not None:
                            there, here = overlap_slices(overlap, shard, piece)
                            piece.local[here].copy_(self._load(name, shard)[there])
                            covered += count(overlap)
                    if covered != piece.local.numel():
                        raise CheckpointError(f"{name} is not whole in {self._folder}.")

    def _add(self, index: Any, place: Any, described: Any) -> None:
        offsets = tuple(index.offset or (0,) * len(described.size))
        if "/" in str(place.relative_path):
            raise CheckpointError(f"{self._folder}/.metadata names a file elsewhere: {place.relative_path}.")
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{self._folder} is compressed, which instep cannot read; save it without extensions."
            )
        sizes = next(tuple(chunk.sizes) for chunk in described.chunks if tuple(chunk.offsets) == offsets)
        self._shards[index.fqn].append(Shard(self._folder / str(place.relative_path), offsets, sizes))
        self._places[(index.fqn, offsets)] = place

    def _load(self, name: str, shard: Shard) -> torch.Tensor:
        place = self._places[(name, shard.offsets)]
        try:
            with open(shard.file, "rb") as file:
                file.seek(place.offset)
                return torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{shard.file} cannot be read: {_first_line(error)}.") from None


def _read_metadata(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _Unpickler(file).load()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent} is refused: {error}") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
