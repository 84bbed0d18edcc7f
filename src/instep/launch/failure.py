"""What is said when a run has failed: the guilty rank's own error last, its echoes in one line before."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from instep.launch.decide import first_guilty, own_exit_code, was_ended_by_us
from instep.launch.exits import OUR_ECHO, describe_exit, echo_in, is_consequence, signal_name
from instep.launch.group_state import GroupState, RankState
from instep.launch.memory_facts import MemoryFacts, describe_bytes, explain_kill
from instep.records.finding import CallSite, Evidence, Finding
from instep.records.run_dir import RunDir, keep_json

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
_VARIES = re.compile(r"0x[0-9a-f]+|\d+|\[?rank\d+\]?:?")


def describe_failure(group: GroupState, run_dir: RunDir) -> str:
    """The last words on a failed run: echoes first, then the guilty rank with its traceback."""
    guilty = first_guilty(group)
    if guilty is None:
        return ""
    same = _ranks_with_same_error(group, guilty)
    parts = [
        *_echoes(group, same),
        _why_an_echo(group, guilty),
        _headline(guilty, same, group),
        _own_words(guilty, run_dir),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def describe_guilty(group: GroupState) -> str:
    """For other nodes: the rank of ours that failed by its own fault, in one line; empty when there is none."""
    guilty = first_guilty(group)
    if guilty is None or is_consequence(guilty.error):
        return ""
    where = guilty.error["where"] if guilty.error is not None else guilty.exit_site
    at = f", at {where['file']}:{where['line']}" if where else ""
    return f"rank {guilty.place.rank} on {socket.gethostname()}: {_summary(guilty)}{at}"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2 and 5`."""
    numbers = sorted(ranks)
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans]
    listed = ", ".join(texts)
    head, comma, tail = listed.rpartition(", ")
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {f'{head} and {tail}' if comma else listed}"


def _headline(guilty: RankState, same: list[RankState], group: GroupState) -> str:
    names = name_ranks(rank.place.rank for rank in same)
    where = f"on {socket.gethostname()}"
    if guilty.error is not None and guilty.error["is_usage"]:
        return f"instep: {names} {where} stopped:"
    how = describe_exit(own_exit_code(group, guilty))
    if guilty.exit_site is not None and guilty.error is None:
        how += f", at {guilty.exit_site['file']}:{guilty.exit_site['line']}: {guilty.exit_site['source']}"
    attempt = f" (attempt {group.restart + 1})" if group.restart else ""
    return f"instep: {names} {where} {how}{attempt}"


def describe_error(error: dict[str, Any]) -> str:
    """An exception as the user should read it: its traceback, or its sentence when it is one of ours."""
    return f"{error['type']}: {error['message']}{_at(error)}" if error["is_usage"] else error["text"].rstrip("\n")


def _own_words(guilty: RankState, run_dir: RunDir) -> str:
    error = guilty.error
    if error is not None and guilty.announced and not error["is_usage"]:  # by a hook of the user's, or by us
        return f"{_summary(guilty)}{_at(error)}"
    if error is not None:
        return describe_error(error)
    site = read_crash_site(run_dir.rank(guilty.place.rank).crash)
    return f"  at {site}: {site.source}" if site is not None else ""


def _at(error: dict[str, Any]) -> str:
    where = error["where"]
    return f"\n  at {where['file']}:{where['line']}: {where['source']}" if where else ""


def _echoes(group: GroupState, same: list[RankState]) -> list[str]:
    others: dict[str, list[RankState]] = defaultdict(list)
    for rank in group.failures:
        if rank not in same and not was_ended_by_us(group, rank):
            others[_summary(rank)].append(rank)
    lines: list[str] = []
    for summary, ranks in others.items():
        word = "failed because of it" if is_consequence(ranks[0].error) or not ranks[0].error else "failed too"
        lines.append(f"instep: {name_ranks(rank.place.rank for rank in ranks)} {word}: {summary}")
    return lines


