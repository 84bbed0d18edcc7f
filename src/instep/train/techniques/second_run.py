"""What surrounds the two runs of a recomputed block, so that the second gives the numbers of the first and leaves no
trace: random generators, and buffers that forward writes (running statistics would count twice).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from instep.errors import UsageError
from instep.train import seeds

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # written in training, and not read then


class FirstRun:
    """A context, entered once. mode: one of PyTorch's that goes inside. written: what earlier runs have learned."""

    def __init__(self, block: nn.Module, written: dict[str, bool], mode: Any = None) -> None:
        self.block, self.written = block, written
        self._mode = mode
        self.generators: tuple[Any, ...] = ()
        self.values: dict[str, Tensor] = {}  # of written buffers, from before the run

    def __enter__(self) -> None:
        self.generators = seeds.get_generators()
        for key, module, name in own_buffers(self.block):
            if self.written.get(key, True):
                self.values[key] = getattr(module, name).detach().clone()
        self._versions = {key: _version(module, name) for key, module, name in own_buffers(self.block)}
        if self._mode is not None:
            self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)
        for key, module, name in own_buffers(self.block):
            is_written = _version(module, name) != self._versions.get(key)
            if is_written and key not in self.values and error[0] is None:
                raise UsageError(
                    f"recompute cannot run {type(self.block).__name__} a second time to the same numbers: it writes its buffer "
                    f"{key} in some forwards only. Leave recompute out."
                )
            self.written[key] = self.written.get(key, False) or is_written
            if not self.written[key]:
                self.values.pop(key, None)


class SecondRun:
    """A context that may be entered several times, as by several backwards through one graph."""

    def __init__(self, first: FirstRun, mode: Any = None) -> None:
        self._first, self._mode = first, mode
        self._generators: tuple[Any, ...] = ()
        self._live: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        first = self._first
        self._generators = seeds.get_generators()
        seeds.restore_generators(first.generators)
        for module, name in statistics(first.block):
            self._replace(module, name, getattr(module, name).clone())
        for key, module, name in own_buffers(first.block):
            if key in first.values:
                self._replace(module, name, first.values[key].clone())
        if self._mode is not None:
            self._mode.__enter__()

    def _replace(self, module: nn.Module, name: str, value: Tensor) -> None:
        self._live.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)
        for module, name, value in self._live:
            setattr(module, name, value)
        self._live = []
        seeds.restore_generators(self._generators)


def statistics(block: nn.Module) -> list[tuple[nn.Module, str]]:
    norms = [module for module in block.modules() if isinstance(module, _NormBase)]
    return [(norm, name) for norm in norms for name in STATISTICS if getattr(norm, name) is not None]


def own_buffers(block: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """All others, by dotted name."""
    return [
        (f"{prefix}.{name}".lstrip("."), module, name)
        for prefix, module in block.named_modules()
        for name, _ in module.named_buffers(recurse=False)
        if not (isinstance(module, _NormBase) and name in STATISTICS)
    ]


def _version(module: nn.Module, name: str) -> tuple[int, int]:
    buffer: Any = getattr(module, name)
    return id(buffer), buffer._version
