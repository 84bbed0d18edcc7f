"""The launcher's loop: starts the ranks of this machine, hears and shows them, carries out what `decide` says.

Runs without torch in the process that the user started, and outlives everything that it watches.

The seam for diagnosis: `Hooks`. `on_tick` is called about five times a second while ranks run, with the group as it
is known; it may return text to print now and whether to stop the run (as after a proven deadlock). It must not block
for more than some milliseconds. `probe_options` are passed on to `instep.launch.probe.install(rank_dir, **probe_options)`
in every rank, before the user's program. Both are handed in by `cli/run.py`, where the parts meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.launch import channel
from instep.launch.console import Console, Stream, open_log
from instep.launch.decide import BeginStop, Finish, Restart, Send, Wait, decide
from instep.launch.group_state import GroupState, RankState, Stop
from instep.launch.output import make_prefix
from instep.launch.spawn import Zygote, fresh_command, pipe, rank_job
from instep.records.launch_spec import LaunchSpec, RankPlace
from instep.records.run_dir import RunDir

TICK_SECONDS = 0.2


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
    """One launch on this machine, from the first rank to the last, restarts included."""

    def __init__(self, spec: LaunchSpec, zygote: Zygote, place_ranks: PlaceRanks, hooks: Hooks) -> None:
        self.spec = spec
        self.zygote = zygote
        self.place_ranks = place_ranks
        self.hooks = hooks
        self.selector = selectors.DefaultSelector()
        self.console = Console(self.selector)
        self.status_parts: dict[str, bytes] = {}
        self.status_files: list[int] = []
        self.signals: list[int] = []
        self.swept: list[str] | None = None
        self.helper_keys: dict[str, int | None] = {}
        self.group = GroupState([], restarts_left=spec.torch_options["max_restarts"])
        self.group.shutdown_seconds = spec.torch_options["shutdown_timeout"]
        self.selector.register(zygote.channel, selectors.EVENT_READ, self.hear_zygote)

    def run(self) -> int:
        """Everything until the end. Returns the exit code."""
        with self._signals_caught():
            self.start_group(0)
            while True:
                decision = decide(self.group, time.time())
                if isinstance(decision, Finish):
                    self.finish_group()
                    return decision.code
                self.act(decision)

    def act(self, decision: Any) -> None:
        if isinstance(decision, Wait):
            self.wait(decision.seconds)
        elif isinstance(decision, BeginStop):
            self.group.stop = Stop("failed", time.time())
        elif isinstance(decision, Send):
            self.send_signal(decision.number)
        elif isinstance(decision, Restart):
            self.restart()

    def wait(self, seconds: float) -> None:
        """Handles what happens within this time; comes back as soon as something did that may change the judgement."""
        for key, _ in self.selector.select(min(seconds, TICK_SECONDS)):
            key.data()
        self.console.tick()
        for number in self.signals:
            self.on_signal(number)
        self.signals.clear()
        self.tick_hooks()

    def tick_hooks(self) -> None:
        if self.hooks.on_tick is None or self.group.stop is not None:
            return
        verdict = self.hooks.on_tick(self.group, time.time())
        if verdict is not None:
            if verdict.text:
                self.console.print_raw(verdict.text)
            if verdict.stop:
                self.group.stop = Stop("stalled", time.time())

    def on_signal(self, number: int) -> None:
        """Ctrl-C ends the run, a second one at once; SIGTERM and its like are passed on and give time to save."""
        stop = self.group.stop
        if stop is not None and stop.reason in ("interrupted", "terminated"):
            stop.hurry = True
        else:
            reason = "interrupted" if number == signal.SIGINT else "terminated"
            self.group.stop = Stop(reason, time.time(), signal=number)
            self.group.restarts_left = 0

    def start_group(self, restart: int) -> None:
        places = self.place_ranks(restart)
        self.group.ranks = [RankState(place, f"{restart}.{place.local_rank}") for place in places]
        self.group.restart = restart
        self.group.stop = None
        for rank in self.group.ranks:
            self.start_rank(rank)

    def start_rank(self, rank: RankState) -> None:
        place = rank.place
        rank_dir = RunDir(Path(self.spec.run_dir)).rank(place.rank) if self.spec.run_dir else None
        if rank_dir is not None:
            rank_dir.root.mkdir(parents=True, exist_ok=True)
        stdout, stderr, prints = self.open_streams(place, rank_dir.output if rank_dir else None)
        status_reader, status_writer = pipe()
        self.status_files.append(status_reader)
        os.set_blocking(status_reader, False)
        self.selector.register(status_reader, selectors.EVENT_READ, lambda: self.hear_status(status_reader, rank))
        job = rank_job(
            self.spec.program,
            place.variables,
            str(rank_dir.root) if rank_dir else "",
            self.spec.watch,
            self.hooks.probe_options,
            prints,
        )
        files = (stdout, stderr, status_writer)
        command = fresh_command(self.spec.program, os.environ)
        self.zygote.ask("start", rank.key, files, job=job, command=command)
        for file in set(files):
            os.close(file)

    def open_streams(self, place: RankPlace, log: Path | None) -> tuple[int, int, bool]:
        """Where a rank writes stdout and stderr, and whether its errors have to go there too (into a user's file)."""
        files = [open_log(log)] if log is not None else []
        shown = place.shown and not (self.spec.quiet_ranks and place.rank > 0)
        prefix = make_prefix(place.rank, int(place.variables["WORLD_SIZE"]))
        ends: list[int] = []
        for target, path in ((1, place.stdout), (2, place.stderr)):
            if path is not None:
                ends.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
            elif target == 2 and self.console.merged and place.stdout is None:
                ends.append(os.dup(ends[0]))  # one pipe, so that the order of both is kept
            else:
                reader, writer = pipe()
                assembler = self.console.assembler(prefix)
                self.console.add(Stream(reader, target if shown else None, assembler, list(files)))
                ends.append(writer)
        return ends[0], ends[1], place.stderr is not None

    def hear_status(self, file: int, rank: RankState) -> None:
        try:
            data = os.read(file, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._forget_status(file)
            return
        *lines, rest = (self.status_parts.get(rank.key, b"") + data).split(b"\n")
        self.status_parts[rank.key] = rest
        for line in lines:
            report = json.loads(line)
            if report["event"] == "error":
                rank.error, rank.error_at = report, report["time"]

    def hear_zygote(self) -> None:
        try:
            answer = self.zygote.hear()
        except channel.Closed:
            self.on_zygote_lost()
            return
        kind = answer["answer"]
        if kind == "swept":
            self.swept = answer["left"]
        elif answer.get("key") in self.helper_keys:
            self.helper_keys[answer["key"]] = answer.get("code")
        elif kind in ("started", "exited"):
            rank = next((rank for rank in self.group.ranks if rank.key == answer["key"]), None)
            if rank is not None and kind == "started":
                rank.pid = answer["pid"]
            elif rank is not None:
                rank.exit_code, rank.ended_at, rank.peak_bytes = answer["code"], answer["time"], answer["peak_bytes"]

    def on_zygote_lost(self) -> None:
        """Ranks die with the zygote, by the kernel's hand; there is nobody left to tell how."""
        self.selector.unregister(self.zygote.channel)
        self.group.stop = Stop("launcher", time.time())
        self.group.restarts_left = 0
        for rank in self.group.living:
            rank.exit_code, rank.ended_at = -signal.SIGKILL, time.time()

    def send_signal(self, number: int) -> None:
        assert self.group.stop is not None
        self.group.stop.sent.append(number)
        for rank in self.group.living:
            if rank.pid is not None:
                _signal_group(rank.pid, number)

    def restart(self) -> None:
        self.finish_group()
        self.group.restarts_left -= 1
        restart = self.group.restart + 1
        self.console.say(f"restart {restart} of {self.spec.torch_options['max_restarts']}")
        self.start_group(restart)

    def finish_group(self) -> None:
        """After the last rank: what they left behind is ended, and all that they wrote is shown."""
        in_order = self.group.stop is None
        self.swept = None
        with contextlib.suppress(channel.Closed):
            self.zygote.sweep(1.0 if in_order else 0.0)
            deadline = time.monotonic() + 5.0
            while self.swept is None and time.monotonic() < deadline:
                for key, _ in self.selector.select(TICK_SECONDS):
                    key.data()
                if self.group.stop is not None and self.group.stop.reason == "launcher":
                    break
        for file in list(self.status_files):
            self._drain_status(file)
        self.console.drain()

    def _drain_status(self, file: int) -> None:
        while file in self.status_files and any(key.fd == file for key, _ in self.selector.select(0)):
            self.selector.get_key(file).data()
        if file in self.status_files:
            self._forget_status(file)

    def _forget_status(self, file: int) -> None:
        self.status_files.remove(file)
        self.selector.unregister(file)
        os.close(file)

    @contextlib.contextmanager
    def _signals_caught(self):
        """Signals only leave a note and wake the loop; the loop acts on them."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self.selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 512))
        before_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        names = [name.strip() for name in self.spec.torch_options["signals_to_handle"].split(",")]
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
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
