"""Gradients sent as 16-bit numbers and added as 32-bit ones: half the bytes of an all-reduce.

A bucket is cut into one shard per rank. Each rank sends every other its piece of that rank's shard, adds up what it
gets in rank order, and sends the sum, as 16-bit numbers again, to all. So every rank ends with the same bits.

fp16 has a small range, so each piece and each sum is multiplied by a power of two that brings its largest number near
2**14, and that factor travels with it: nothing overflows, however many ranks, and small gradients keep their digits.
A gradient that is not finite stays so on every rank. bf16 has the range of fp32 and needs no factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from instep.errors import UsageError
from instep.train.reduce.bucket import Bucket, Handle, forget_nothing, plain_zeros
from instep.train.reduce.courier import Couriers
from instep.train.reduce.gather_rows import gather_rows

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOP_EXPONENT = 15  # frexp's: the largest number of a scaled piece is in [2**14, 2**15), half of what fp16 can hold
FACTOR_WORDS = 2  # 16-bit words of an fp32 factor


class CompressedSum:
    """groups: of the same ranks; nothing else is sent in them while buckets are under way."""

    allocate = staticmethod(plain_zeros)
    rescale = staticmethod(forget_nothing)

    def __init__(self, groups: Sequence[dist.ProcessGroup], dtype: torch.dtype | str) -> None:
        chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if chosen not in DTYPES.values():
            raise UsageError(f"compress={dtype!r} is no 16-bit type; there are {', '.join(DTYPES)}.")
        self.dtype: torch.dtype = chosen  # type: ignore[assignment]  # one of DTYPES' values
        self._couriers = Couriers(self._sum, groups)

    def add_gradients(self, rows: Tensor) -> Tensor:
        """The sum of all ranks' pieces, (ranks, elements) in fp32 or wider."""
        return _add_up(rows)

    def start(self, bucket: Bucket) -> Handle:
        return self._couriers.start(bucket)

    def close(self) -> None:
        self._couriers.close()

    @torch.no_grad()
    def _sum(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        """Rows of what is sent: a piece, its factor, and the control words bit by bit (to be added uncompressed)."""
        size, gradients = group.size(), bucket.gradients
        wide = torch.float64 if gradients.dtype == torch.float64 else torch.float32
        width = -(-gradients.numel() // size)
        words = bucket.words.contiguous().view(self.dtype)
        sent = torch.empty(size, width + FACTOR_WORDS + words.numel(), dtype=self.dtype, device=gradients.device)
        _pack(_rows(gradients, size, width, wide), sent)
        sent[:, width + FACTOR_WORDS :] = words
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
        if bucket.tail:
            bits = received[:, width + FACTOR_WORDS :].contiguous().view(bucket.flat.dtype)
            bucket.words.copy_(_add_up(bits))
        if not width:
            return
        total = self.add_gradients(_unpack(received[:, : width + FACTOR_WORDS], wide))
        mine, sums = sent[:1, : width + FACTOR_WORDS].contiguous(), sent.new_empty(size, width + FACTOR_WORDS)
        _pack(total.unsqueeze(0), mine)
        gather_rows(sums, mine, group)
        gradients.copy_(_unpack(sums, wide).view(-1)[: gradients.numel()])


def _rows(flat: Tensor, size: int, width: int, dtype: torch.dtype) -> Tensor:
    """(size, width): the tensor cut into rows, zeros at its end where it does not fill them."""
    if flat.numel() == size * width:
        return flat.view(size, width).to(dtype)
    rows = torch.zeros(size * width, dtype=dtype, device=flat.device)
    rows[: flat.numel()] = flat
    return rows.view(size, width)


def _pack(rows: Tensor, packed: Tensor) -> None:
    """Writes each row as 16-bit numbers and behind it the factor they have to be multiplied with; spoils `rows`."""
    width = rows.size(1)
    factors = torch.ones(rows.size(0), 1, dtype=torch.float32, device=rows.device)
    if packed.dtype == torch.float16 and width:
        factors = _factors(rows)
        rows.div_(factors)
    packed[:, :width] = rows
    packed[:, width : width + FACTOR_WORDS] = factors.view(packed.dtype)


def _factors(rows: Tensor) -> Tensor:
    """(rows, 1) in fp32: powers of two, so that dividing by them changes no digit; 1 for rows that are not finite."""
    # 20 times faster than vector_norm or aminmax on the CPU
    largest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg())
    exponents = torch.frexp(largest).exponent.sub(TOP_EXPONENT).clamp(-126, 127)
    exponents = torch.where(torch.isfinite(largest) & (largest > 0), exponents, 0)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponents)


def _unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    width = packed.size(1) - FACTOR_WORDS
    rows = packed[:, :width].to(dtype)
    return rows if packed.dtype == torch.bfloat16 else rows.mul_(packed[:, width:].contiguous().view(torch.float32))


def _add_up(rows: Tensor) -> Tensor:
    """In the order of the rows, whatever the device: a library's sum may choose another."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
