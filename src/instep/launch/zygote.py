"""The process that ranks are forked from: it imports torch once, stays single-threaded, forks on request, reports ends.

Started by the launcher as `python -u start.py zygote CHANNEL MODE ...`. MODE `fork` imports torch and forks
ranks that run the program in place, `fork-training` imports also what the first optimizer needs; MODE `fresh` imports
nothing and starts new interpreters or commands instead.
Requests: start, store, agent, sweep, count, end; answers: ready, started, exited, swept, count.
When the launcher dies, it ends every rank and what ranks have left behind; when it dies itself, ranks die with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.launch import channel, linux
from instep.launch.numa import bind_to_numa
from instep.launch.start import START_FILE
from instep.launch.worker_entry import JOB_VARIABLE, Job, enter

Continuation = Callable[[], None]


class Zygote:
    """Children by process id, each under the key that the launcher gave it."""

    def __init__(self, launcher: socket.socket, mode: str) -> None:
        self.launcher = launcher
        self.mode = mode
        self.pid = os.getpid()
        self.children: dict[int, str] = {}
        self.ended: list[int] = []  # since the last sweep
        self.wake_reader, self.wake_writer = os.pipe()
        for file in (self.wake_reader, self.wake_writer):
            os.set_blocking(file, False)

    def serve(self) -> Continuation | None:
        """Handles requests until the launcher goes away. In a forked child it returns what the child has to do."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_writer, warn_on_full_buffer=False)
        while True:
            readable, _, _ = select.select([self.launcher, self.wake_reader], [], [])
            if self.wake_reader in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_reader, 4096)
                self.reap()
            if self.launcher in readable:
                try:
                    request, files = channel.receive(self.launcher)
                except channel.Closed:
                    self.end_everything()
                    return None
                task = self.handle(request, files)
                if task is not None:
                    return task

    def handle(self, request: dict[str, Any], files: list[int]) -> Continuation | None:
        do = request["do"]
        if do == "sweep":
            self.answer({"answer": "swept", "left": self.sweep(request["grace_seconds"])})
            return None
        starts = {"start": self.rank_task, "store": self.store_task, "agent": self.agent_task, "count": self.count_task}
        task = starts[do](request, files)
        child = self.fork(request["key"])
        if child == 0:
            self.become_child(files, request.get("own_session", True))
            return task
        for file in files:
            os.close(file)
        self.answer({"answer": "started", "key": request["key"], "pid": child})
        return None

    def fork(self, key: str) -> int:
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread; those there can be are OpenBLAS's, which handles fork itself.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            self.children[child] = key
        return child

    def become_child(self, files: list[int], own_session: bool) -> None:
        """In a new child: its own session, dead with the zygote, streams in place, nothing of the zygote's open."""
        if own_session:
            os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A shell starts `command &` with these ignored; under torchrun ranks hear them all the same.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        linux.die_with_parent(self.pid)
        self.launcher.close()
        os.close(self.wake_reader)
        os.close(self.wake_writer)
        for number, file in zip((1, 2), files[:2]):
            os.dup2(file, number)
            os.close(file)

    def rank_task(self, request: dict[str, Any], files: list[int]) -> Continuation:
        job = request["job"] | {"status_file": files[2]}
        if self.mode != "fresh":
            return lambda: enter(Job.from_json(job))
        return lambda: _execute(request["command"], job)

    def store_task(self, request: dict[str, Any], files: list[int]) -> Continuation:
        from instep.launch.store_host import host_store

        return lambda: host_store(files[2], files[3], request["world_size"])

    def agent_task(self, request: dict[str, Any], files: list[int]) -> Continuation:
        from instep.launch.agent import run_agent

        return lambda: run_agent(files[2], request["options"], request["program"])

    def count_task(self, request: dict[str, Any], files: list[int]) -> Continuation:
        from instep.launch.agent import tell_device_count

        return lambda: tell_device_count(files[2], request["text"])

    def reap(self) -> None:
        """Tells the launcher of every child that has ended; adopted orphans end unmentioned."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.ended.append(pid)
            key = self.children.pop(pid, None)
            if key is not None:
                code = os.waitstatus_to_exitcode(status)
                peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
                self.answer({"answer": "exited", "key": key, "code": code, "peak_bytes": peak, "time": time.time()})

    def answer(self, message: dict[str, Any]) -> None:
        # Nobody there: the next read of the channel sees its end and winds everything up.
        with contextlib.suppress(channel.Closed):
            channel.send(self.launcher, message)

    def orphans(self) -> list[int]:
        return [pid for pid in linux.list_children(os.getpid()) if pid not in self.children]

    def sweep(self, grace_seconds: float) -> list[str]:
        """Ends what ranks have left behind. Returns the commands that did not end by themselves.

        Helpers of multiprocessing see the end of their rank and clean up shared memory, so they get time first.
        """
        self.await_orphans(grace_seconds)
        left = [linux.read_command(pid) for pid in self.orphans()]
        _signal_all(self.orphans(), signal.SIGTERM)
        self.await_orphans(grace_seconds)
        while self.orphans():
            _signal_all(self.orphans(), signal.SIGKILL)
            self.await_orphans(0.05)
        _remove_shared_memory(self.ended)
        self.ended.clear()
        return left

    def await_orphans(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.reap()
        while self.orphans() and time.monotonic() < deadline:
            time.sleep(0.01)
            self.reap()

    def end_everything(self) -> None:
        """After the launcher's death: a second for ranks to end by themselves, then nothing is left alive."""
        signal.set_wakeup_fd(-1)
        for pid in list(self.children):
            _signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + 1.0
        while self.children and time.monotonic() < deadline:
            time.sleep(0.02)
            self.reap()
        for pid in list(self.children):
            _signal_group(pid, signal.SIGKILL)
        while self.children:
            time.sleep(0.01)
            self.reap()
        self.sweep(0.2)