def _why_an_echo(group: GroupState, guilty: RankState) -> str:
    """When even the first failure only says that another rank has gone: which one that may be."""
    if not is_consequence(guilty.error):
        return ""
    left = [
        rank.place.rank for rank in group.ranks if rank.exit_code == 0 and (rank.ended_at or 0.0) <= guilty.failed_at
    ]
    if left:
        return f"instep: {name_ranks(left)} had ended before, with exit code 0"
    if group.agent is not None and group.agent.elsewhere:
        return f"instep: the first to fail was {group.agent.elsewhere}"
    if len(group.ranks) < int(guilty.place.variables["WORLD_SIZE"]):
        return "instep: the rank that failed first is on another machine; its own `instep run` tells how"
    return ""


def _summary(rank: RankState) -> str:
    if rank.error is None:
        return describe_exit(rank.exit_code or 0)
    echo = echo_in(rank.error)
    if echo is not None:
        return f"{rank.error['type']}, " + ("a rank that it waited for has gone" if echo == OUR_ECHO else echo)
    first = (rank.error["message"].splitlines() or [""])[0]
    return f"{rank.error['type']}: {first[:160]}" if first else rank.error["type"]


def _ranks_with_same_error(group: GroupState, guilty: RankState) -> list[RankState]:
    return [guilty] if guilty.error is None else [rank for rank in group.failures if has_same_error(guilty, rank)]


def has_same_error(one: RankState, other: RankState) -> bool:
    """Whether both raised the same at the same place; numbers and addresses in its text may differ."""
    return one.error is not None and other.error is not None and _signature(one.error) == _signature(other.error)


def _signature(error: dict[str, Any]) -> tuple[str, str, str]:
    where = error["where"] or {}
    return error["type"], f"{where.get('file')}:{where.get('line')}", _VARIES.sub("#", error["message"])


