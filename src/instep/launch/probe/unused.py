"""Whether a model wrapped with `find_unused_parameters=True` has any parameter that goes without a gradient."""

from __future__ import annotations

from typing import Any

from instep.launch.probe.recorder import Recorder, contained

_BACKWARDS = 20  # looked at, after the first; then the hooks take themselves off


class UsedParameters:
    """Counts for each parameter the backwards that reached it on this rank. A hook costs about half a microsecond."""

    def __init__(self, recorder: Recorder, number: int, parameters: list[Any]) -> None:
        self._recorder, self._number = recorder, number
        self._counts = [0] * len(parameters)
        self._backwards = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._count(index))
            for index, parameter in enumerate(parameters)
        ]

    def _count(self, index: int) -> None:
        self._counts[index] += 1

    @contained
    def end_backward(self) -> None:
        """After each backward that averaged gradients."""
        self._backwards += 1
        if self._backwards == 1:
            self._counts = [0] * len(self._counts)
        if self._backwards <= _BACKWARDS or not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        unused = sum(count < _BACKWARDS for count in self._counts)
        self._recorder.log.note(
            "used-parameters", wrapper=self._number, backwards=_BACKWARDS, unused=unused, of=len(self._counts)
        )


def watch_used(recorder: Recorder, number: int, parameters: list[Any], model: Any) -> UsedParameters | None:
    """number: of the wrapped model in the events."""
    searches = model.find_unused_parameters and not model.static_graph
    return UsedParameters(recorder, number, parameters) if searches else None
