"""What `instep verify` asks of the ranks that it starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Options:
    """steps: optimizer steps to record; keep_random: leave dropout as it is; loader_batches: batch sizes of the
    DataLoaders that the run with the fewest processes made, in order, times its processes; None: leave batch sizes."""

    folder: str
    steps: int
    keep_random: bool = False
    divide_loaders: bool = False
    loader_batches: tuple[int | None, ...] = field(default_factory=tuple)

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Options:
        fields = json.loads(text)
        return Options(**fields | {"loader_batches": tuple(fields["loader_batches"])})
