"""An iterable dataset as one virtual stream per slot, so that its split depends on nothing but the number of slots.

Stream m sees itself as worker m of M. A dataset that never asks is strided instead: it is read as a whole, and its
i-th sample goes to slot i mod M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from instep.train.data.fetch import collate_samples, take_ready
from instep.train.data.stream_reader import REST, SplitReader, StreamPlan, StridedReader, open_stream
from instep.train.data.torch_worker import can_show
from instep.train.seeds import DATA, set_generators


class StreamSet:
    """The streams of some slots in one epoch, read by one process a step at a time, in order.

    `peek` reads just enough to know whether a slot has samples in a step. The first sample of a micro-batch is drawn
    under another seed than the rest, so that looking ahead changes nothing.
    """

    def __init__(
        self,
        dataset: Any,
        plan: StreamPlan,
        slots: Sequence[int],
        epoch: int,
        collate_fn: Callable[[Any], Any] | None,
    ) -> None:
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        self._dataset = dataset
        self._plan = plan
        self._slots = tuple(slots)
        self._epoch = epoch
        self._collate_fn = collate_fn
        self._reader: SplitReader | StridedReader | None = None
        self._pending: dict[int, list[Any]] = {}
        self._peeked: dict[int, int] = {}
        self._initial: dict[int, Any] = {}
        self._first_step = 0

    @property
    def is_strided(self) -> bool:
        return self._reader is not None and self._reader.is_strided

    def resume(self, first_step: int, states: dict[int, Any] | None) -> bool:
        """Goes to a step by the states before that step, or else by reading up to it. True when it had to read."""
        self._first_step = first_step
        self._initial = {slot: state for slot, state in (states or {}).items() if slot in self._slots and state}
        unread = list(self._slots)
        for slot, state in self._initial.items():
            if slot in unread and self._restore(slot, state):
                unread = [] if state["strided"] else [other for other in unread if other != slot]
        for step in range(first_step if unread else 0):
            for slot in unread:
                self.peek(step, slot)
                self.pass_over(step, slot)
        return bool(first_step and unread)

    def peek(self, step: int, slot: int) -> bool:
        """Whether the slot has samples in the step."""
        if self._peeked.get(slot) != step:
            reader = self._reader or self._choose_reader(slot)
            self._pending[slot] = reader.first(step, slot)
            self._peeked[slot] = step
        return bool(self._pending.get(slot))

    def take(self, step: int, slot: int) -> tuple[int, Any]:
        """The number of samples and the collated micro-batch; (0, None) when the slot has none."""
        if not self.peek(step, slot):
            return 0, None
        samples = self._rest(step, slot)
        if self._plan.prebatched:
            return take_ready(samples[0], self._collate_fn, self._plan.micro_batch)
        return len(samples), collate_samples(samples, self._collate_fn, f"the samples of stream {slot}")

    def pass_over(self, step: int, slot: int) -> None:
        """Reads what is left of a micro-batch that nobody took."""
        if self._peeked.get(slot) == step and self._pending.get(slot):
            self._rest(step, slot)

    def state(self, slot: int, step: int) -> Any:
        """The stream's state before the step, everything earlier having been read; None where none is kept."""
        if step == self._first_step and slot in self._initial:
            return self._initial[slot]
        if self._reader is None or slot not in self._peeked:
            return None
        return self._reader.state_before(slot) if self._peeked[slot] == step else self._reader.state(slot)

    def _rest(self, step: int, slot: int) -> list[Any]:
        assert self._reader is not None
        samples = self._pending.pop(slot)
        set_generators(DATA, self._plan.seed, self._epoch, step, slot, REST)
        self._reader.complete(slot, samples)
        return samples

    def _choose_reader(self, slot: int) -> SplitReader | StridedReader:
        """Opens the first stream: whether its dataset asks which part it is to read decides for all."""
        stream = open_stream(self._dataset, self._plan, self._epoch, slot)
        stream.look_ahead()
        if stream.shown.was_asked and can_show():
            self._reader = SplitReader(self._dataset, self._plan, self._epoch, self._slots)
            self._reader.adopt(slot, stream)
        else:
            self._reader = StridedReader(stream, self._plan, self._epoch)
        return self._reader

    def _restore(self, slot: int, state: dict[str, Any]) -> bool:
        """Whether the state was enough to go on from."""
        if state["dataset"] is None and not state["ended"]:
            return False
        stream = open_stream(self._dataset, self._plan, self._epoch, slot, state["dataset"])
        stream.ended = state["ended"]
        if state["strided"]:
            self._reader = StridedReader(stream, self._plan, self._epoch)
            return True
        if self._reader is None:
            self._reader = SplitReader(self._dataset, self._plan, self._epoch, self._slots)
        assert isinstance(self._reader, SplitReader)
        self._reader.adopt(slot, stream)
        return True
