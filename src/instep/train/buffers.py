"""Buffers that forward writes, equal on all ranks after each update.

Running statistics of normalisation layers: every micro-batch starts from the step's statistics, and what each added is
combined in slot order, as one process would have done one after the other. Any other buffer takes the value that the
last micro-batch left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from instep.errors import UsageError
from instep.train.absent import is_absent
from instep.train.techniques.sync_batch_norm import is_synchronised
from instep.train.world import World


class Buffers:
    """begin, end and discard are local; combine is for every rank. world: the ranks with other data, one per data rank.

    exact_slots: how many slots a rank has, when the statistics of each have to be added in slot order on any number of
    ranks; None lets each rank add up its own first, and one process do as PyTorch does.
    """

    def __init__(self, world: World, say: Callable[[str], None], exact_slots: range | None) -> None:
        self._world, self._say, self._exact = world, say, exact_slots
        self.is_active = False  # whether there are buffers that need care
        self._group: dist.ProcessGroup | None = None
        self._norms: list[_NormBase] = []
        self._others: list[tuple[str, nn.Module, str]] = []
        self._base: Tensor | None = None  # statistics at the step's begin
        self._gains: dict[int, Tensor] = {}  # by row: what micro-batches added, and their numbers of forwards
        self._written: list[int] = []  # per other buffer: the last slot that wrote it, -1 for none
        self._versions: list[tuple[int, int]] = []
        self._slot: int | None = None

    def add(self, model: nn.Module) -> None:
        """Takes a model's buffers under care. Every rank must call it."""
        if self._world.size == 1 and self._exact is None:
            return
        norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
        norms = [norm for norm in norms if not is_absent(norm.running_mean)]  # those of other stages of a pipeline
        names = ("running_mean", "running_var", "num_batches_tracked")
        cared = {id(buffer) for norm in norms for name in names if (buffer := getattr(norm, name)) is not None}
        known = {id(norm) for norm in self._norms}  # of a module that belongs to two models
        self._norms += [norm for norm in norms if not is_synchronised(norm) and id(norm) not in known]
        others = {(id(module), name) for _, module, name in self._others}
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                is_known = id(buffer) in cared or (id(module), name) in others
                if not is_known and not is_absent(buffer):
                    self._others.append((f"{prefix}.{name}".lstrip("."), module, name))
        self._written = [-1] * len(self._others)
        self.is_active = bool(self._norms or self._others)
        # also where only another stage of a pipeline has some
        if self._group is None and any(True for _ in model.buffers()):
            self._group = self._world.new_group()

    # -- around a micro-batch's forward

    def begin(self, slot: int) -> None:
        if not self.is_active:
            return
        self._slot = slot
        if self._norms:
            if self._base is None:
                self._base = self._read()
            else:
                self._write(self._base)
        self._versions = [_version(module, name) for _, module, name in self._others]

    def end(self) -> None:
        if self._slot is None:
            return
        if self._base is not None:
            gain, row = (
                self._added(self._base, self._read()),
                0 if self._exact is None else self._slot - self._exact.start,
            )
            self._gains[row] = self._chain(self._gains[row], gain) if row in self._gains else gain
        for i, (_, module, name) in enumerate(self._others):
            if _version(module, name) != self._versions[i]:
                self._written[i] = self._slot
        self._slot = None

    def discard(self) -> None:
        """Ends a micro-batch whose forward is only a repetition."""
        if self._slot is not None and self._base is not None:
            self._write(self._base)
        self._slot = None

    # -- statistics as one vector: means and variances (num elements), then forwards (num layers)

    def _sizes(self) -> list[int]:
        return [2 * norm.num_features for norm in self._norms]

    def _read(self) -> Tensor:
        values = [buffer.double() for norm in self._norms for buffer in (norm.running_mean, norm.running_var)]  # type: ignore[union-attr]
        counts = [norm.num_batches_tracked.double().reshape(1) for norm in self._norms]  # type: ignore[union-attr]
        return torch.cat([*values, *counts])

    def _write(self, vector: Tensor) -> None:
        targets = [b for norm in self._norms for b in (norm.running_mean, norm.running_var)]
        targets += [norm.num_batches_tracked for norm in self._norms]
        sizes = [target.numel() for target in targets]  # type: ignore[union-attr]
        with torch.no_grad():
            for target, part in zip(targets, vector.split(sizes)):
                # past autograd: a pipeline runs several forwards before a backward, which only checks that they are untouched
                target.data.copy_(part.reshape(target.shape))  # type: ignore[union-attr]

    def _spread(self, per_layer: Tensor) -> Tensor:
        sizes = torch.tensor(self._sizes(), device=per_layer.device)
        return per_layer.repeat_interleave(sizes, output_size=sum(self._sizes()))

    def _parts(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        layers = len(self._norms)
        return vector[:-layers], vector[-layers:]

    def _decay(self, forwards: Tensor) -> Tensor:
        """What is left of older statistics after so many forwards: (1 - momentum)^n; 1 where plain sums are kept."""
        momenta = torch.tensor([n.momentum or 0.0 for n in self._norms], dtype=torch.float64, device=forwards.device)
        return self._spread((1.0 - momenta) ** forwards)

    def _is_cumulative(self, device: torch.device) -> Tensor:
        return self._spread(torch.tensor([norm.momentum is None for norm in self._norms], device=device))

    def _added(self, base: Tensor, now: Tensor) -> Tensor:
        """Momentum layers: now - decay * base. Cumulative averages: the sum of the new statistics."""
        (old, old_count), (new, new_count) = self._parts(base), self._parts(now)
        forwards = new_count - old_count
        sums = new * self._spread(new_count) - old * self._spread(old_count)
        gain = torch.where(self._is_cumulative(now.device), sums, new - self._decay(forwards) * old)
        return torch.cat([gain, forwards])

    def _chain(self, first: Tensor, second: Tensor) -> Tensor:
        (a, a_forwards), (b, b_forwards) = self._parts(first), self._parts(second)
        return torch.cat([a * self._decay(b_forwards) + b, a_forwards + b_forwards])

    def _apply(self, base: Tensor, gain: Tensor) -> Tensor:
        (old, old_count), (added, forwards) = self._parts(base), self._parts(gain)
        count = old_count + forwards
        average = (old * self._spread(old_count) + added) / self._spread(count).clamp(min=1)
        return torch.cat(
            [torch.where(self._is_cumulative(base.device), average, old * self._decay(forwards) + added), count]
        )

    # -- over ranks

    def combine(self, what: str) -> None:
        """Makes all cared-for buffers equal on all ranks. Every rank must call it; costs one all-gather, if any are."""
        if not self.is_active:
            return
        self.end()
        base = self._base if self._base is not None else self._read() if self._norms else None
        none = (
            torch.zeros(0, dtype=torch.float64, device=self._world.device) if base is None else torch.zeros_like(base)
        )
        gains = [self._gains.get(row, none) for row in range(1 if self._exact is None else len(self._exact))]
        written = torch.tensor(self._written, dtype=torch.float64, device=none.device)
        ranks = self._gather(torch.cat([*gains, written]), what)
        if base is not None:
            rows = [row for rank in ranks for row in rank[: none.numel() * len(gains)].split(none.numel())]
            total = rows[0]
            for row in rows[1:]:
                total = self._chain(total, row)
            self._write(self._apply(base, total))
        self._base, self._gains = None, {}
        self._send_others(torch.stack([rank[none.numel() * len(gains) :] for rank in ranks]), what)

    def _gather(self, mine: Tensor, what: str) -> list[Tensor]:
        if self._group is None:
            return [mine]
        rows = [torch.empty_like(mine) for _ in range(self._world.size)]
        self._world.wait(dist.all_gather(rows, mine, group=self._group, async_op=True), what)
        return rows

    def _send_others(self, last_slots: Tensor, what: str) -> None:
        for i in self._written_anywhere(last_slots):
            name, module, attribute = self._others[i]
            if self._exact is not None:
                raise UsageError(
                    f"exact=True cannot keep the buffer {name}: forward writes it, so it depends on which micro-batches a "
                    "rank had. Leave exact out, or compute it from parameters."
                )
            self._say(
                f"the buffer {name} is written in forward; it takes the last micro-batch's value on all ranks, "
                "so it depends on the number of processes"
            )
            source = int(last_slots[:, i].argmax())
            buffer = getattr(module, attribute)
            self._world.wait(dist.broadcast(buffer, group_src=source, group=self._group, async_op=True), what)
        self._written = [-1] * len(self._others)

    def _written_anywhere(self, last_slots: Tensor) -> Iterator[int]:
        if self._others:
            yield from (last_slots.amax(dim=0) >= 0).nonzero().flatten().tolist()


def _version(module: nn.Module, name: str) -> tuple[int, int]:
    buffer: Any = getattr(module, name)
    return id(buffer), buffer._version
