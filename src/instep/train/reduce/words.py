"""Control words: what ranks have to tell each other once per update, riding on the last bucket.

Each rank writes its own row, zero in every other rank's, so the sum over ranks is the table of all rows, exact. A
number is kept as two fp32 words, high and low, 48 bits together. Behind the rows lie counts that may just add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from instep.errors import RanksDisagree

MAX_LANES = 16  # backward calls per micro-batch that a row has room for

# Columns of a row; behind them the weights of the lanes, then their losses: high words, then low words.
_CALL, _COUNTED, _GIVEN, _STOP, _LANES, _RATES, _FIXED = 0, 1, 2, 3, 4, 5, 6


def number_call(step: int, updates: int, optimizer: int) -> int:
    """Which update this is, in 24 bits: of the step, after so many updates in it, of the optimizer with this number.

    Never 0, which is what a rank sends that goes on without an update.
    """
    return 1 + (step * 64 + updates * 8 + optimizer) % ((1 << 24) - 1)


def check_calls(calls: Sequence[int]) -> None:
    """Raises RanksDisagree when the ranks have met in different updates."""
    if len(set(calls)) == 1:
        return
    ranks: dict[int, list[str]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(str(rank))
    one_step = len({(call - 1) // 64 for call in calls}) == 1
    parts = []
    for call, those in ranks.items():
        step, rest = divmod(call - 1, 64)
        where = f"in that of step {step}" if call else "went on to the next step without one"
        more = f" (optimizer {rest % 8}, after {rest // 8} other updates)" if one_step else ""
        parts.append(f"{'rank' if len(those) == 1 else 'ranks'} {', '.join(those)} {where}{more}")
    raise RanksDisagree(
        f"The ranks met in different calls of step.update(): {'; '.join(parts)}. A `continue`, a `break` or a condition that not "
        "all ranks take left one out, or made one too many. Every rank has to make the same calls."
    )


@dataclass
class Note:
    """What one rank says. weights, losses: per lane and position, the sums of w and of w * loss."""

    call: int = 0  # a 24-bit digest of which update this is
    counted: int = 0  # micro-batches with a weight above 0
    given: int = 0  # 1 when a weight came from the script
    stop: int = 0  # 1 when this rank was asked to stop
    weights: list[list[float]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    rates: int = 0  # a 24-bit digest of the optimizer's learning rates and their like


@dataclass
class Table:
    """What all ranks said: totals, and what no rank may differ in. weights, losses: per lane."""

    calls: list[int]
    counted: int
    given: int
    stop: bool
    weights: list[float]
    losses: list[float]
    used: np.ndarray  # (parameters,) how many ranks have a gradient for it
    extra: np.ndarray  # (buckets,) how many ranks have a second helping for it
    rates: list[int] = field(default_factory=list)

    @staticmethod
    def of(notes: Sequence[Note], used: np.ndarray, extra: np.ndarray) -> Table:
        """Adds up in rank order, and in the order of positions: the same bits on every rank, and for any split."""
        lanes = max(len(note.weights) for note in notes)
        weights, losses = [0.0] * lanes, [0.0] * lanes
        for note in notes:
            for lane, (w, wl) in enumerate(zip(note.weights, note.losses)):
                for weight, loss in zip(w, wl):
                    weights[lane] += weight
                    losses[lane] += loss
        return Table(
            calls=[note.call for note in notes],
            counted=sum(note.counted for note in notes),
            given=sum(note.given for note in notes),
            stop=any(note.stop for note in notes),
            weights=weights,
            losses=losses,
            used=used,
            extra=extra,
            rates=[note.rates for note in notes],
        )


class Words:
    """Reads and writes the words. numel: how many a bucket's tail needs; num_positions: numbers per lane."""

    def __init__(self, rank: int, size: int, num_parameters: int, num_buckets: int, num_positions: int = 1) -> None:
        self._rank, self._size, self._positions = rank, size, num_positions
        self._numbers = 2 * MAX_LANES * num_positions  # weights and losses
        self._row = _FIXED + 2 * self._numbers  # as high and low words
        self._used = self._row * size
        self._extra = self._used + num_parameters
        self.numel = self._extra + num_buckets

    def write(self, tail: torch.Tensor, note: Note, used: np.ndarray, extra: np.ndarray) -> None:
        values = np.zeros(self.numel, dtype=np.float64)
        row = values[self._rank * self._row : (self._rank + 1) * self._row]
        row[:_FIXED] = note.call, note.counted, note.given, note.stop, len(note.weights), note.rates
        numbers = np.array([note.weights, note.losses], dtype=np.float64).reshape(-1)
        high = numbers.astype(np.float32).astype(np.float64)
        with np.errstate(invalid="ignore"):  # a loss that is not finite has no low word
            low = np.where(np.isfinite(high), numbers - high, 0.0)
        row[_FIXED : _FIXED + numbers.size] = high
        row[_FIXED + self._numbers : _FIXED + self._numbers + numbers.size] = low
        values[self._used : self._extra] = used
        values[self._extra :] = extra
        if tail.device.type == "cpu":
            tail.numpy()[:] = values
        else:
            tail.copy_(torch.from_numpy(values))

    def read(self, tail: torch.Tensor) -> Table:
        values = tail.cpu().numpy().astype(np.float64)
        rows = values[: self._used].reshape(self._size, self._row)
        notes = [self._read_row(row) for row in rows]
        return Table.of(notes, values[self._used : self._extra], values[self._extra :])

    def _read_row(self, row: np.ndarray) -> Note:
        call, counted, given, stop, lanes, rates = (int(word) for word in row[:_FIXED])
        count = 2 * lanes * self._positions
        numbers = row[_FIXED : _FIXED + count] + row[_FIXED + self._numbers : _FIXED + self._numbers + count]
        weights, losses = numbers.reshape(2, lanes, self._positions).tolist()
        return Note(call, counted, given, stop, weights, losses, rates)
