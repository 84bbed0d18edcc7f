"""The launcher's hold on the zygote: starts it, asks it for ranks, hears of their ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from instep.launch import channel
from instep.launch.start import START_FILE
from instep.records.launch_spec import LaunchSpec, Program, RankPlace

_END_SECONDS = 10.0
_TRAINING_WORDS = (b"optim", b"compile", b"Trainer", b"trainer", b"lightning", b"accelerate", b"deepspeed", b"instep")


class Zygote:
    """The process that ranks are started from. mode: `fork`, `fork-training` (torch imported once, with what the first
    optimizer needs) or `fresh` (new interpreters)."""

    def __init__(self, mode: str, program: Program, environ: Mapping[str, str]) -> None:
        self.channel, theirs = channel.open_channel()
        words = [program.target, *program.args]  # shown by `ps`, so that a run can be told from another
        command = [sys.executable, "-u", START_FILE, "zygote", str(theirs.fileno()), mode, *words]
        with theirs:
            self.process = subprocess.Popen(
                command,
                env=dict(environ),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdout=sys.stderr.fileno() if sys.stderr else subprocess.DEVNULL,
            )
        self.pid = self.process.pid

    def ask(self, do: str, key: str, files: tuple[int, ...], **what: Any) -> None:
        channel.send(self.channel, {"do": do, "key": key, **what}, files)

    def sweep(self, grace_seconds: float) -> None:
        channel.send(self.channel, {"do": "sweep", "grace_seconds": grace_seconds})

    def hear(self) -> dict[str, Any]:
        """The next answer. Raises channel.Closed when the zygote has died."""
        return channel.receive(self.channel)[0]

    def kill(self) -> None:
        """Ends it at once, before it has made any rank."""
        self.process.kill()
        self.close()

    def close(self) -> int:
        """Lets it go; it ends everything that is still its child. Returns its exit code."""
        self.channel.close()
        try:
            return self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # stopped, or beyond help; ranks die with it
            self.process.kill()
            return self.process.wait()


def looks_like_training(program: Program) -> bool:
    """Whether ranks will probably make an optimizer. Wrong costs a second at the start or one in each rank, no more."""
    if program.kind == "module" or not os.path.isfile(program.target):
        return True
    with open(program.target, "rb") as file:
        text = file.read(1 << 20)
    return any(word in text for word in _TRAINING_WORDS)


def rank_job(spec: LaunchSpec, place: RankPlace, rank_dir: str, probe_options: dict[str, Any]) -> dict[str, Any]:
    """What `worker_entry.Job` is made from in the rank."""
    return {
        "program": asdict(spec.program),
        "variables": place.variables,
        "local_rank": place.local_rank,
        "rank_dir": rank_dir,
        "watch": spec.watch,
        "probe_options": probe_options,
        "prints_errors": bool(place.stderr or place.tee_stderr),
        "profile": spec.profile,
        "numa_binding": spec.torch_options["numa_binding"],
    }


def fresh_command(program: Program, environ: Mapping[str, str]) -> list[str]:
    """How a rank is started without fork: our entry in a new interpreter, or the user's command itself."""
    if program.kind == "command":
        return [program.target, *program.args]
    python = environ.get("PYTHON_EXEC", sys.executable)
    module = ["-m"] if program.kind == "module" else []
    if python != sys.executable:  # an interpreter that may know nothing of us
        return [python, "-u", *module, program.target, *program.args]
    return [python, "-u", START_FILE, "worker_entry", program.target, *program.args]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for the ranks' store. Raises OSError when the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
        server.listen(2048)
    except OSError:
        server.close()
        raise
    return server