def _remove_shared_memory(pids: list[int]) -> None:
    """Tensors that dead processes were just passing on: torch names their files after the process."""
    folder = Path("/dev/shm")
    for pid in pids if folder.is_dir() else []:
        for path in folder.glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # it has not made its session yet, or is gone
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _execute(command: list[str], job: dict[str, Any]) -> None:
    os.environ.update(job["variables"])
    ours = START_FILE in command
    if job["numa_binding"] and not ours:
        bind_to_numa(job["local_rank"], job["numa_binding"])  # the cores chosen here stay chosen through exec
    if ours:
        os.set_inheritable(job["status_file"], True)
        os.environ[JOB_VARIABLE] = json.dumps(job)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _preload(for_training: bool) -> str | None:
    """Imports torch. Returns why forking is not safe here, or None when it is."""
    environ = dict(os.environ)
    import torch
    import torch.distributed

    if for_training:
        with contextlib.suppress(ImportError):  # the first optimizer imports it, a second of work in every rank
            import torch._dynamo
    os.environ.clear()  # imports leave variables, which a rank would not have at its start
    os.environ.update(environ)
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        return f"importing torch started threads ({names})"
    if torch.cuda.is_initialized():
        return "importing torch touched CUDA"
    return None


def main() -> None:
    launcher = socket.socket(fileno=int(sys.argv[1]))
    mode = sys.argv[2]
    launcher.set_inheritable(False)
    linux.adopt_orphans()
    reason = None
    if mode != "fresh":
        gc.disable()  # collecting while modules load takes a fifth of the time, and finds nothing
        try:
            reason = _preload(mode == "fork-training")
        except Exception as error:  # noqa: BLE001  # whatever a broken torch raises is the launcher's to print
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            channel.send(launcher, {"answer": "broken", "error": repr(error), "text": text})
            return
    zygote = Zygote(launcher, "fresh" if reason else mode)
    gc.freeze()
    gc.enable()
    zygote.answer({"answer": "ready", "reason": reason})
    task = zygote.serve()
    if task is not None:
        task()
