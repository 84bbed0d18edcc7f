"""The launcher's end of the channel to torch's agent: starts and stops ranks as it asks, tells it how they ended."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.launch import channel
from instep.launch.console import is_live_terminal
from instep.launch.failure import describe_guilty
from instep.launch.group_state import AgentState, GroupState, Stop
from instep.launch.link.nodes import Nodes
from instep.launch.link.sharing import Sharing
from instep.launch.meeting import read_nodes
from instep.launch.worker_env import our_variables
from instep.records.launch_spec import LaunchSpec, RankPlace
from instep.records.run_dir import RunDir

SAY_AFTER_SECONDS = 15.0


class AgentLink:
    """start_group: what starts the ranks; say: prints a line; describe_waiting: why the nodes may not have met."""

    def __init__(
        self,
        ours: socket.socket,
        spec: LaunchSpec,
        start_group: Callable[[list[RankPlace], int], None],
        say: Callable[[str], None],
        describe_waiting: Callable[[float], str],
    ) -> None:
        self.channel = ours
        self.spec = spec
        self.start_group = start_group
        self.say = say
        self.describe_waiting = describe_waiting
        self.warned = False
        self.pids_told = False
        self.nodes = Nodes(RunDir(Path(spec.run_dir)), say)
        self.sharing = Sharing(self.nodes)
        least, most = read_nodes(spec.torch_options["nnodes"])
        # Others may take a lost node's place: whether the run ends is up to torch's agent then.
        self.needs_all = least == most and spec.torch_options["max_restarts"] == 0

    def hear(self, group: GroupState) -> bool:
        """Takes one message. Returns False when the agent's end is closed."""
        assert group.agent is not None
        try:
            message, _ = channel.receive(self.channel)
        except channel.Closed:
            return False
        do = message["do"]
        if do == "start":
            group.agent.told, group.agent.running, self.pids_told = False, True, False
            places = [self._place(rank) for rank in message["ranks"]]
            self.start_group(places, int(places[0].variables["TORCHELASTIC_RESTART_COUNT"]))
            self._join_nodes(group, places)
        elif do == "stop" and group.stop is None:
            number, seconds = signal.Signals(message["signal"]), float(message["seconds"])
            group.stop = Stop("asked", time.time(), signal=number, grace_seconds=seconds)
        elif do == "guilty":
            group.agent.elsewhere = message["text"]
        elif do == "link":
            self.nodes.found(message["text"])
        elif do == "lost" and group.stop is None:
            self.say(message["text"])
            group.stop = Stop("node_lost", time.time())
        elif do in ("done", "failed"):
            group.agent.end = do
            group.agent.message = f"{message['type']}: {message['message']}" if do == "failed" else ""
        return True

    def _join_nodes(self, group: GroupState, places: list[RankPlace]) -> None:
        """The launchers of this attempt; where the first listens goes through torch's store."""
        to_tell = self.nodes.join(places[0].variables, tuple(place.rank for place in places))
        group.sharing = self.sharing if self.nodes.size > 1 else None
        if to_tell:
            self._send({"answer": "link", "text": to_tell})

    def _place(self, rank: dict[str, Any]) -> RankPlace:
        variables = rank["variables"] | our_variables(self.spec.run_dir, self.spec.overrides, is_live_terminal(2))
        files = {name: rank[name] for name in ("stdout", "stderr", "tee_stdout", "tee_stderr")}
        hidden = [name for name in ("stdout", "stderr") if files[name] == "/dev/null"]
        for name in ("stdout", "stderr"):
            if files[name] in ("/dev/null", files[f"tee_{name}"]):
                files[name] = ""
        return RankPlace(
            int(variables["RANK"]),
            rank["local_rank"],
            variables,
            **files,
            filtered_stdout=rank["filtered_stdout"],
            filtered_stderr=rank["filtered_stderr"],
            error_file=variables.get("TORCHELASTIC_ERROR_FILE", ""),
            shown=not hidden,
        )

    def tell_pids(self, group: GroupState) -> None:
        """Once all ranks of an attempt have a process."""
        if not self.pids_told and all(rank.pid is not None for rank in group.ranks):
            self.pids_told = True
            self._send({"answer": "pids", "pids": {rank.place.local_rank: rank.pid for rank in group.ranks}})

    def tell_end(self, group: GroupState) -> None:
        assert group.agent is not None
        group.agent.told = True
        group.agent.running = False
        group.agent.asked_at = time.time()
        self.warned = False
        codes = {rank.place.local_rank: rank.exit_code for rank in group.ranks}
        guilty = describe_guilty(group)
        self._send({"answer": "ended", "codes": codes, "guilty": guilty, "echo": bool(group.failures) and not guilty})

    def tick(self, group: GroupState, now: float) -> None:
        """Looks at the other nodes; says once what is waited for when they have not met for a while."""
        self.nodes.tick(time.monotonic())
        if self.nodes.has_lost and self.needs_all and group.stop is None and (group.living or group.failures):
            group.stop = Stop("node_lost", now)
        agent: AgentState | None = group.agent
        if agent is None or agent.running or agent.told or self.warned or now - agent.asked_at < SAY_AFTER_SECONDS:
            return
        self.warned = True
        self.say(self.describe_waiting(now - agent.asked_at))

    def on_exit(self, group: GroupState) -> None:
        """The agent's process has ended; without a word before, something has killed it."""
        assert group.agent is not None
        if group.agent.end is None:
            group.agent.end = "lost"
            self.say("torch's agent has died, so the ranks of this machine have to end")
            if group.living and group.stop is None:
                group.stop = Stop("lost", time.time())

    def _send(self, message: dict[str, Any]) -> None:
        # An agent that has died is noticed by its exit.
        with contextlib.suppress(channel.Closed):
            channel.send(self.channel, message)
