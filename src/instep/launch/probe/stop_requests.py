"""A callback that asks a training library to stop: which line of the user's code did so, since the loop is the library's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.sites import is_users_file

# Module, class, and the attributes by which its loop is told to end. Looked for when a model is wrapped: it is loaded then.
_CONTROLS = (
    ("transformers.trainer_callback", "TrainerControl", ("should_training_stop", "should_epoch_stop")),
    ("lightning.pytorch.trainer.trainer", "Trainer", ("should_stop",)),
    ("pytorch_lightning.trainer.trainer", "Trainer", ("should_stop",)),
)


@contained
def watch_stop_requests(recorder: Recorder) -> None:
    for module, name, attributes in _CONTROLS:
        owner = getattr(sys.modules.get(module), name, None)
        if owner is not None:
            replace(owner, "__setattr__", lambda original, names=attributes: _wrap(recorder, names, original))


def _wrap(recorder: Recorder, names: tuple[str, ...], original: Callable[..., Any]) -> Callable[..., Any]:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name in names and value is True and getattr(self, name, None) is not True:
            _note(recorder, name)
        original(self, name, value)

    return __setattr__


@contained
def _note(recorder: Recorder, name: str) -> None:
    frame = sys._getframe(3)  # above this, what contains it, and the wrapper
    if is_users_file(frame.f_code.co_filename):  # a library's own end of training is not a request
        recorder.log.note("stop-asked", site=recorder.sites.here(3), attribute=name, function=frame.f_code.co_name)