def read_crash_site(path: Path) -> CallSite | None:
    """The user's line in what faulthandler wrote, or the innermost line when none is the user's; None without any."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The thread that crashed, or, when that was one of C++ (as gloo's), the others; the main thread comes last.
    threads = sorted(text.split("\n\n"), key=lambda thread: "Current thread" not in thread)
    stacks = [[CallSite(m["file"], int(m["line"])) for m in _FRAME.finditer(thread)] for thread in threads]
    crashed = "Current thread" in threads[0] and bool(stacks[0])
    candidates = stacks[:1] if crashed else [stacks[0], *reversed(stacks[1:])]
    own = [frame for stack in candidates for frame in stack if _is_users(frame.file)]
    chosen = next(iter(own), None) or next((frame for stack in candidates for frame in stack), None)
    return None if chosen is None else CallSite(chosen.file, chosen.line, _source_line(chosen))


def _is_users(file: str) -> bool:
    ours = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
    return not ("site-packages" in file or file.startswith(ours) or re.search(r"/lib(64)?/python\d|^<", file))


def _source_line(site: CallSite) -> str:
    try:
        return Path(site.file).read_text(encoding="utf-8", errors="replace").splitlines()[site.line - 1].strip()
    except (OSError, IndexError):
        return ""


def keep_failures(group: GroupState, run_dir: RunDir, memory: str | None = None) -> None:
    """Leaves failure.json in the directory of every rank that did not end well. memory: the sentence of `explain_kill`."""
    for rank in group.failures:
        if not was_ended_by_us(group, rank):
            facts = {"exit_code": rank.exit_code, "ended_at": rank.ended_at, "peak_bytes": rank.peak_bytes}
            facts |= {"memory": memory if rank.exit_code == -signal.SIGKILL else None}
            keep_json(run_dir.rank(rank.place.rank).failure, facts | {"error": rank.error, "restart": group.restart})


def describe_exits(group: GroupState) -> dict[str, dict[str, Any]]:
    """The exit code of every rank, so that one which ended with 0 in the middle is told from one that was ended."""
    return {
        str(rank.place.rank): {"code": rank.exit_code, "ended_at": rank.ended_at, "by_us": was_ended_by_us(group, rank)}
        for rank in group.ranks
        if rank.exit_code is not None
    }


def find_crash(group: GroupState, run_dir: RunDir, before: MemoryFacts, after: MemoryFacts) -> Finding | None:
    """The failure as a finding, for what no rule of diagnosis explains."""
    guilty = first_guilty(group)
    if guilty is None or (guilty.error is not None and guilty.error["is_usage"]):
        return None
    if guilty.error is not None:
        return _find_exception(group, guilty)
    if (guilty.exit_code or 0) < 0:
        return _find_signal(group, guilty, run_dir, before, after)
    return None


def _find_exception(group: GroupState, guilty: RankState) -> Finding:
    error = guilty.error
    assert error is not None
    where = CallSite(**error["where"]) if error["where"] else None
    ranks = tuple(sorted(rank.place.rank for rank in _ranks_with_same_error(group, guilty)))
    rank = guilty.place.rank
    return Finding(
        id="crash/exception",
        title=f"{name_ranks(ranks)} raised {_summary(guilty)}",
        cause="The exception was not caught, so the rank ended, and the others cannot go on without it.",
        fix=(f"look at {where}" if where else "read the traceback",),
        evidence=(Evidence(_summary(guilty), f"rank{rank}/failure.json", rank),),
        certainty="certain",
        ranks=ranks,
        where=where,
    )


def _find_signal(
    group: GroupState, guilty: RankState, run_dir: RunDir, before: MemoryFacts, after: MemoryFacts
) -> Finding:
    number, rank = -(guilty.exit_code or 0), guilty.place.rank
    site = read_crash_site(run_dir.rank(rank).crash)
    memory = explain_kill(before, after) if number == signal.SIGKILL else None
    largest = max(group.ranks, key=lambda each: each.peak_bytes)
    evidence = [Evidence(describe_exit(-number), f"rank{rank}/failure.json", rank)]
    if site is not None:
        evidence.append(Evidence(f"Python was at {site}: {site.source}", f"rank{rank}/crash.txt", rank))
    if number == signal.SIGKILL and guilty.peak_bytes:
        used = f"rank {rank} had used {describe_bytes(guilty.peak_bytes)} at most"
        most = f"the largest rank was {largest.place.rank} with {describe_bytes(largest.peak_bytes)}"
        evidence.append(Evidence(f"{used}; {most}", "wait4", rank))
    return Finding(
        id="memory/killed" if memory else "crash/signal",
        title=f"rank {rank} was killed because memory ran out" if memory else f"rank {rank} {describe_exit(-number)}",
        cause=memory or _why_signal(number),
        fix=_what_to_do(number, memory is not None, site),
        evidence=tuple(evidence),
        certainty="certain",
        ranks=(rank,),
        where=site,
    )


def _why_signal(number: int) -> str:
    if number == signal.SIGKILL:
        return (
            "Something outside the program killed it: the kernel when memory runs out, a container's or a job's limit, "
            "or a person. This machine's cgroup has counted no kill for memory meanwhile."
        )
    if number == signal.SIGABRT:
        return "C++ code gave up. gloo does so when ranks enter a collective with tensors of different sizes."
    return f"Compiled code ended the process with {signal_name(number)}; Python had no say in it."


def _what_to_do(number: int, for_memory: bool, site: CallSite | None) -> tuple[str, ...]:
    if for_memory:
        return ("use a smaller micro-batch or fewer ranks on this machine", "or raise the memory limit of the job")
    if number == signal.SIGKILL:
        return ("look into the kernel's log (dmesg) and the job's log for who killed it",)
    look = f"look at {site}" if site is not None else "look at rank's output.log"
    return (
        look,
        "compare the shapes that the ranks pass to collectives" if number == signal.SIGABRT else "run it alone: -n 1",
    )
