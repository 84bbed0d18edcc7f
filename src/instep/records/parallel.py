"""How the ranks share a model: the degrees of each axis, which multiply to the world size."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from instep.errors import UsageError
from instep.records.schedules import check_schedule, read_cut

SHORT_NAMES = ("ddp", "zero1", "zero2", "zero3")
AXES = ("replicate", "shard", "tensor", "pipeline")
_FILL_COSTS = {"replicate": 0.5, "shard": 0.6}  # per doubling, where the axis was not asked for
MORE = "More: instep explain startup/parallel-does-not-fit"


@dataclass(frozen=True)
class Parallel:
    """replicate: copies of the model; shard: ranks that share its parameters; tensor: ranks that share each layer;
    pipeline: ranks that share the depth. One may be left to fill the rest (None).

    gathered: parameters stay whole between forward and backward, which saves a gather and costs their memory (zero2); in a
    pipeline, during a step.
    share_optimizer: copies share the optimizer's state out, and each steps a part of the parameters (zero1).
    plan: how layers are split along the tensor axis, by name; None takes the model's own or what is recognised.
    sequence: between split layers each rank holds a stretch of every sequence.
    split_loss: the output head (or the layer of that name) leaves each rank its share of the classes, and cross_entropy adds
    up over them.
    average_every: above 1, copies train by themselves and take the mean of their parameters every so many steps.
    schedule: the order in which a pipeline runs its micro-batches (records.schedules); cut: names of the modules that begin
    its stages after the first, found from parameters and estimated time when None.
    """

    replicate: int | None = 1
    shard: int | None = 1
    tensor: int | None = 1
    pipeline: int | None = 1
    gathered: bool = False
    share_optimizer: bool = field(default=False, kw_only=True)
    plan: Mapping[str, Any] | None = field(default=None, hash=False, kw_only=True)
    sequence: bool = field(default=False, kw_only=True)
    split_loss: bool | str = field(default=False, kw_only=True)
    average_every: int = 1
    schedule: str = field(default="1f1b", kw_only=True)
    cut: tuple[str, ...] | list[str] | None = field(default=None, kw_only=True)

    def describe(self) -> str:
        """The degrees, or the short name that stands for the whole."""
        shown = [f"{axis}={'rest' if (degree := getattr(self, axis)) is None else degree}" for axis in AXES]
        name = self._short_name()
        return repr(name) if name else " x ".join(text for text in shown if not text.endswith("=1")) or "replicate=1"

    def write(self) -> str:
        """All that is not as usual, as Python, or the short name."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        shown = (f"{each.name}={given[each.name]!r}" for each in fields(self) if given[each.name] != each.default)
        return self._short_name() or f"Parallel({', '.join(shown)})"

    def _short_name(self) -> str | None:
        return next((name for name, split in _BY_NAME.items() if split == self), None)


_BY_NAME = {
    "ddp": Parallel(replicate=None),
    "zero1": Parallel(replicate=None, share_optimizer=True),
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
    elif isinstance(value, str) and (written := _read_written(value)) is not None:
        parallel = written
    else:
        raise UsageError(
            f"parallel={value!r} is not a way to split a model. Allowed: {', '.join(map(repr, SHORT_NAMES))}, "
            "instep.Parallel(replicate=, shard=, tensor=, pipeline=), or that written out, as 'shard=2,tensor=2' or "
            "'pipeline=2,schedule=zbv,zero1'."
        )
    for axis in AXES:
        degree = getattr(parallel, axis)
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise UsageError(f"Parallel({axis}={degree!r}): a degree is a whole number of at least 1, or None to fill.")
    _check_options(parallel)
    if sum(getattr(parallel, axis) is None for axis in AXES) > 1:
        raise UsageError(f"{parallel.describe()}: only one degree may be None, the one that fills the rest.")
    if parallel.share_optimizer and (parallel.shard != 1 or parallel.average_every > 1):
        other = "shard" if parallel.shard != 1 else "average_every"
        raise UsageError(
            f"Parallel(share_optimizer=True, {other}={getattr(parallel, other)}): copies that are equal after every step share "
            f"their optimizer's state out, and with {other} there are none. Leave one of them out."
        )
    if parallel.plan is not None and parallel.tensor == 1:
        raise UsageError(f"{parallel.describe()} has a plan, which says how to split layers, and tensor=1 splits none.")
    for option in ("sequence", "split_loss"):
        value = getattr(parallel, option)
        if value and parallel.tensor == 1:
            raise UsageError(
                f"{parallel.describe()} has {option}={value!r}, which is for layers that tensor= splits, and tensor is 1."
            )
    _check_average(parallel.average_every, parallel)
    return _read_pipeline(parallel)


def _check_options(parallel: Parallel) -> None:
    """Raises UsageError for values of other types."""
    for name in ("gathered", "share_optimizer", "sequence"):
        if not isinstance(value := getattr(parallel, name), bool):
            raise UsageError(f"Parallel({name}={value!r}) has to be True or False.")
    split_loss: Any = parallel.split_loss
    if not isinstance(split_loss, (bool, str)):
        raise UsageError(
            f"Parallel(split_loss={split_loss!r}) has to be True, False or the name of the model's last layer."
        )
    plan: Any = parallel.plan
    names: Any = list(plan) if hasattr(plan, "items") else [None]
    if plan is not None and not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"Parallel(plan={plan!r}) has to map names of modules to styles, as {{'layers.*.up': 'colwise'}}."
        )


