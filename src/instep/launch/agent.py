"""torch's elastic agent in a process of its own: its rendezvous and its restarts, our ranks.

Forked from the zygote when several nodes meet or the user has chosen a rendezvous. torchrun's own `run` does the work;
only the one function with which its agent starts worker processes is replaced, so every option keeps its meaning.
What goes over the channel: to the launcher `start`, `stop`, `guilty`, `lost`, `link`, `failed`, `done`; from it `link`,
`pids`, `ended`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed.elastic.agent.server.local_elastic_agent as local_elastic_agent
import torch.distributed.launcher.api as launcher_api
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from instep.launch import channel
from instep.launch.peers import Peers

LINGER_SECONDS = 3.0  # after a failure, for the other nodes to ask which rank it was: the store may be in this process


class Line:
    """The channel to the launcher, spoken on by the agent and by the thread that listens to the other nodes."""

    def __init__(self, launcher: socket.socket) -> None:
        self.launcher = launcher
        self.lock = threading.Lock()
        self.peers: Peers | None = None

    def send(self, message: dict[str, Any]) -> None:
        with self.lock:
            channel.send(self.launcher, message)

    def receive(self, kind: str) -> dict[str, Any]:
        while True:
            message, _ = channel.receive(self.launcher)
            if message["answer"] == "link" and self.peers is not None:  # comes before `pids`, once an attempt
                self.peers.link = message["text"]
            if message["answer"] == kind:
                return message

    def has_message(self) -> bool:
        return bool(select.select([self.launcher], [], [], 0)[0])

    def join_peers(self, group: Any) -> None:
        """For each attempt: the nodes that are in it."""
        if self.peers is not None:
            self.peers.stop()
        tell: Callable[[str], None] = lambda text: self.send({"do": "lost", "text": text})  # noqa: E731
        pass_on: Callable[[str], None] = lambda text: self.send({"do": "link", "text": text})  # noqa: E731
        self.peers = Peers(group.store, group.group_rank, group.group_world_size, tell, pass_on)
        self.peers.start()


class ZygoteContext(PContext):
    """torch's worker group, with the launcher as its hands. It learns of an end only when every rank has ended."""

    def __init__(self, line: Line, args: dict[int, Any], envs: dict[int, dict[str, str]], logs: LogsSpecs) -> None:
        self.line = line
        self.name = "instep"
        self.nprocs = len(args)
        self.envs = envs
        self.logs = logs.reify(envs)
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] | None = None

    def start(self) -> None:
        self._start()

    def _start(self) -> None:
        ranks = [self._describe(local_rank) for local_rank in range(self.nprocs)]
        self.line.send({"do": "start", "ranks": ranks})
        self._pids = {int(key): pid for key, pid in self.line.receive("pids")["pids"].items()}

    def _describe(self, local_rank: int) -> dict[str, Any]:
        logs = self.logs
        # The agent's own environment reaches torchrun's workers too, as far as it was changed here.
        inherited = {name: os.environ[name] for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE",) if name in os.environ}
        return {
            "local_rank": local_rank,
            "variables": inherited | self.envs[local_rank],
            "stdout": logs.stdouts[local_rank],
            "stderr": logs.stderrs[local_rank],
            "tee_stdout": logs.tee_stdouts.get(local_rank, ""),
            "tee_stderr": logs.tee_stderrs.get(local_rank, ""),
            "filtered_stdout": getattr(logs, "filtered_stdout", ""),
            "filtered_stderr": getattr(logs, "filtered_stderr", ""),
        }

    def pids(self) -> dict[int, int]:
        return self._pids

    def _poll(self) -> RunProcsResult | None:
        if self._codes is None and self.line.has_message():
            self._note(self.line.receive("ended"))
        if self._codes is None:
            return None
        failures = {
            local_rank: ProcessFailure(local_rank, self._pids.get(local_rank, 0), code, self._error_file(local_rank))
            for local_rank, code in self._codes.items()
            if code != 0
        }
        return RunProcsResult(return_values={} if failures else dict.fromkeys(range(self.nprocs)), failures=failures)

    def _error_file(self, local_rank: int) -> str:
        return self.logs.error_files.get(local_rank, os.devnull)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if self._codes is None:
            self.line.send({"do": "stop", "signal": int(death_sig), "seconds": timeout})
            self._note(self.line.receive("ended"))

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        self._close(death_sig or signal.SIGTERM, timeout)

    def _note(self, message: dict[str, Any]) -> None:
        self._codes = {int(key): code for key, code in message["codes"].items()}
        peers = self.line.peers
        if peers is None or peers.size < 2:
            return
        if message["guilty"]:
            peers.tell_guilty(message["guilty"])
        elif message["echo"]:
            self.line.send({"do": "guilty", "text": peers.ask_guilty()})


def run_agent(channel_file: int, words: list[str], program: list[str]) -> None:
    """Runs torchrun with these words; tells the launcher what came of it."""
    line = Line(socket.socket(fileno=channel_file))

    class Agent(local_elastic_agent.LocalElasticAgent):
        def _initialize_workers(self, worker_group: Any) -> None:
            forget_meeting(worker_group.spec.rdzv_handler)
            super()._initialize_workers(worker_group)  # pyright: ignore[reportCallIssue]  # as below

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            line.join_peers(worker_group)
            # torch's own decorator hides the argument from the type checker.
            return super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def start_processes(
        name: str,
        entrypoint: Any,
        args: dict[int, Any],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        **_: Any,
    ) -> PContext:
        context = ZygoteContext(line, args, envs, logs_specs)
        context.start()
        return context

    local_elastic_agent.start_processes = start_processes  # type: ignore[assignment]
    launcher_api.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        torchrun.run(torchrun.parse_args([*words, *program]))
    except ChildFailedError:
        if line.peers is not None and line.peers.size > 1:
            time.sleep(LINGER_SECONDS)
        line.send({"do": "done", "failed": True})
    except channel.Closed:
        os._exit(1)
    except Exception as error:  # noqa: BLE001  # every way that a rendezvous can fail is told, not printed
        line.send({"do": "failed", "type": type(error).__name__, "message": str(error)})
    else:
        line.send({"do": "done", "failed": False})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the store and the rendezvous may still wait for someone


def forget_meeting(handler: object) -> None:
    """Makes each round of a rendezvous have a store of its own.

    torch 2.13 keeps the address of the first round's: a node that joins later waits in vain for it to be told, and the
    ranks of a new attempt find what those before them have left in the store.
    """
    if hasattr(handler, "_bootstrap_store_info"):
        handler._bootstrap_store_info = None  # type: ignore[attr-defined]


def tell_device_count(channel_file: int, text: str) -> None:
    """What `--nproc-per-node auto` (cpu, gpu, xpu) means on this machine, by torchrun's own rule."""
    launcher = socket.socket(fileno=channel_file)
    try:
        channel.send(launcher, {"count": torchrun.determine_local_world_size(text)})
    except Exception as error:  # noqa: BLE001  # its text is what the user has to read
        channel.send(launcher, {"error": str(error)})
    os._exit(0)
