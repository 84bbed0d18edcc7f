"""One save on its way to disk, in the background of every rank."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from instep.records.run_dir import CheckpointDir
from instep.train.checkpoint.agreement import Agreement, GivenUp
from instep.train.checkpoint.durable_file import FileEntry, write_durably
from instep.train.checkpoint.encode import JSON

Publish = Callable[[dict[str, FileEntry]], None]


@dataclass(frozen=True)
class Order:
    """What one rank has to do for a save. contents: the bytes of its file; values: all of rank 0's JSON, own_values:
    what this rank adds; publish: makes the checkpoint visible; discard: undoes it (both run on rank 0 alone)."""

    step: int
    rank: int
    world_size: int
    directory: CheckpointDir
    contents: memoryview
    values: dict[str, JSON]
    own_values: dict[str, JSON]
    publish: Publish
    discard: Callable[[], None]


class Saving(threading.Thread):
    """Every rank writes its file; rank 0 collects what they wrote, publishes, and tells all how it ended."""

    def __init__(self, order: Order, agreement: Agreement) -> None:
        super().__init__(name=f"checkpoint of step {order.step}", daemon=True)
        self.order, self.agreement = order, agreement
        self.failure: str | None = None

    def run(self) -> None:
        try:
            self.failure = self._save()
        except GivenUp:
            self.failure = f"the checkpoint of step {self.order.step} was given up, since this rank is leaving."
        except (RuntimeError, dist.DistError) as error:  # the store went with the process that held it
            self.failure = f"the checkpoint of step {self.order.step} lost contact to the other ranks: {error}"

    def _save(self) -> str | None:
        reports = self.agreement.gather(self._write())
        result = self._finish(reports) if reports is not None else None
        return self.agreement.share(result)

    def _write(self) -> dict[str, Any]:
        order = self.order
        path = order.directory.tensors(order.rank, order.world_size)
        try:
            entry = write_durably(path, order.contents)
        except OSError as error:
            return {"problem": self._explain(error)}
        return {"name": path.name, "entry": asdict(entry), "values": order.own_values}

    def _finish(self, reports: list[dict[str, Any]]) -> str | None:
        problems = [report["problem"] for report in reports if "problem" in report]
        if not problems:
            try:
                self._publish(reports)
                return None
            except OSError as error:
                problems.append(self._explain(error))
        self.order.discard()
        return " ".join(problems)

    def _publish(self, reports: list[dict[str, Any]]) -> None:
        files = {report["name"]: FileEntry(**report["entry"]) for report in reports}
        values = merge_values(self.order.values, [report["values"] for report in reports])
        path = self.order.directory.values
        files[path.name] = write_durably(path, json.dumps(values, allow_nan=False).encode())
        self.order.publish(files)

    def _explain(self, error: OSError) -> str:
        order = self.order
        advice = "Make room there." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        if error.errno == errno.ENOENT:
            advice = "Every node has to see the same directory: checkpoints of several nodes need shared storage."
        return (
            f"the checkpoint of step {order.step} could not be written to {order.directory.root.parent} by rank "
            f"{order.rank}: {error.strerror}. The older checkpoints are whole. {advice}"
        ).rstrip()


def merge_values(values: dict[str, JSON], own: list[dict[str, JSON]]) -> dict[str, JSON]:
    """Rank 0's values and, key by key of the second level, what each rank adds: {"streams": {"3": ...}}."""
    merged = dict(values)
    for entries in own:
        for key, value in entries.items():
            merged[key] = {**merged.get(key, {}), **value}
    return merged
