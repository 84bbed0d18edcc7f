"""The launcher's loop: has the ranks of this machine started, hears and shows them, carries out what `decide` says.

Runs without torch in the process that the user started, and outlives everything that it watches.

The seam for diagnosis: `Hooks`. `on_tick` is called about five times a second while ranks run, with the group as it
is known; it may return text to print now and whether to stop the run (as after a proven deadlock). It must not block
for more than some milliseconds. `probe_options` go to `instep.launch.probe.install(rank_dir, **probe_options)` in
every rank, before the user's program. Both are handed in by `cli/run.py`, where the parts meet.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.launch import channel
from instep.launch.agent_link import AgentLink
from instep.launch.console import Console
from instep.launch.decide import BeginStop, Decision, Finish, Restart, Send, TellAgent, Wait, decide
from instep.launch.failure import describe_error, describe_failure, has_same_error, name_ranks
from instep.launch.group_state import GroupState, RankState, Stop
from instep.launch.rank_process import RankStarter
from instep.launch.spawn import Zygote
from instep.records.launch_spec import LaunchSpec, RankPlace
from instep.records.run_dir import RunDir

TICK_SECONDS = 0.2
ANNOUNCE_SECONDS = 5.0  # after an exception whose process does not end, to show it before the run's end
SWEEP_GRACE_SECONDS = 1.0  # for processes that ranks have left behind, to end by themselves and after SIGTERM
SWEEP_HASTE_SECONDS = 0.2  # the same when the run was stopped or failed


@dataclass(frozen=True)
class Verdict:
    """What a hook found out: text to print now (may be empty), and whether the run has to be stopped for it."""

    text: str = ""
    stop: bool = False


@dataclass(frozen=True)
class Hooks:
    on_tick: Callable[[GroupState, float], Verdict | None] | None = None
    probe_options: dict[str, Any] = field(default_factory=dict[str, Any])


PlaceRanks = Callable[[int], list[RankPlace]]


class Watch:
    """One launch on this machine, from the first rank to the last, restarts included.

    place_ranks describes the ranks of an attempt; None when torch's agent does (agent_link).
    """

    def __init__(
        self, spec: LaunchSpec, zygote: Zygote, hooks: Hooks, place_ranks: PlaceRanks | None, fresh: bool = False
    ) -> None:
        self.spec = spec
        self.zygote = zygote
        self.hooks = hooks
        self.place_ranks = place_ranks
        self.agent: AgentLink | None = None
        self.empty_store: Callable[[], None] | None = None  # where the store is ours: before each further attempt
        self.selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        self.console = Console(self.selector, self.is_hurried)
        self.starter = RankStarter(spec, zygote, self.console, hooks.probe_options, fresh)
        self.swept: list[str] | None = None
        self.ticked_at = 0.0
        self.group = GroupState([], restarts_left=spec.torch_options["max_restarts"])
        self.group.shutdown_seconds = spec.torch_options["shutdown_timeout"]
        self.selector.register(zygote.channel, selectors.EVENT_READ, self.hear_zygote)

    def join_agent(self, agent: AgentLink) -> None:
        """From now on torch's agent says when ranks start."""
        self.agent = agent
        self.selector.register(agent.channel, selectors.EVENT_READ, self.hear_agent)

    def leave_nodes(self) -> None:
        """Says goodbye to the launchers of other nodes, where there are any."""
        if self.agent is not None:
            self.agent.nodes.close()

    def run(self) -> int:
        """Everything until the end. Returns the exit code."""
        with self._signals_caught():
            if self.place_ranks is not None:
                self.start_group(self.place_ranks(0), 0)
            while True:
                decision = decide(self.group, time.time())
                if isinstance(decision, Finish):
                    self.finish_group()
                    return decision.code
                self.act(decision)

    def act(self, decision: Decision) -> None:
        if isinstance(decision, Wait):
            self.wait(decision.seconds)
        elif isinstance(decision, BeginStop):
            self.group.stop = Stop("failed", time.time())
        elif isinstance(decision, Send):
            self.send_signal(decision.number)
        elif isinstance(decision, Restart):
            self.restart()
        elif isinstance(decision, TellAgent) and self.agent is not None:
            self.finish_group()
            self.agent.tell_end(self.group)

    def wait(self, seconds: float) -> None:
        """Handles what happens within this time; comes back as soon as something did that may change the judgement."""
        for key, _ in self.selector.select(min(seconds, TICK_SECONDS)):
            key.data()
        for number in self.signals:
            self.on_signal(number)
        self.signals.clear()
        now = time.time()
        if now - self.ticked_at >= TICK_SECONDS:
            self.ticked_at = now
            self.tick(now)

    def tick(self, now: float) -> None:
        self.console.tick()
        self.announce_errors(now)
        if self.agent is not None:
            self.agent.tick(self.group, now)
        if self.hooks.on_tick is None or self.group.stop is not None:
            return
        if not self.group.living and self.group.sharing is None:
            return
        verdict = self.hooks.on_tick(self.group, now)
        if verdict is not None and verdict.text:
            self.console.print_raw(verdict.text)
        if verdict is not None and verdict.stop:
            self.group.stop = Stop("stalled", now)

    def announce_errors(self, now: float) -> None:
        """An exception is shown at the end of the run; where the end does not come, it is shown now."""
        for rank in self.group.living:
            if rank.error is not None and not rank.announced and now - rank.error["time"] >= ANNOUNCE_SECONDS:
                same = [other for other in self.group.living if has_same_error(rank, other)]
                for other in same:
                    other.announced = True
                names = name_ranks(other.place.rank for other in same)
                how = ("has", "its process has") if len(same) == 1 else ("have", "their processes have")
                self.console.say(f"{names} {how[0]} raised an exception, but {how[1]} not ended:")
                self.console.print_raw(describe_error(rank.error) + "\n")

    def on_signal(self, number: int) -> None:
        """Ctrl-C ends the run, a second one at once; SIGTERM and its like are passed on and give time to save."""
        stop = self.group.stop
        if stop is not None and stop.reason in ("interrupted", "terminated"):
            stop.hurry = True
            return
        reason = "interrupted" if number == signal.SIGINT else "terminated"
        self.group.stop = Stop(reason, time.time(), signal=number)
        self.group.restarts_left = 0

    def is_hurried(self) -> bool:
        """Whether the user waits for the end, so that nothing may be waited for."""
        stop = self.group.stop
        return bool(self.signals) or (stop is not None and (stop.hurry or stop.reason == "interrupted"))

    def start_group(self, places: list[RankPlace], restart: int) -> None:
        # Why the attempt before has ended would be forgotten with its ranks.
        self.console.print_raw(describe_failure(self.group, RunDir(Path(self.spec.run_dir))))
        self.group.ranks = [RankState(place, f"{restart}.{place.local_rank}") for place in places]
        self.group.restart = restart
        self.group.stop = None
        for rank in self.group.ranks:
            self.starter.start(rank)

    def restart(self) -> None:
        assert self.place_ranks is not None
        self.finish_group()
        self.group.restarts_left -= 1
        restart = self.group.restart + 1
        if self.empty_store is not None:
            self.empty_store()
        self.start_group(self.place_ranks(restart), restart)
        self.console.say(f"restart {restart} of {self.spec.torch_options['max_restarts']}")

    def hear_zygote(self) -> None:
        try:
            answer = self.zygote.hear()
        except channel.Closed:
            self.on_zygote_lost()
            return
        if answer["answer"] == "swept":
            self.swept = answer["left"]
            return
        rank = next((rank for rank in self.group.ranks if rank.key == answer["key"]), None)
        if rank is None:
            if answer["answer"] == "exited":
                self.on_helper_lost(answer["key"])
        elif answer["answer"] == "started":
            rank.pid = answer["pid"]
            if self.agent is not None:
                self.agent.tell_pids(self.group)
        else:
            rank.exit_code, rank.ended_at, rank.peak_bytes = answer["code"], answer["time"], answer["peak_bytes"]

    def hear_agent(self) -> None:
        if self.agent is not None and not self.agent.hear(self.group):
            self.selector.unregister(self.agent.channel)

    def on_helper_lost(self, key: str) -> None:
        """The store's or the agent's process has ended. For the agent that is its way to finish."""
        if self.agent is not None and key == "agent":
            self.agent.on_exit(self.group)
        if key == "store" and self.group.stop is None:
            self.console.say("the process that holds the ranks' store has died; the run cannot go on")
            self.group.stop = Stop("lost", time.time())

    def on_zygote_lost(self) -> None:
        """Ranks die with the zygote, by the kernel's hand; there is nobody left to tell how."""
        self.selector.unregister(self.zygote.channel)
        self.console.say("the process that the ranks were started from has died, and the ranks with it")
        now = time.time()
        self.group.stop = Stop("lost", now, sent=[signal.SIGKILL])
        self.group.restarts_left = 0
        for rank in self.group.living:
            rank.exit_code, rank.ended_at = -signal.SIGKILL, now

    def send_signal(self, number: int) -> None:
        assert self.group.stop is not None
        self.group.stop.sent.append(number)
        _signal_group(self.zygote.pid, signal.SIGCONT)  # one that somebody has stopped could not tell of the ranks' end
        for rank in self.group.living:
            if rank.pid is not None:
                _signal_group(rank.pid, number)

    def finish_group(self) -> None:
        """After the last rank: what they left behind is ended, and all that they wrote is shown."""
        in_order = self.group.stop is None and not self.group.failures
        self.swept = None
        with contextlib.suppress(channel.Closed):
            self.zygote.sweep(SWEEP_GRACE_SECONDS if in_order else SWEEP_HASTE_SECONDS)
            while self.swept is None and self.zygote.channel in self._registered():
                for key, _ in self.selector.select(TICK_SECONDS):
                    key.data()
        self.starter.close()
        if in_order and self.swept:
            self.console.say(f"ended what the ranks had left running: {', '.join(self.swept)}")

    def _registered(self) -> set[Any]:
        return {key.fileobj for key in self.selector.get_map().values()}

    @contextlib.contextmanager
    def _signals_caught(self) -> Generator[None]:
        """Signals only leave a note and wake the loop; the loop acts on them."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self.selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 512))
        before_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        names = [name.strip() for name in self.spec.torch_options["signals_to_handle"].split(",")]
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and signal.SIGHUP in numbers:
            numbers.remove(signal.SIGHUP)  # under nohup a run outlives its terminal
        before = {number: signal.signal(number, lambda n, _: self.signals.append(n)) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_wakeup)
            self.selector.unregister(reader)
            os.close(reader)
            os.close(writer)


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it has not made its own group yet, or has just ended
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
