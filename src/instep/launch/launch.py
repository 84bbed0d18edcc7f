"""One launch: makes the zygote, the store or the agent, watches to the end, and tells what came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from instep.errors import UsageError
from instep.launch import channel, linux
from instep.launch.agent_link import AgentLink
from instep.launch.decide import first_guilty
from instep.launch.failure import describe_exits, describe_failure, find_crash, keep_failures
from instep.launch.group_state import AgentState, GroupState
from instep.launch.link.sharing import Sharing
from instep.launch.local import empty_store, make_placer, needs_agent, open_store, start_store
from instep.launch.meeting import check_meeting, describe_waiting
from instep.launch.memory_facts import explain_kill, read_memory_facts
from instep.launch.spawn import Zygote, looks_like_training
from instep.launch.watch import Hooks, Watch
from instep.launch.worker_env import choose_threads, count_cores
from instep.records.choice import Choice
from instep.records.finding import Finding
from instep.records.launch_spec import LaunchSpec, Program
from instep.records.run_dir import RunDir, keep_json

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """failure_text: the last words on a failed run; crash: the same as a finding, unless diagnosis knows better;
    sharing: with the launchers of other nodes, which is open until the report is out."""

    code: int
    failure_text: str = ""
    crash: Finding | None = None
    sharing: Sharing | None = None


class BrokenTorch(Exception):
    """torch could not be imported; the text is its traceback."""


def launch(spec: LaunchSpec, words: tuple[str, ...], hooks: Hooks, say: Say) -> Outcome:
    """words: torchrun's options as they were written. Raises UsageError, and BrokenTorch."""
    check_meeting(spec.torch_options)
    with_agent = needs_agent(spec.torch_options, os.environ)
    store = None if with_agent else open_store(spec.torch_options)
    linux.adopt_orphans()
    before = read_memory_facts()
    try:
        zygote, fresh = start_zygote(spec, say)
    except channel.Closed:
        return _say_zygote_died(say)
    run_dir = RunDir(Path(spec.run_dir))
    held: list[socket.socket] = []
    watch: Watch | None = None
    code: int | None = None
    try:
        with _open_agent_log(run_dir) as log:
            if store is None:
                watch = Watch(spec, zygote, hooks, None, fresh)
                held.append(_start_agent(watch, words, log.fileno(), time.time()))
            else:
                watch = Watch(spec, zygote, hooks, make_placer(spec, store[1]), fresh)
                held.append(start_store(zygote, store[0], log.fileno(), spec.num_local_ranks))
                watch.empty_store = partial(empty_store, held[-1])
        code = watch.run()
    except channel.Closed:
        return _say_zygote_died(say)
    finally:
        zygote.close()
        end_leftovers(zygote.pid)
        for each in held:
            each.close()
        if code is None and watch is not None:
            watch.leave_nodes()
    assert watch is not None and code is not None
    outcome = _conclude(watch.group, code, run_dir, before, say)
    return _with_other_nodes(outcome, watch)


def _open_agent_log(run_dir: RunDir) -> BinaryIO:
    try:
        return open(run_dir.agent_log, "ab", buffering=0)
    except OSError:  # a full disk costs the file
        return open(os.devnull, "ab", buffering=0)


def _conclude(group: GroupState, code: int, run_dir: RunDir, before: Any, say: Say) -> Outcome:
    stop = group.stop
    told = {"stop": {"reason": stop.reason, "at": stop.since}} if stop is not None else {}
    keep_json(run_dir.exits, describe_exits(group) | told)
    if stop is not None and stop.reason == "interrupted":
        say("stopped by Ctrl-C" if stop.signal == 2 else "stopped")
        return Outcome(code)
    if stop is not None and stop.reason in ("terminated", "stalled", "node_lost"):
        if stop.reason == "terminated":
            say("stopped by a signal from outside")
        return Outcome(code)
    after = read_memory_facts()
    keep_failures(group, run_dir, explain_kill(before, after))
    if group.agent is not None and group.agent.end == "failed" and first_guilty(group) is None:
        say(describe_agent_failure(group.agent.message))
    crash = find_crash(group, run_dir, before, after)
    return Outcome(code, describe_failure(group, run_dir), crash)


