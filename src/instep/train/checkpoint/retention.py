"""Which checkpoints stay. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from instep.records.run_dir import CheckpointDir
from instep.train.checkpoint.manifest import Manifest


def choose_removed(
    complete: Sequence[tuple[CheckpointDir, Manifest]], keep: int | None, keep_every: int | None
) -> list[CheckpointDir]:
    """Those that go: all but the last `keep` saved, the best by its metric, and every step that `keep_every` divides.

    keep=None keeps all.
    """
    if keep is None:
        return []
    by_age = sorted(complete, key=lambda item: item[1].sequence)
    best = choose_best([manifest for _, manifest in by_age])
    return [
        directory
        for directory, manifest in by_age[:-keep]
        if manifest is not best and not (keep_every and manifest.step % keep_every == 0)
    ]


def choose_best(manifests: Sequence[Manifest]) -> Manifest | None:
    """The best by metric, in the direction of the newest that states one; the newer of equals."""
    rated = [each for each in manifests if each.metric is not None and each.best and math.isfinite(each.metric)]
    if not rated:
        return None
    direction = max(rated, key=lambda each: each.sequence).best
    sign = 1 if direction == "max" else -1
    return max(
        (each for each in rated if each.best == direction), key=lambda each: (sign * (each.metric or 0), each.sequence)
    )
