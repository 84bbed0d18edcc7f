"""How the rank ended: the exception that ended it, or the one that was being handled when it said `sys.exit`."""

from __future__ import annotations

import atexit
import linecache
import os
import sys
import time
import traceback
from types import FrameType
from typing import Any

from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained, is_from_signal, note_failure
from instep.launch.probe.sites import is_users_file
from instep.records import recording as layout

_MOST_TEXT = 4000
_LIBRARIES = ("instep.train.run", "accelerate", "lightning", "transformers", "deepspeed", "horovod")
_FINISH_SECONDS = 0.02


def describe_error(error: BaseException) -> dict[str, Any]:
    """Type, text and the frames of the user's code, innermost first; a worker's error carries its text instead."""
    frames = [
        {"file": os.path.abspath(frame.filename), "line": frame.lineno or 0, "name": frame.name, "own": True}
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if is_users_file(frame.filename)
    ]
    return {"type": type(error).__name__, "message": str(error)[:_MOST_TEXT], "frames": frames[:30]}


def note_raised(recorder: Recorder, what: str, site: int, error: BaseException) -> None:
    """An exception that passed through a watched call: if the script goes on, someone has swallowed it."""
    if isinstance(error, (StopIteration, GeneratorExit)) or getattr(error, "_instep_noted", False):
        return
    try:
        error._instep_noted = True  # type: ignore[attr-defined]
        recorder.log.note("raised", call=what, site=site, **describe_error(error))
    except Exception as failure:  # the script's own error must reach it unchanged
        if is_from_signal(failure):
            raise
        note_failure("note_raised", failure)


@contained
def note_end(recorder: Recorder, how: str, code: Any, error: BaseException | None) -> None:
    """Notes an end with an error, and each error it came from."""
    chain, seen = [], set()
    while error is not None and id(error) not in seen and len(chain) < 5:
        seen.add(id(error))
        if not isinstance(error, SystemExit):
            chain.append(describe_error(error))
        error = error.__cause__ or error.__context__
    recorder.log.note("end", how=how, code=code if isinstance(code, (int, type(None))) else 1, errors=chain)


def watch_exits(recorder: Recorder) -> None:
    atexit.register(_at_exit, recorder)
    replace(sys, "exit", lambda original: _wrap_exit(recorder, original, "sys.exit"))
    replace(os, "_exit", lambda original: _wrap_exit(recorder, original, "os._exit"))


def _wrap_exit(recorder: Recorder, original: Any, how: str) -> Any:
    def call(*args: Any) -> Any:
        if os.getpid() == layout.HEADER.unpack_from(recorder.page)[2]:  # a forked child's end is not the rank's
            note_end(recorder, how, args[0] if args else 0, sys.exc_info()[1])
            _note_line(recorder, sys._getframe(1))
        return original(*args)

    return call


@contained
def _note_line(recorder: Recorder, frame: FrameType) -> None:
    name = frame.f_code.co_filename
    if is_users_file(name):
        text = linecache.getline(name, frame.f_lineno).strip()
        recorder.log.note("exit-called", file=os.path.abspath(name), line=frame.f_lineno, source=text)


def let_backend_finish() -> None:
    """Gives gloo's threads the interpreter lock once more before the group goes.

    torch 2.13 joins them while it holds that lock; one that is about to give up the work of the last backward wants it
    (the work keeps a copy of the context that backward stored), and both wait for ever. Seen about once in 20 ends of a
    busy machine, without instep too.
    """
    time.sleep(_FINISH_SECONDS)


@contained
def _at_exit(recorder: Recorder) -> None:
    if recorder.sequence():
        let_backend_finish()
    recorder.mark(layout.KIND_NUMBER["ended"])
    recorder.log.note("libraries", names=[name for name in _LIBRARIES if name in sys.modules])
    recorder.log.note("ended", lost=recorder.log.lost, step=recorder.num_steps)
