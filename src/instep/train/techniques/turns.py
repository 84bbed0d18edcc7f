"""Turns: a sharded model gathers parameters in its forward and backward, so every rank has to run equally many.

A rank that has fewer micro-batches than another takes its missing turns with the inputs of its last forward, and sends
zeros through the backward: it takes part and adds nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from instep.errors import UsageError
from instep.train.call_site import user_call_site


class Turns:
    """Watches the forwards of one model. stray: the line of a backward that nothing announced."""

    def __init__(self, model: nn.Module) -> None:
        self.receiving = False
        self.stray: Any = None
        self._model = model
        self._calls: list[tuple[Any, Any]] = []  # of this turn
        self._outputs: list[Tensor] = []  # of this turn, those with a graph
        self._last: list[tuple[Any, Any]] = []  # calls of the newest turn that had any
        self._evaluated: list[tuple[Any, Any]] | None = None  # calls of the newest batch, while an evaluation runs
        self._in_turn = False
        self._trains = True  # whether the newest turn of this rank built a graph
        self._replaying = False
        self._hooks = [
            model.register_forward_pre_hook(self._note, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._watch),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        if self._calls:
            self._last = self._calls
        self._calls, self._outputs, self._in_turn = [], [], True

    def end(self, had_backward: bool) -> None:
        """Does what is missing of a turn: its backward, or all of it where the micro-batch was left out."""
        if not self._calls:
            self._replay(self._trains)
        elif not had_backward:
            self._send_zeros()
        self._outputs, self._in_turn = [], False

    def begin_evaluation(self) -> None:
        """A batch of an evaluation begins."""
        self._evaluated = []

    def end_evaluation(self) -> None:
        self._evaluated = None

    def replay_forward(self) -> None:
        """A turn of an evaluation, for which this rank has no batch: that of its newest one, or of its training."""
        self._replay(trains=False, calls=self._evaluated)

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._replaying:
            return
        if self._evaluated is not None:
            self._evaluated.append(tree_map(_detached, (args, kwargs)))
        elif self._in_turn:
            self._calls.append(tree_map(_detached, (args, kwargs)))
            self._trains = torch.is_grad_enabled()

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self._outputs.append(tensor)
                tensor.register_hook(self._passed)

    def _passed(self, gradient: Tensor) -> None:
        if not self.receiving and not self._replaying:
            self.stray = self.stray or user_call_site()

    def _replay(self, trains: bool, calls: list[tuple[Any, Any]] | None = None) -> None:
        calls = calls or self._calls or self._last
        if not calls:
            raise UsageError(
                "a rank had no micro-batch yet, so it has no input to take part with in a sharded split. Give every rank at "
                "least one sample in the first step after the start: a larger dataset, fewer ranks, drop_last=True, or a "
                "checkpoint of another step."
            )
        kept = [(buffer, buffer.clone()) for buffer in self._model.buffers()]  # running statistics take no part
        self._replaying = True
        try:
            with torch.set_grad_enabled(trains):
                for args, kwargs in calls:
                    self._model(*args, **kwargs)
        finally:
            self._replaying = False
        self._send_zeros()
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)

    def _send_zeros(self) -> None:
        self._replaying = True
        try:
            if self._outputs:
                torch.autograd.backward(self._outputs, [torch.zeros_like(t) for t in self._outputs])
        finally:
            self._replaying, self._outputs = False, []


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
