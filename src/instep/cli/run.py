"""`instep run`: starts the ranks of a program as torchrun does, watches them, says what went wrong."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from instep.errors import InstepError, UsageError
from instep.launch import linux
from instep.launch.group_state import GroupState
from instep.launch.local import make_placer, open_store, start_store
from instep.launch.options import Parsed, parse
from instep.launch.spawn import Zygote
from instep.launch.watch import Hooks, Watch
from instep.launch.worker_env import choose_threads
from instep.records.choice import Choice
from instep.records.launch_spec import LaunchSpec, Program
from instep.records.run_dir import RunDir, write_json


def run(argv: list[str]) -> int:
    try:
        parsed = parse(argv)
        if parsed.ours["help"]:
            print("instep run [options] script.py [args]")
            return 0
        if parsed.program is None:
            raise UsageError("no script was given. Write it after the options, as in `instep run -n 2 train.py`.")
        return launch(parsed, parsed.program)
    except InstepError as error:
        print(f"instep run: {error}", file=sys.stderr)
        return error.exit_code


def launch(parsed: Parsed, program: Program) -> int:
    num_ranks = int(parsed.torch["nproc_per_node"])
    run_dir = make_run_dir(parsed.ours["run_dir"], program)
    spec = LaunchSpec(program, num_ranks, str(run_dir.root), parsed.torch)
    write_json(run_dir.launch, spec.as_json())
    environ = dict(os.environ)
    threads = choose_threads(num_ranks, environ)
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    linux.adopt_orphans()
    server, address = open_store(parsed.torch)
    zygote = Zygote("fork", program, environ)
    answer = zygote.hear()
    if answer["answer"] == "broken":
        print(answer["text"], file=sys.stderr)
        return 1
    log = os.open(run_dir.root / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    store = start_store(zygote, server, log, num_ranks)
    os.close(log)
    watch = Watch(spec, zygote, make_placer(spec, address), Hooks())
    watch.helper_keys["store"] = None
    code = watch.run()
    store.close()
    zygote.close()
    for rank in watch.group.ranks:
        if rank.error:
            print(rank.error["text"], file=sys.stderr, end="")
    return code


def make_run_dir(wanted: str | None, program: Program) -> RunDir:
    root = Path(wanted or f"runs/{program.short_name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    root.mkdir(parents=True, exist_ok=True)
    return RunDir(root)


__all__ = ["Choice", "GroupState", "run"]
