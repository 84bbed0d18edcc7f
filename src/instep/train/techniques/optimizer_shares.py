"""Optimizer state shared out over the ranks that hold the same parameters (ZeRO, stage 1).

Each data rank steps some parameters, whole ones, so that any optimizer gives what it would give alone, and sends them
to the others. The optimizer is the script's own: it skips parameters without a gradient, as it always does, and so keeps
state only for those that are stepped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from instep.train.reduce.local_part import local_part
from instep.train.reduce.spread import Spread
from instep.train.world import World


class OptimizerShares:
    """Every rank makes the same calls. data: the ranks that hold the same parameters."""

    def __init__(self, data: World, parameters: Sequence[nn.Parameter], spread: Spread) -> None:
        self._data, self._spread = data, spread
        self._owners: dict[int, int] = {}
        self._load = [0] * data.size
        self._kept: list[nn.Parameter] = []  # ids stay theirs while they are here
        self.take_up(parameters)

    def take_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives each new parameter to the rank with the least, the largest first. In an order equal on all ranks."""
        new = [p for p in parameters if id(p) not in self._owners]
        sizes = {id(p): 0 if p.is_meta else local_part(p).numel() for p in new}
        for parameter in sorted(new, key=lambda p: -sizes[id(p)]):
            owner = self._load.index(min(self._load))
            self._owners[id(parameter)] = owner
            self._load[owner] += sizes[id(parameter)]
            self._kept.append(parameter)

    def is_here(self, parameter: Tensor) -> bool:
        """Whether this rank steps it."""
        return self._owners.get(id(parameter), self._data.rank) == self._data.rank

    def drop_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Forgets state that another rank keeps, as after a start with an optimizer that has stepped before."""
        for parameter in [p for p in optimizer.state if isinstance(p, Tensor) and not self.is_here(p)]:
            del optimizer.state[parameter]

    @contextmanager
    def stepping(self, parameters: Sequence[nn.Parameter], what: str) -> Iterator[None]:
        """Around `optimizer.step()`: hides the gradients of what others step, then sends and takes parameters."""
        self.take_up(parameters)
        stepped = [p for p in parameters if p.grad is not None]
        hidden = [(p, p.grad) for p in stepped if not self.is_here(p)]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient
        owned: list[list[Tensor]] = [[] for _ in range(self._data.size)]
        for parameter in stepped:
            owned[self._owners[id(parameter)]].append(local_part(parameter).detach())
        with torch.no_grad():
            self._spread(owned, what)
