"""How the ranks share a model: the degrees of each axis, which multiply to the world size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from instep.errors import UsageError

SHORT_NAMES = ("ddp", "zero1", "zero2", "zero3")
AXES = ("replicate", "shard", "tensor", "pipeline")
MORE = "More: instep explain startup/parallel-does-not-fit"


@dataclass(frozen=True)
class Parallel:
    """replicate: copies of the model; shard: ranks that share its parameters; tensor: ranks that share each layer;
    pipeline: ranks that share the depth. One may be left to fill the rest (None).

    gathered: parameters stay whole between forward and backward, which saves a gather and costs their memory (zero2).
    average_every: above 1, copies train by themselves and take the mean of their parameters every so many steps.
    """

    replicate: int | None = 1
    shard: int | None = 1
    tensor: int | None = 1
    pipeline: int | None = 1
    gathered: bool = False
    average_every: int = 1

    def describe(self) -> str:
        shown = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) != 1]
        return " x ".join(shown) or "replicate=1"


_BY_NAME = {
    "ddp": Parallel(replicate=None),
    "zero2": Parallel(shard=None, gathered=True),
    "zero3": Parallel(shard=None),
}


def read_parallel(value: object) -> Parallel:
    """A `parallel=` argument as degrees, which `fit` brings to a world size.

    Raises UsageError for what is no split, and for a split that this version cannot do.
    """
    if isinstance(value, Parallel):
        parallel = value
    elif isinstance(value, str) and value in _BY_NAME:
        parallel = _BY_NAME[value]
    elif value == "zero1":
        raise UsageError("parallel='zero1' is not built yet in this version of instep; 'ddp', 'zero2' and 'zero3' are.")
    else:
        raise UsageError(
            f"parallel={value!r} is not a way to split a model. Allowed: {', '.join(map(repr, SHORT_NAMES))}, "
            "or instep.Parallel(replicate=, shard=, tensor=, pipeline=)."
        )
    for axis in AXES:
        degree = getattr(parallel, axis)
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise UsageError(f"Parallel({axis}={degree!r}): a degree is a whole number of at least 1, or None to fill.")
    if sum(getattr(parallel, axis) is None for axis in AXES) > 1:
        raise UsageError(f"{parallel.describe()}: only one degree may be None, the one that fills the rest.")
    for axis in ("tensor", "pipeline"):
        if getattr(parallel, axis) != 1:
            raise UsageError(
                f"parallel: the axis {axis} is not built yet in this version of instep; replicate and shard are."
            )
    _check_average(parallel.average_every, parallel)
    return parallel


def _check_average(every: object, parallel: Parallel) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"Parallel(average_every={every!r}): it is a number of steps, at least 1.")
    if every > 1 and any(getattr(parallel, axis) != 1 for axis in AXES if axis != "replicate"):
        raise UsageError(
            f"Parallel(average_every={every}) lets whole copies of the model train by themselves and goes with replicate only, "
            f"not with {parallel.describe()}. Leave average_every out, or the other degrees."
        )


def fit(parallel: Parallel, world_size: int) -> Parallel:
    """All degrees as numbers. Raises UsageError with the nearest splits that multiply to the world size."""
    given = [getattr(parallel, axis) for axis in AXES]
    known = math.prod(degree for degree in given if degree is not None)
    if None in given and world_size % known == 0:
        return replace(parallel, **{AXES[given.index(None)]: world_size // known})
    if None not in given and known == world_size:
        return parallel
    word = "rank" if world_size == 1 else "ranks"
    raise UsageError(
        f"{world_size} {word} cannot be split as {parallel.describe()} (= {known}). The degrees have to multiply to the number "
        f"of ranks. Nearest that fit: {', '.join(_nearest(given, world_size))}. {MORE}"
    )


def _nearest(given: list[int | None], world_size: int, most: int = 3) -> list[str]:
    wanted = [degree or 1 for degree in given]
    used = [axis for axis, degree in zip(AXES, given) if degree != 1]
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    choices = [divisors if axis in used else [1] for axis in AXES]
    fitting = [degrees for degrees in product(*choices) if math.prod(degrees) == world_size]
    fitting.sort(key=lambda degrees: sum(abs(math.log2(a / b)) for a, b in zip(degrees, wanted)))
    return [Parallel(*degrees).describe() for degrees in fitting[:most]]
