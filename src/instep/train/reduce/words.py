"""Control words: what ranks have to tell each other once per update, riding on the last bucket.

Each rank writes its own row, zero in every other rank's, so the sum over ranks is the table of all rows, exact. A
number is kept as two fp32 words, high and low, 48 bits together. Behind the rows lie counts that may just add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

MAX_LANES = 16  # backward calls per micro-batch that a row has room for

# Columns of a row; the weights and losses of the lanes follow.
_CALL, _COUNTED, _GIVEN, _STOP, _LANES, _FIXED = 0, 1, 2, 3, 4, 5


@dataclass
class Note:
    """What one rank says. weights, losses: per lane, the sums of w and of w * loss over this rank's micro-batches."""

    call: int = 0  # a 24-bit digest of which update this is
    counted: int = 0  # micro-batches with a weight above 0
    given: int = 0  # of these, how many came with a weight= of their own
    stop: int = 0  # 1 when this rank was asked to stop
    weights: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass
class Table:
    """What all ranks said: totals, and what no rank may differ in."""

    calls: list[int]
    counted: int
    given: int
    stop: bool
    weights: list[float]
    losses: list[float]
    used: np.ndarray  # (parameters,) how many ranks have a gradient for it
    extra: np.ndarray  # (buckets,) how many ranks have a second helping for it


class Words:
    """Reads and writes the words. numel: how many a bucket's tail needs."""

    def __init__(self, rank: int, size: int, num_parameters: int, num_buckets: int) -> None:
        self.rank, self.size = rank, size
        self._row = _FIXED + 4 * MAX_LANES
        self._used = self._row * size
        self._extra = self._used + num_parameters
        self.numel = self._extra + num_buckets

    def write(self, tail: torch.Tensor, note: Note, used: np.ndarray, extra: np.ndarray) -> None:
        values = np.zeros(self.numel, dtype=np.float64)
        row = values[self.rank * self._row : (self.rank + 1) * self._row]
        row[:_FIXED] = note.call, note.counted, note.given, note.stop, len(note.weights)
        numbers = np.array(note.weights + note.losses, dtype=np.float64)
        high = numbers.astype(np.float32).astype(np.float64)
        lanes = len(note.weights)
        with np.errstate(invalid="ignore"):  # a loss that is not finite has no low word
            low = np.where(np.isfinite(high), numbers - high, 0.0)
        row[_FIXED : _FIXED + 2 * lanes] = high
        row[_FIXED + 2 * MAX_LANES : _FIXED + 2 * MAX_LANES + 2 * lanes] = low
        values[self._used : self._extra] = used
        values[self._extra :] = extra
        target = tail.numpy() if tail.device.type == "cpu" else None
        if target is None:
            tail.copy_(torch.from_numpy(values))
        else:
            target[:] = values

    def read(self, tail: torch.Tensor) -> Table:
        values = tail.cpu().numpy().astype(np.float64)
        rows = values[: self._used].reshape(self.size, self._row)
        lanes = int(rows[:, _LANES].max())
        weights, losses = [0.0] * lanes, [0.0] * lanes
        for row in rows:  # in rank order, in double precision: the same sums on every rank
            count = int(row[_LANES])
            numbers = (
                row[_FIXED : _FIXED + 2 * count] + row[_FIXED + 2 * MAX_LANES : _FIXED + 2 * MAX_LANES + 2 * count]
            )
            for lane in range(count):
                weights[lane] += float(numbers[lane])
                losses[lane] += float(numbers[count + lane])
        return Table(
            calls=[int(call) for call in rows[:, _CALL]],
            counted=int(rows[:, _COUNTED].sum()),
            given=int(rows[:, _GIVEN].sum()),
            stop=bool(rows[:, _STOP].any()),
            weights=weights,
            losses=losses,
            used=values[self._used : self._extra],
            extra=values[self._extra :],
        )
