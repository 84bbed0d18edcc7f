"""How the rank ended: the exception that ended it, or the one that was being handled when it said `sys.exit`."""

from __future__ import annotations

import argparse
import atexit
import linecache
import os
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained, count_operations, is_from_signal, note_failure
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
        recorder.flush()
        recorder.log.note("raised", call=what, site=site, **describe_error(error))
    except Exception as failure:  # the script's own error must reach it unchanged
        if is_from_signal(failure):
            raise
        note_failure("note_raised", failure)


@contained
def note_end(recorder: Recorder, how: str, code: Any, error: BaseException | None) -> None:
    """Notes an end with an error, and each error it came from."""
    recorder.flush()
    chain, seen = [], set()
    while error is not None and id(error) not in seen and len(chain) < 5:
        seen.add(id(error))
        if not isinstance(error, SystemExit):
            chain.append(describe_error(error))
        error = error.__cause__ or error.__context__
    recorder.log.note("end", how=how, code=code if isinstance(code, (int, type(None))) else 1, errors=chain)


def watch_exits(recorder: Recorder) -> None:
    atexit.register(_at_exit, recorder)
    replace(threading, "excepthook", lambda original: _wrap_thread_hook(recorder, original))
    replace(argparse.ArgumentParser, "error", lambda original: _wrap_refusal(recorder, original))
    replace(sys, "exit", lambda original: _wrap_exit(recorder, original, "sys.exit"))
    replace(os, "_exit", lambda original: _wrap_exit(recorder, original, "os._exit"))


def _wrap_thread_hook(recorder: Recorder, original: Any) -> Any:
    """An exception ends the thread that it is raised in, and the rank goes on without it."""

    def excepthook(args: Any) -> Any:
        _note_thread(recorder, args)
        return original(args)

    return excepthook


@contained
def _note_thread(recorder: Recorder, args: Any) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread is not None else ""
        recorder.log.note("thread-raised", thread=name, **describe_error(args.exc_value))


def handled_error(thread: int | None) -> dict[str, Any] | None:
    """The exception that a thread handles at the moment, as it does in an `except` block and in a `finally` that an
    exception has led to; with what it calls there."""
    look = getattr(sys, "_current_exceptions", None)  # private to CPython; without it the answer is None
    found = look().get(thread) if look is not None else None
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    return describe_error(error) if isinstance(error, Exception) else None


def _wrap_exit(recorder: Recorder, original: Any, how: str) -> Any:
    def call(*args: Any) -> Any:
        if os.getpid() == layout.HEADER.unpack_from(recorder.page)[2]:  # a forked child's end is not the rank's
            note_end(recorder, how, args[0] if args else 0, sys.exc_info()[1])
            _note_line(recorder, sys._getframe(1), args[0] if args else 0)
        return original(*args)

    return call


@contained
def _note_line(recorder: Recorder, frame: FrameType, code: Any) -> None:
    if is_users_file(frame.f_code.co_filename):
        _note_exit_at(recorder, frame.f_code.co_filename, frame.f_lineno, code)


def _note_exit_at(recorder: Recorder, file: str, line: int, code: Any) -> None:
    text = linecache.getline(file, line).strip()
    words: dict[str, Any] = {"code": code if isinstance(code, int) else int(code is not None)}
    if isinstance(code, str):
        words["message"] = code[:_MOST_TEXT]
    recorder.log.note("exit-called", file=os.path.abspath(file), line=line, source=text, **words)


@contained
def note_program_exit(recorder: Recorder, error: SystemExit) -> None:
    """The program ends with SystemExit: where it was raised, which is not by way of `sys.exit` for `exit()` and `raise`."""
    frames = describe_error(error)["frames"]
    if frames:
        _note_exit_at(recorder, frames[0]["file"], frames[0]["line"], error.code)


def _wrap_refusal(recorder: Recorder, original: Any) -> Any:
    """argparse ends the process when it does not like the arguments."""

    def error(self: Any, message: str) -> Any:
        _note_refusal(recorder, message)
        return original(self, message)

    return error


@contained
def _note_refusal(recorder: Recorder, message: str) -> None:
    recorder.log.note("arguments-refused", message=str(message)[:_MOST_TEXT], site=recorder.sites.here(2))


def let_backend_finish() -> None:
    """Gives gloo's threads the interpreter lock once more before the group goes.

    torch 2.13 joins them while it holds that lock; one that is about to give up the work of the last backward wants it
    (the work keeps a copy of the context that backward stored), and both wait for ever. Seen about once in 20 ends of a
    busy machine, without instep too.
    """
    time.sleep(_FINISH_SECONDS)


@contained
def _at_exit(recorder: Recorder) -> None:
    if count_operations():
        let_backend_finish()
    recorder.mark(layout.KIND_NUMBER["ended"])
    recorder.log.note("libraries", names=[name for name in _LIBRARIES if name in sys.modules])
    recorder.log.note("ended", lost=recorder.log.lost, step=recorder.num_steps)