def _with_other_nodes(outcome: Outcome, watch: Watch) -> Outcome:
    """Brings what all nodes know to the first one, which makes the report."""
    group, sharing = watch.group, watch.group.sharing
    if sharing is None or (group.stop is not None and group.stop.reason == "interrupted"):
        watch.leave_nodes()
        return outcome
    sharing.exchange_ends(describe_exits(group), outcome.crash.as_json() if outcome.crash is not None else None)
    return replace(outcome, sharing=sharing)


def describe_agent_failure(message: str) -> str:
    return f"the nodes did not meet. {message}"


def start_zygote(spec: LaunchSpec, say: Say) -> tuple[Zygote, bool]:
    """The process that ranks come from, ready; and whether it starts fresh interpreters, said with the reason."""
    environ = dict(os.environ)
    threads = choose_threads(spec.num_local_ranks, environ)
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
        reason = f"{count_cores()} cores for {spec.num_local_ranks} ranks"
        say(str(Choice("OMP_NUM_THREADS", threads, reason, "the variable OMP_NUM_THREADS")))
    why = reason_against_fork(spec, os.environ)
    if why:
        say(f"starting each rank as a fresh process: {why}")
    forking = "fork-training" if looks_like_training(spec.program) else "fork"
    zygote = Zygote("fresh" if why is not None else forking, spec.program, environ)
    answer = _await_ready(zygote)
    if answer["answer"] == "broken":
        zygote.close()
        raise BrokenTorch(answer["text"])
    if answer["reason"]:
        say(f"starting each rank as a fresh process: {answer['reason']}")
    return zygote, why is not None or bool(answer["reason"])


def _await_ready(zygote: Zygote) -> dict[str, Any]:
    try:
        return zygote.hear()
    except (KeyboardInterrupt, channel.Closed):
        zygote.kill()
        raise


def _say_zygote_died(say: Say) -> Outcome:
    say("the process that imports torch and starts the ranks was killed before the first rank")
    return Outcome(1)


def reason_against_fork(spec: LaunchSpec, environ: Mapping[str, str]) -> str | None:
    """Why ranks cannot be forked from one process that has imported torch; "" needs no saying; None when they can."""
    if spec.program.kind == "command":
        return ""
    if not spec.fork:
        return "--no-fork"
    if sys.platform == "darwin":
        return "on macOS a fork after importing torch is not safe"
    if not hasattr(os, "fork"):
        return "this system has no fork"
    if environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return f"PYTHON_EXEC is {environ['PYTHON_EXEC']}"
    return None


def _start_agent(watch: Watch, words: tuple[str, ...], log: int, now: float) -> socket.socket:
    spec = watch.spec
    ours, theirs = channel.open_channel()
    program = ["--", spec.program.target, *spec.program.args]  # so that no argument of the script is read as an option
    with theirs:
        watch.zygote.ask("agent", "agent", (log, log, theirs.fileno()), options=list(words), program=program)
    watch.group.agent = AgentState(now)
    waiting: Callable[[float], str] = lambda seconds: describe_waiting(spec.torch_options, seconds)  # noqa: E731
    watch.join_agent(AgentLink(ours, spec, watch.start_group, watch.console.say, waiting))
    return ours


def count_devices(text: str, say: Say, program: Program) -> int:
    """What `--nproc-per-node` means when it is no number, asked of torch in a process of its own."""
    zygote = Zygote("fork", program, os.environ)
    answer = zygote.hear()
    if answer["answer"] == "broken":
        raise BrokenTorch(answer["text"])
    ours, theirs = channel.open_channel()
    with ours, theirs:
        zygote.ask("count", "count", (2, 2, theirs.fileno()), text=text)
        theirs.close()
        reply, _ = channel.receive(ours)
    zygote.close()
    if "error" in reply:
        raise UsageError(f"-n {text}: {reply['error']} Allowed: a number, auto, cpu, gpu, xpu.")
    say(str(Choice("nproc-per-node", reply["count"], f"what {text!r} means on this machine", "-n")))
    return reply["count"]


def end_leftovers(zygote: int) -> None:
    """After the zygote's end: whatever it could not end itself has become our child, and ends here."""
    while True:
        children = [pid for pid in linux.list_children(os.getpid()) if pid != zygote]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
