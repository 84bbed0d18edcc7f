"""Steps that were skipped because their gradients were not finite: said ever more seldom, and warned of when they go on."""

from __future__ import annotations

from collections.abc import Callable

MANY = 20  # in a row: more than a bad batch, and than a loss scale that is too high at the start
MANY_IN_FP16 = 40  # the scale begins at 2**16 and is halved each time; below 2**-24 fp16 has no gradients left
ADVICE = (
    "Nothing is being learned. Look for inputs and targets that are not finite, a logarithm of 0 or a division by 0 in the "
    "loss, and a learning rate that is too high"
)


class Skips:
    """Of one optimizer. say: takes one sentence for the user."""

    def __init__(self, say: Callable[[str], None], in_fp16: bool) -> None:
        self._say = say
        self._many = MANY_IN_FP16 if in_fp16 else MANY
        self.total = 0
        self.in_a_row = 0

    def note_good(self) -> None:
        self.in_a_row = 0

    def note_skipped(self, step: int, why: str) -> bool:
        """Says it where it is due. True when there are now so many in a row that the parameters have to be looked at."""
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row >= self._many and _is_due(self.in_a_row):
            self._say(f"{self.in_a_row} steps in a row were skipped, the last of them step {step}: {why}. {ADVICE}")
        elif _is_due(self.total):
            count = "" if self.total == 1 else f"; {self.total} steps so far"
            self._say(f"step {step} skipped on all ranks: {why}{count}")
        return self.in_a_row == self._many


def _is_due(count: int) -> bool:
    """1, 2, 4, 10, 20, 40, 100, ..."""
    while count % 10 == 0:
        count //= 10
    return count in (1, 2, 4)
