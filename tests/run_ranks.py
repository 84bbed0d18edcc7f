"""Runs a function on a few processes that have met, and hands back what each returned.

The processes are forked from a server that has imported torch once, so that a test takes a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])  # the first optimizer imports dynamo


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    timeout_seconds: float = 150,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """function(rank, size, *arguments) on `size` ranks of a gloo group; module-level, as it is pickled.

    may_die: ranks that end without an answer; their result is None.
    Raises RuntimeError with the first traceback when a rank fails, and with the ranks' names when they do not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            job = (theirs, f"{folder}/store", rank, size, function, arguments)
            process = _context.Process(target=_rank, args=job)  # no daemon: it may have data workers
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _collect([pipe for _, pipe in ranks], time.monotonic() + timeout_seconds, may_die)
        finally:
            for _, pipe in ranks:
                pipe.close()
            for process, _ in ranks:
                process.join(1)
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float, may_die: tuple[int, ...]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in results]
            raise RuntimeError(f"ranks {late} did not end in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failure, results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                failure, results[rank] = None if rank in may_die else "ended without an answer", None
            if failure:
                raise RuntimeError(f"rank {rank}: {failure}")
    return [results[rank] for rank in range(len(pipes))]


def _rank(pipe: Connection, store: str, rank: int, size: int, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=100)
        )
        answer = None, function(rank, size, *arguments)
    except BaseException:  # noqa: BLE001 - whatever it was, the test has to show it
        answer = traceback.format_exc(), None
    pipe.send_bytes(pickle.dumps(answer))  # tensors as bytes: sent as shared memory they would end with this process
    pipe.poll(30)  # a rank that ended now would break the connections of those still at work
    os._exit(0)
