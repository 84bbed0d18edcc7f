"""This rank's tensors in host memory, laid out as the safetensors file that they will be.

The buffer is reused from save to save and has the bytes of the file, so that writing is one stream without further
copies. The header names offsets as torch.distributed.checkpoint's HuggingFace files do; its reader can read these.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Sequence

import torch

from instep.train.checkpoint.durable_file import BLOCK_BYTES
from instep.train.checkpoint.pieces import Piece

ALIGNMENT = 64  # of the first number; so that the file can be mapped and read in place
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


def is_storable(dtype: torch.dtype) -> bool:
    return dtype in _DTYPES


def lay_out(pieces: Sequence[tuple[str, Piece]]) -> tuple[bytes, list[tuple[int, int]], int]:
    """The file's head, where each piece lies in the file, and the file's bytes. Wide types come first, so that each
    piece is aligned to its type; pieces have to be sorted so (see `sort_by_width`)."""
    entries: dict[str, object] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    spans: list[tuple[int, int]] = []
    end = 0
    for name, piece in pieces:
        begin, end = end, end + piece.local.numel() * piece.local.element_size()
        spans.append((begin, end))
        offsets[name] = {"saved_offsets": list(piece.offsets)}
        entries[name] = {
            "dtype": _DTYPES[piece.local.dtype],
            "shape": list(piece.sizes),
            "data_offsets": [begin, end],
        }
    extra = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    head = json.dumps({"__metadata__": extra, **entries}, separators=(",", ":")).encode()
    head += b" " * (-(8 + len(head)) % ALIGNMENT)
    base = 8 + len(head)
    return struct.pack("<Q", len(head)) + head, [(base + a, base + b) for a, b in spans], base + end


def sort_by_width(pieces: Sequence[tuple[str, Piece]]) -> list[tuple[str, Piece]]:
    return sorted(pieces, key=lambda item: (-item[1].local.element_size(), item[0]))


class FileImage:
    """The buffer. It must not be staged into while a write of it goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._reserving: threading.Thread | None = None
        self._used = 0

    def reserve(self, num_bytes: int) -> None:
        """Gets the memory ahead of the first save, in the background: new pages cost more than the copy into them."""
        if num_bytes > self._buffer.numel() and self._reserving is None:
            self._reserving = threading.Thread(target=self._allocate, args=(num_bytes,), daemon=True)
            self._reserving.start()

    def finish_reserving(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def stage(self, pieces: Sequence[tuple[str, Piece]]) -> None:
        """Copies pieces from their devices; when it returns they may change. Blocks for the copy."""
        pieces = sort_by_width(pieces)
        head, spans, num_bytes = lay_out(pieces)
        self.finish_reserving()
        if num_bytes > self._buffer.numel():
            self._allocate(num_bytes)
        self._buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for (_, piece), (begin, end) in zip(pieces, spans):
            if begin < end:
                room = self._buffer[begin:end].view(piece.local.dtype).view(piece.sizes)
                room.copy_(piece.local, non_blocking=piece.local.is_cuda)
        if any(piece.local.is_cuda for _, piece in pieces):
            torch.cuda.current_stream().synchronize()
        self._used = num_bytes

    def contents(self) -> memoryview:
        return self._buffer[: self._used].numpy().data

    def _allocate(self, num_bytes: int) -> None:
        if self._device.type == "cuda":  # pinned, so that the copy from the device runs at full speed
            torch.cuda.set_device(self._device)  # a thread begins on device 0
            self._buffer = _align(torch.empty(num_bytes + BLOCK_BYTES, dtype=torch.uint8, pin_memory=True))
        else:
            self._buffer = _align(torch.empty(num_bytes + BLOCK_BYTES, dtype=torch.uint8))
            self._buffer[::4096] = 0  # touches each page


def _align(buffer: torch.Tensor) -> torch.Tensor:
    """From where direct writes can begin."""
    return buffer[-buffer.data_ptr() % BLOCK_BYTES :]
