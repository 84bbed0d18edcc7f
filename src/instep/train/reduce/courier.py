"""Runs several collectives per bucket in the background, one bucket after another in the order they were started.

On the CPU a thread does it: waiting for one collective inside another's callback would block the threads that gloo
needs to finish either. On a GPU collectives return when they are queued, so a stream of its own is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from instep.train.reduce.bucket import Bucket, Handle

Run = Callable[[Bucket], None]


class BucketCourier(Protocol):
    def start(self, bucket: Bucket) -> Handle: ...

    def close(self) -> None: ...


class Couriers:
    """One courier per group, made with the first bucket. Buckets take them in turn, so that while one adds, the next sends.

    run: called as run(bucket, group=...), sums the bucket over a group in which nothing else is sent. On a GPU all take the first group: the kernels of two
    could wait for each other.
    """

    def __init__(self, run: Callable[..., None], groups: Sequence[dist.ProcessGroup]) -> None:
        self._run, self._groups = run, groups
        self._couriers: list[BucketCourier] = []
        self._num_started = 0  # ranks start the same buckets in the same order, so they choose the same courier

    def start(self, bucket: Bucket) -> Handle:
        if not self._couriers:
            self._couriers = [choose_courier(run, bucket.flat.device) for run in self._runs(bucket.flat.device)]
        self._num_started += 1
        return self._couriers[self._num_started % len(self._couriers)].start(bucket)

    def _runs(self, device: torch.device) -> list[Run]:
        groups = self._groups[:1] if device.type == "cuda" else self._groups
        return [partial(self._run, group=group) for group in groups]

    def close(self) -> None:
        for courier in self._couriers:
            courier.close()
        self._couriers = []


def choose_courier(run: Run, device: torch.device) -> BucketCourier:
    return StreamCourier(run, device) if device.type == "cuda" else Courier(run)


class Ticket:
    """What `Courier.start` gives back; waits as the handles of torch.distributed do."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.error: BaseException | None = None
        self.done = threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises what running the bucket raised, and RuntimeError when that takes longer than `timeout`."""
        if not self.done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"bucket {self.bucket.index} timed out: not summed after {timeout}")
        if self.error is not None:
            raise self.error


class Courier:
    """A daemon thread, started with the first bucket and ended by `close`.

    After a bucket has failed the later ones fail with the same error: their collectives would find no partner.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._queue: SimpleQueue[Ticket | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, bucket: Bucket) -> Ticket:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="instep-courier", daemon=True)
            self._thread.start()
        ticket = Ticket(bucket)
        self._queue.put(ticket)
        return ticket

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Ends the thread, unless it waits for a rank that does not come; then it ends with the process."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_seconds)
            self._thread = None

    def _work(self) -> None:
        failure: BaseException | None = None
        while (ticket := self._queue.get()) is not None:
            if failure is None:
                try:
                    self._run(ticket.bucket)
                except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                    failure = error
            ticket.error = failure
            ticket.done.set()


class StreamTicket:
    """The bucket is summed for whatever the waiting stream does next; the host does not stop."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self, timeout: timedelta | None = None) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class StreamCourier:
    """Queues a bucket's work behind what filled it, beside what the script queues later."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run = run
        self._stream = torch.cuda.Stream(device)

    def start(self, bucket: Bucket) -> StreamTicket:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        bucket.flat.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            self._run(bucket)
            return StreamTicket(self._stream.record_event())

    def close(self) -> None:
        """Nothing to end: the stream goes with this object."""
