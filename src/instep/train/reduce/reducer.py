"""The reducer: gradients of one optimizer, added over micro-batches and ranks while backward still runs.

The life of a step: gradients of the earlier micro-batches add up in flat buckets (`param.grad` is a window on one);
during the last micro-batch's backward a bucket is sent as soon as each of its parameters got its gradient; `reduce`
sends the rest, with the control words on the last bucket. Buckets leave in index order on every rank. The first step
sends nothing early: it counts and orders the gradients, and the ranks agree on one layout.

A gradient that comes after its bucket has left, and those of second and later backward calls of a micro-batch (which
have a normalisation of their own), are kept apart and go in a second round, which the control words announce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.errors import RanksDisagree
from instep.records.finding import CallSite
from instep.train.call_site import user_call_site
from instep.train.mesh import Grid
from instep.train.reduce.bucket import Bucket, Transport
from instep.train.reduce.lanes import Lanes
from instep.train.reduce.layout import plan_buckets, window
from instep.train.reduce.local_part import as_whole, is_cut, local_part, settled
from instep.train.reduce.norm import gradient_norm, norm_over_peers
from instep.train.reduce.words import Note, Table, Words, check_calls
from instep.train.world import World

SMALL_BYTES = 256 << 10  # in cache: zeroing and adding in place is cheaper than a copy per parameter


class Reducer:
    """Every rank makes the same calls, in the same order, except `begin_micro_batch` and what happens in a backward."""

    num_positions = 1  # words say the sums over this rank's micro-batches
    rates = 0  # a digest that has to be the same on all ranks, see `Note`
    grid: Grid | None = None  # where ranks hold different parts of the model

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, transport: Transport) -> None:
        self.world, self.transport = world, transport
        self.parameters = list(parameters)
        self.stray: CallSite | None = None  # a backward that did not go through step.backward
        self.receiving = False
        self.buckets: list[Bucket] = []
        self._built = False
        self._overlapping = False
        self._last_micro_batch = False
        self._sparse: set[int] = set()
        self._hooks: list[Any] = []
        self._adopt()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _adopt(self) -> None:
        """Starts over for the present parameters and their requires_grad."""
        count = len(self.parameters)
        self.close()
        self._trained = self._fingerprint()
        self._built = False
        self.buckets, self._bucket_of = [], [-1] * count
        self._members: list[tuple[int, ...]] = []
        self._views: list[Tensor | None] = [None] * count
        self._order: list[int] = []
        self._expected = [0] * count
        self._arrivals = [0] * count
        self._filled = bytearray(count)  # lane 0 has a gradient in the window
        self._used = np.zeros(count)  # any lane has
        self._late: dict[int, Tensor] = {}
        self.lanes = Lanes(self.parameters)
        self._reference: float | None = None  # of lane 0 in this step, equal on all ranks
        self._handles: list[Any] = []
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived, i)))
        total = sum(local_part(p).numel() * p.element_size() for p in self.parameters if p.requires_grad)
        self._direct = self.world.size == 1 and total > SMALL_BYTES  # one process: autograd's own gradients will do

    def _fingerprint(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in self.parameters)

    # -- a step

    def begin_step(self, parameters: Sequence[nn.Parameter], reference: float | None) -> None:
        """Takes up parameters that were added, frozen or unfrozen since the step before; the same on all ranks.

        reference: the weight that has factor 1 in this step, agreed in the step before; None in the first.
        """
        self.stray = None
        self._reference = reference
        if len(parameters) != len(self.parameters) or self._fingerprint() != self._trained:
            self.parameters = list(parameters)
            self._adopt()

    def begin_pass(self, overlap: bool) -> None:
        """overlap: an update follows this pass, as every rank knows from the step before."""
        self._overlapping = overlap and self._built and self.world.size > 1
        self._last_micro_batch = False

    def plan_turns(self, own: int, what: str) -> None:
        """Ranks may have different numbers of micro-batches."""

    def begin_micro_batch(self, position: int, last: bool) -> None:
        """position: among this rank's micro-batches of a full step; last: no other follows in this pass."""
        self.lanes.begin_micro_batch(position)
        self._last_micro_batch = last
        if last or not self._built:
            self._arrivals = [0] * len(self.parameters)
        if last and self._overlapping:
            self._pending = [sum(1 for i in b if self._expected[i]) for b in self._members]

    def enter_backward(self) -> None:
        self.receiving = True
        self.lanes.enter()

    def has_lost_gradients(self) -> bool:
        """Whether gradients that were added up are gone, as after model.zero_grad(); told by one parameter."""
        i = self._filled.find(1)
        is_sent = i >= 0 and 0 <= self._bucket_of[i] < len(self._handles)
        return i >= 0 and not is_sent and self.parameters[i].grad is None

    def leave_backward(self) -> None:
        self.receiving = False
        self.lanes.leave()

    def _arrived(self, i: int, parameter: Tensor) -> None:
        if not self.receiving:
            self.stray = self.stray or user_call_site()
            return
        self._used[i] = 1
        if not self._built and i not in self._order:
            self._order.append(i)
        if not self.lanes.next and self._accept(i, parameter):
            self._arrivals[i] += 1
            if not self._built:
                self._expected[i] = max(self._expected[i], self._arrivals[i])
            elif self._last_micro_batch and self._overlapping and self._arrivals[i] == self._expected[i]:
                self._send_ready(self._bucket_of[i])

    def _accept(self, i: int, parameter: Tensor) -> bool:
        """Takes lane 0's gradient to its window. False when its bucket has left already."""
        gradient, view = parameter.grad, self._views[i]
        assert gradient is not None
        if gradient is not view:
            if view is None:
                parameter.grad = settled(gradient, parameter)
                if gradient.is_sparse:
                    self._sparse.add(i)
            elif self._bucket_of[i] < len(self._handles):
                self._keep_late(i, settled(gradient, parameter))
                parameter.grad = None
                return False
            else:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                parameter.grad = view
        self._filled[i] = 1
        return True

    def _keep_late(self, i: int, gradient: Tensor) -> None:
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        self._late[i] = self._late[i] + gradient if i in self._late else gradient

    # -- sending

    def _send_ready(self, bucket: int) -> None:
        """One more parameter of this bucket is done; sends what is complete, in index order, but for the last bucket."""
        if bucket < 0:
            return
        self._pending[bucket] -= 1
        while len(self._handles) < len(self.buckets) - 1 and not self._pending[len(self._handles)]:
            for i in self._members[len(self._handles)]:
                self.parameters[i].grad = None  # what comes now is late, and must not touch what is being sent
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self._handles)]
        self._complete(bucket)
        self._handles.append(self.transport.start(bucket))

    def _complete(self, bucket: Bucket) -> None:
        """Before the bucket leaves: parameters without a gradient add nothing."""
        for i in self._members[bucket.index]:
            if not self._filled[i]:
                self._view(i).zero_()

    def _view(self, i: int) -> Tensor:
        view = self._views[i]
        assert view is not None
        return view

    def reduce(self, call: int, stop: bool, what: str) -> Table:
        """Sends what is left and waits. Afterwards `gradients()` are sums over ranks; the table has the totals.

        Gradients still have to be multiplied with `final_factor`. Raises RanksDisagree when the
        ranks are not in the same update.
        """
        if not self._built and not self._build(what):
            counted = sum(self.world.gather_objects(self.lanes.num_counted(), what))
            return Table([call], counted, 0, stop, [], [], np.zeros(len(self.parameters)), np.zeros(0))
        note = self._note(call, stop)
        table = self._alone(note) if self.world.size == 1 else self._together(note, what)
        if table.counted:
            self._second_round(table, what)
            for i, parameter in enumerate(self.parameters):
                if i not in self._sparse and not self._direct and self._bucket_of[i] >= 0:
                    parameter.grad = self._views[i] if table.used[i] else None
        return table

    def _note(self, call: int, stop: bool) -> Note:
        weights, losses = self.lanes.totals(self.num_positions)
        given = bool(self.lanes.all) and self.lanes.all[0].given
        return Note(call, self.lanes.num_counted(), int(given), int(stop), weights, losses, self.rates)

    def _alone(self, note: Note) -> Table:
        for bucket in self.buckets:
            self._complete(bucket)
        return Table.of([note], self._used, self._extra())

    def _extra(self) -> np.ndarray:
        """Per bucket, whether this rank has something for the second round."""
        extra = [
            any(i in self._late or any(lane.holds(i) for lane in self.lanes.later) for i in m) for m in self._members
        ]
        return np.array(extra, dtype=np.float64)

    def _together(self, note: Note, what: str) -> Table:
        tail = self.buckets[-1].words
        self._words.write(tail, note, self._used, self._extra())
        while len(self._handles) < len(self.buckets):
            self._send()
        for handle in self._handles:
            self.world.wait(handle, what)
        table = self._words.read(tail)
        check_calls(table.calls)
        return table

    def _second_round(self, table: Table, what: str) -> None:
        """Adds late gradients and those of later lanes, in the units of lane 0."""
        factors = self._lane_factors(table)
        for bucket in self.buckets:
            if not table.extra[bucket.index]:
                continue
            flat = torch.zeros_like(bucket.gradients)
            for i, target in self._windows(flat, bucket.index):
                if i in self._late:
                    target.add_(self._late[i])
                self._add_lanes(target, i, factors)
            if self.world.size > 1:
                self.world.wait(self.transport.start(Bucket(bucket.index, flat)), what)
            bucket.gradients.add_(flat)
        for i in self._outside_buckets():
            if any(lane.holds(i) for lane in self.lanes.later):
                parameter = self.parameters[i]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._add_lanes(parameter.grad, i, factors)
        for i in sorted(self._sparse):
            self.parameters[i].grad = self._sum_sparse(i, what)

    def _lane_factors(self, table: Table) -> list[float]:
        """Per later lane: what brings its gradients to the units of lane 0."""
        unit = self.final_factor(table)
        pairs = zip(self.lanes.later, table.weights[1:])
        return [(lane.reference or 0.0) / weight / unit if weight else 0.0 for lane, weight in pairs]

    def _add_lanes(self, target: Tensor, i: int, factors: Sequence[float]) -> None:
        for lane, factor in zip(self.lanes.later, factors):
            gradient = lane.gradient(i)
            if factor and gradient is not None:
                target.add_(gradient, alpha=factor)

    def _windows(self, flat: Tensor, bucket: int) -> Iterator[tuple[int, Tensor]]:
        offset = 0
        for i in self._members[bucket]:
            parameter = self.parameters[i]
            local = local_part(parameter)
            yield i, as_whole(window(flat, offset, local), parameter)
            offset += local.numel()

    def _outside_buckets(self) -> list[int]:
        return [i for i, bucket in enumerate(self._bucket_of) if bucket < 0 and self.parameters[i].requires_grad]

    def _sum_sparse(self, i: int, what: str) -> Tensor | None:
        gradient = self.parameters[i].grad
        mine = None if gradient is None else gradient.coalesce()
        if self.world.size == 1:
            return mine
        parts = self.world.gather_objects(None if mine is None else (mine.indices().cpu(), mine.values().cpu()), what)
        found = [part for part in parts if part is not None]
        if not found:
            return None
        indices, values = (torch.cat(column, dim=dim) for column, dim in zip(zip(*found), (1, 0)))
        parameter = self.parameters[i]
        return torch.sparse_coo_tensor(indices, values, parameter.size(), device=parameter.device).coalesce()

    # -- layout

    def _build(self, what: str) -> bool:
        """Agrees on the layout. False when no rank has a gradient yet."""
        what = f"{what}, where gradients are laid out"  # not what ranks wait for that have theirs already
        mine = (self._order, self._expected, self.lanes.first_reference, sorted(self._sparse), self._trained)
        orders, expected, references, sparse, trained = zip(*self.world.gather_objects(mine, what))
        if len(set(trained)) > 1:
            raise RanksDisagree("The ranks train different parameters: requires_grad is not the same on all of them.")
        order = next((order for order in orders if order), None)
        if order is None:
            return False
        self._sparse = set().union(*sparse)
        self._expected = [max(counts) for counts in zip(*expected)]
        self._agree_reference(references)
        if not self._direct:
            rest = [i for i, wanted in enumerate(self._trained) if wanted and i not in order]
            self._allocate([i for i in [*order, *rest] if i not in self._sparse])
        self._built = True
        return True

    def _agree_reference(self, references: Sequence[float | None]) -> None:
        """In the first step each rank divided by its own first weight; from here all ranks use slot 0's."""
        self._reference = next((reference for reference in references if reference is not None), None)
        mine = self.lanes.first_reference
        if mine is None or self._reference is None or mine == self._reference:
            return
        self.lanes.all[0].reference = self._reference
        for parameter, filled in zip(self.parameters, self._filled):
            if filled and parameter.grad is not None:
                parameter.grad.mul_(mine / self._reference)

    def _allocate(self, order: list[int]) -> None:
        layout = plan_buckets(order, [local_part(p) for p in self.parameters], [is_cut(p) for p in self.parameters])
        self._members = [*layout.members]
        dtypes = [self.parameters[members[0]].dtype for members in self._members]
        if self.world.size > 1 and (not dtypes or dtypes[-1] not in (torch.float32, torch.float64)):
            self._members.append(())  # words need fp32 at least
            dtypes.append(torch.float32)
        self._words = Words(
            self.world.rank, self.world.size, len(self.parameters), len(self._members), self.num_positions
        )
        for index, (members, dtype) in enumerate(zip(self._members, dtypes)):
            tail = self._words.numel if self.world.size > 1 and index == len(self._members) - 1 else 0
            numel = sum(local_part(self.parameters[i]).numel() for i in members) + tail
            device = self.parameters[members[0]].device if members else self.world.device
            bucket = Bucket(index, self.transport.allocate(numel, dtype, device), tail=tail)
            for i, view in self._windows(bucket.flat, index):
                parameter = self.parameters[i]
                if parameter.grad is not None and self._filled[i]:
                    view.copy_(parameter.grad)
                parameter.grad = view
                self._views[i], self._bucket_of[i] = view, index
                bucket.views.append(local_part(view))
            self.buckets.append(bucket)

    # -- after the reduction

    def final_factor(self, table: Table) -> float:
        """What `gradients()` are multiplied with to be means over the global batch."""
        weight = table.weights[0] if table.weights else 0.0
        return self._reference / weight if self._reference and weight else 1.0

    def gradients(self) -> list[Tensor]:
        """The tensors that hold all gradients: buckets, and what lies outside of them. Sparse ones by their values."""
        return [gradient for _, gradient in self._parts()]

    def _parts(self) -> Iterator[tuple[bool, Tensor]]:
        """What `gradients` gives, and whether peers on the tensor axis have other parts of it."""
        for bucket, members in zip(self.buckets, self._members):
            if members:
                yield is_cut(self.parameters[members[0]]), bucket.gradients
        for i in self._outside_buckets():
            gradient = self.parameters[i].grad
            if gradient is not None:
                yield is_cut(self.parameters[i]), gradient._values() if gradient.is_sparse else local_part(gradient)

    def norm(self) -> float:
        if self.grid is None:
            return gradient_norm(self.gradients())
        parts = list(self._parts())
        cut, alike = ([gradient for is_cut, gradient in parts if is_cut is wanted] for wanted in (True, False))
        return norm_over_peers(cut, alike, self.grid, copies=0)

    def finish(self) -> None:
        """Forgets this update's gradients and gets ready for the next."""
        for bucket in self.buckets:
            small = bucket.flat.numel() * bucket.flat.element_size() <= SMALL_BYTES
            if small:
                bucket.flat.zero_()
            for i in self._members[bucket.index]:
                self.parameters[i].grad = self._views[i] if small else None
        for i in self._outside_buckets():
            self.parameters[i].grad = None
        self._forget()

    def _forget(self) -> None:
        self._filled = bytearray(len(self.parameters))
        self._used[:] = 0
        self._late, self._handles = {}, []
        self.lanes.clear()
        self._overlapping = self._last_micro_batch = False

    def flush(self, what: str) -> None:
        """Ends a pass whose buckets were being sent though no update came: rank 0 keeps the sums, to be added to."""
        if not self._overlapping:
            return
        self.buckets[-1].words.zero_()
        while len(self._handles) < len(self.buckets):
            self._send()
        for handle in self._handles:
            self.world.wait(handle, what)
        self._handles, self._overlapping = [], False
        for bucket in self.buckets:
            if not self.world.is_main:
                bucket.flat.zero_()
            for i in self._members[bucket.index]:
                self.parameters[i].grad = self._views[i]
                self._filled[i] = 1
        for i, gradient in self._late.items():
            self._view(i).add_(gradient)
        self._late = {}
