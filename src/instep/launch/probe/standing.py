"""What the main thread is in while it leaves no marks: read from its stack by the thread that watches."""

from __future__ import annotations

import os
from types import FrameType

from instep.launch.probe import backward, data, flight
from instep.launch.probe.recorder import Recorder, contained, count_operations
from instep.records import recording as layout

_LEAVE_STEP, _ENTER_COLLECTIVE = layout.KIND_NUMBER["leave-step"], layout.KIND_NUMBER["enter-collective"]
_OPTIMIZER = os.path.join("torch", "optim", "optimizer.py")
# By file and name of a function of ours, or of torch's around each step of an optimizer, that is on the stack meanwhile. Not
# forward, whose mark says whether gradients are on, which another thread cannot read.
_STAGES = {
    (backward.__file__, "backward"): layout.KIND_NUMBER["enter-backward"],
    (data.__file__, "__next__"): layout.KIND_NUMBER["enter-data"],
}


class Standing:
    """Looks some times a second at a rank whose steps are only counted."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._steps = -1

    @contained
    def look(self, frame: FrameType | None) -> None:
        """Shows how far the rank is. When no step has ended since the last look, all that follows is watched."""
        recorder = self._recorder
        sequence, is_marked = count_operations(), recorder.kind == _ENTER_COLLECTIVE  # these leave marks in all steps
        if recorder.num_steps != self._steps:
            self._steps = recorder.num_steps
            if not is_marked:
                recorder.mark_from_outside(_LEAVE_STEP, 0, sequence)
            return
        recorder.wake()
        kind, caller = find_stage(frame)
        if kind and not is_marked:
            enqueued, completed = flight.read_status() or (0, 0)
            before = sequence - max(0, enqueued - completed)  # what is under way was begun in there
            recorder.mark_from_outside(kind, recorder.sites.of_frame(caller), before, recorder.turns)


def find_stage(frame: FrameType | None) -> tuple[int, FrameType | None]:
    """Kind of the mark that would have been left when the innermost watched call began, and who called it; 0 outside."""
    while frame is not None:
        code = frame.f_code
        kind = _STAGES.get((code.co_filename, code.co_name), 0)
        if code.co_name == "wrapper" and code.co_filename.endswith(_OPTIMIZER):
            kind = layout.KIND_NUMBER["enter-step"]
        frame = frame.f_back
        if kind:
            return kind, frame
    return 0, None
