"""Forwards in evaluation mode that keep a graph for a backward that does not come."""

from __future__ import annotations

from typing import Any

import torch

from instep.launch.probe.memory_kinds import graph_bytes
from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.tensor_prints import tensors_in
from instep.launch.probe.wrapping import WRAPPERS

_MOST_NOTES = 3


class Evaluations:
    """Looks at the first forward after each switch of a wrapped model to evaluation."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._noted = 0
        self._waiting = False

    def wrap_train(self, original: Any) -> Any:
        """`module.eval()` is `module.train(False)`, for every module inside as well."""

        def train(module: Any, mode: bool = True) -> Any:
            if not mode and WRAPPERS.all:
                self._expect(module)
            return original(module, mode)

        return train

    @contained
    def _expect(self, module: Any) -> None:
        """A hook on the module that notes one forward and takes itself off."""
        known = WRAPPERS.of_model(module) or WRAPPERS.of_inner(module)
        if known is None or self._waiting or self._noted >= _MOST_NOTES:
            return
        self._waiting = True
        model: Any = known.model()
        handle = model.module.register_forward_hook(lambda *call: self._look(handle, known.number, *call))

    @contained
    def _look(self, handle: Any, number: int, module: Any, args: Any, output: Any) -> None:
        handle.remove()
        self._waiting = False
        tensor = next((one for _, one in tensors_in(output) if one.grad_fn is not None), None)
        if module.training or tensor is None:
            return
        self._noted += 1
        recorder = self._recorder
        recorder.log.note(
            "evaluation-with-graph",
            wrapper=number,
            site=recorder.sites.here(2),
            backwards=recorder.backwards,
            bytes=graph_bytes(tensor),
            parameters=sum(p.numel() * p.element_size() for p in module.parameters()),
        )


def watch_evaluations(recorder: Recorder) -> None:
    replace(torch.nn.Module, "train", Evaluations(recorder).wrap_train)