def _read_written(text: str) -> Parallel | None:
    """`shard=2,tensor=2`, or with x between as `describe` writes it; an axis without a number fills the rest. What else
    Parallel takes may stand there, too: `schedule=zbv`, `cut=layers.4` once for each cut point, `average_every=8`,
    `sequence`, `split_loss` or `split_loss=head`, `gathered`, and `zero1`, by which the copies share the optimizer's state."""
    degrees: dict[str, int | None] = {}
    words: dict[str, str | bool] = {}
    cut: list[str] = []
    for part in re.split(r"\s*,\s*|\s+x\s+", text):
        axis = re.fullmatch(rf"({'|'.join(AXES)}|average_every)(?:=(\d+|None|rest))?", part)
        word = re.fullmatch(r"(schedule|cut|split_loss)=([\w.]+)", part)
        flag = re.fullmatch(r"(sequence|split_loss|gathered|share_optimizer|zero1)(?:=(True|true))?", part)
        if axis is not None:
            degrees[axis[1]] = None if axis[2] in (None, "None", "rest") else int(axis[2])
        elif flag is not None and flag[1] == "zero1":
            words["share_optimizer"] = True
            degrees.setdefault("replicate", None)
        elif flag is not None:
            words[flag[1]] = True
        elif word is None:
            return None
        elif word[1] == "cut":
            cut.append(word[2])
        else:
            words[word[1]] = word[2]
    return Parallel(**degrees, **words, cut=cut or None)  # type: ignore[arg-type]


def _read_pipeline(parallel: Parallel) -> Parallel:
    cut = read_cut(parallel.cut)
    check_schedule(parallel.schedule, cut, parallel.pipeline if parallel.pipeline != 1 else None)
    if parallel.pipeline == 1 and (cut is not None or parallel.schedule != "1f1b"):
        given = f"cut={list(cut)}" if cut is not None else f"schedule={parallel.schedule!r}"
        raise UsageError(f"Parallel({given}) is for a pipeline, and pipeline is 1: give pipeline=2 or more as well.")
    return replace(parallel, cut=cut)


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
        filled = replace(parallel, **{AXES[given.index(None)]: world_size // known})
        check_schedule(filled.schedule, read_cut(filled.cut), filled.pipeline if filled.pipeline != 1 else None)
        return filled
    if None not in given and known == world_size:
        return parallel
    raise UsageError(_does_not_fit(parallel, known, world_size))


def _does_not_fit(parallel: Parallel, known: int, world_size: int) -> str:
    word = "rank" if world_size == 1 else "ranks"
    what = (
        f"{world_size} {word} cannot be split as {parallel.describe()} (= {known}). The degrees have to multiply to the number of "
        "ranks."
    )
    fills = any(getattr(parallel, axis) is None for axis in AXES)
    below = world_size // known * known
    counts = [below, below + known] if fills and below else [known]
    ranks = " or ".join(map(str, counts)) + (" rank" if counts == [1] else " ranks")
    nearest = _nearest(parallel, known, world_size)
    if nearest:
        return f"{what} Nearest that fit: {', '.join(nearest)}; or start {ranks}. {MORE}"
    leave = " or leave parallel= out, for one rank holds the model whole." if world_size == 1 else ""
    return f"{what} Start {ranks}, as `instep run -n {counts[-1]}` does{',' if leave else '.'}{leave} {MORE}"


def _nearest(parallel: Parallel, known: int, world_size: int, most: int = 3) -> list[str]:
    """Splits with the axes that were asked for, none of them at 1, and copies or shards for ranks that are left."""
    given = {axis: getattr(parallel, axis) for axis in AXES}
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    fixed = {"pipeline"} if parallel.cut is not None else set[str]()
    if parallel.share_optimizer or parallel.average_every > 1:
        fixed.add("shard")
    choices: list[list[int]] = []
    for axis, degree in given.items():
        if axis in fixed:
            choices.append([degree or 1])
        elif degree == 1:
            choices.append(divisors if axis in _FILL_COSTS else [1])
        else:
            choices.append([n for n in divisors if n > 1 or degree is None])

    def distance(degrees: tuple[int, ...]) -> float:
        wanted = {axis: degree or max(1.0, world_size / known) for axis, degree in given.items()}
        return sum(
            abs(math.log2(found / wanted[axis])) * (_FILL_COSTS.get(axis, 1.0) if given[axis] == 1 else 1.0)
            for axis, found in zip(AXES, degrees)
        )

    fitting = sorted((each for each in product(*choices) if math.prod(each) == world_size > 1), key=distance)
    return [Parallel(**dict(zip(AXES, degrees))).describe() for degrees in fitting[:most]]
