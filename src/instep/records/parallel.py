"""How the ranks share a model: the degrees of each axis, which multiply to the world size."""

from __future__ import annotations

from dataclasses import dataclass

from instep.errors import UsageError

SHORT_NAMES = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Parallel:
    """replicate: copies of the model; shard: ranks that share its parameters; tensor: ranks that share each layer;
    pipeline: ranks that share the depth. One may be left to fill the rest (None)."""

    replicate: int | None = None
    shard: int | None = 1
    tensor: int | None = 1
    pipeline: int | None = 1


def read_parallel(value: object) -> Parallel:
    """A `parallel=` argument as degrees. Raises UsageError for a name or a split that this version cannot do."""
    if isinstance(value, Parallel):
        parallel = value
    elif value == "ddp":
        parallel = Parallel()
    elif value in SHORT_NAMES:
        raise UsageError(f"parallel={value!r} is not built yet in this version of instep; 'ddp' is.")
    else:
        raise UsageError(
            f"parallel={value!r} is not a way to split a model. Allowed: {', '.join(map(repr, SHORT_NAMES))}, "
            "or instep.Parallel(replicate=, shard=, tensor=, pipeline=)."
        )
    for axis in ("shard", "tensor", "pipeline"):
        if getattr(parallel, axis) != 1:
            raise UsageError(f"parallel: the axis {axis} is not built yet in this version of instep; replicate is.")
    return parallel
