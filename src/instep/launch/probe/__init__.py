"""What runs inside each rank before the user's script: it notes what the rank does, and changes nothing else.

`install` is the only entry. torch must be importable; nothing of the user has run yet.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

from instep.records.run_dir import RankDir

# The signal that makes a rank (and the workers it forks) write its stack even when it holds the interpreter's lock.
STACK_SIGNAL = signal.SIGRTMIN + 9


def install(rank_dir: Path, profile: tuple[int, int] | None = None, **unused: Any) -> None:
    """Wraps what has to be watched. rank_dir: the folder of this rank, which exists."""
    from instep.launch.probe.event_log import EventLog
    from instep.launch.probe.page import open_page
    from instep.launch.probe.recorder import Recorder, make_current

    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # reading 2000 entries takes 30 ms
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    paths = RankDir(rank_dir)
    recorder = Recorder(open_page(paths.page, rank, world_size), EventLog(paths.events), rank, world_size)
    recorder.replay_path = paths.replay
    make_current(recorder)
    _write_stacks_on_signal(paths)
    _wrap_torch(recorder, paths)
    recorder.log.note("start", pid=os.getpid(), rank=rank, world_size=world_size)


def note_exit(error: SystemExit) -> None:
    """Called when the program ends with SystemExit: what it was handling then may be the cause."""
    from instep.launch.probe.exits import note_end, note_program_exit
    from instep.launch.probe.recorder import current

    recorder = current()
    if recorder is not None:
        note_end(recorder, "SystemExit", error.code, error)
        note_program_exit(recorder, error)


def note_uncaught(error: BaseException) -> None:
    """Called when an exception ends the program."""
    from instep.launch.probe.exits import describe_error
    from instep.launch.probe.recorder import contained, current

    recorder = current()
    if recorder is not None:
        contained(lambda: recorder.log.note("uncaught", **describe_error(error)))()


def _write_stacks_on_signal(paths: RankDir) -> None:
    try:
        file = os.open(paths.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    except (OSError, ValueError, AttributeError):
        return  # another system, or a full disk: the snapshot of the watching thread remains


def _wrap_torch(recorder: Any, paths: RankDir) -> None:
    from instep.launch.probe.backward import watch_backward
    from instep.launch.probe.collectives import watch_collectives
    from instep.launch.probe.data import watch_data
    from instep.launch.probe.evaluating import watch_evaluations
    from instep.launch.probe.exits import watch_exits
    from instep.launch.probe.fingerprints import Fingerprints
    from instep.launch.probe.forward import watch_forward
    from instep.launch.probe.mistakes import watch_mistakes
    from instep.launch.probe.optimizing import watch_optimizers
    from instep.launch.probe.patching import hide_from_compiler
    from instep.launch.probe.plain_models import watch_plain_models
    from instep.launch.probe.recorder import contained
    from instep.launch.probe.schedules import watch_schedules
    from instep.launch.probe.site_costs import watch_site_costs
    from instep.launch.probe.watcher import Watcher
    from instep.launch.probe.wrapping import watch_wrapping

    watcher = Watcher(recorder, paths.snapshot)
    recorder.start_watching = watcher.start
    for watch in (watch_exits, watch_wrapping, watch_backward, watch_data, watch_mistakes, watch_evaluations):
        contained(watch)(recorder)
    contained(watch_forward)(recorder)
    fingerprints = Fingerprints(recorder)
    for watch in (watch_plain_models, watch_schedules, watch_site_costs):
        contained(watch)(recorder)
    contained(watch_optimizers)(recorder, fingerprints)
    contained(watch_collectives)(recorder, watcher.start, fingerprints.final)
    hide_from_compiler(__name__)
