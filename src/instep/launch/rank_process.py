"""Starts one rank through the zygote: its streams, its status pipe, its job."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
from pathlib import Path
from string import Template
from typing import Any

from instep.launch import channel
from instep.launch.console import Console, Log, Stream
from instep.launch.group_state import RankState
from instep.launch.output import make_prefix
from instep.launch.spawn import Zygote, fresh_command, rank_job
from instep.records.launch_spec import LaunchSpec, RankPlace
from instep.records.run_dir import RunDir


class StatusPipe:
    """What a rank tells the launcher itself: its exception, where it called exit. One JSON object a line."""

    def __init__(self, rank: RankState, log: Path | None) -> None:
        self.rank = rank
        self.log = log
        self.reader, self.writer = os.pipe()
        self.partial = b""
        os.set_blocking(self.reader, False)

    def read(self) -> bool:
        """Takes what is there. Returns False at the end."""
        try:
            data = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            self._note(json.loads(line))
        return bool(data)

    def _note(self, report: dict[str, Any]) -> None:
        if report["event"] == "exit":
            self.rank.exit_site = report["where"]
            return
        self.rank.error = report
        self.rank.announced = report["printed"]
        if self.log is not None and not report["printed"]:
            log = Log(self.log)
            log.write(report["text"].encode(errors="replace"))
            log.close()


class RankStarter:
    """Starts ranks, and owns what is open for each of them until `close`."""

    def __init__(
        self, spec: LaunchSpec, zygote: Zygote, console: Console, probe_options: dict[str, Any], fresh: bool
    ) -> None:
        self.spec = spec
        self.zygote = zygote
        self.console = console
        self.probe_options = probe_options
        self.fresh = fresh
        self.status: list[StatusPipe] = []

    def start(self, rank: RankState) -> None:
        place = rank.place
        rank_dir = RunDir(Path(self.spec.run_dir)).rank(place.rank)
        with contextlib.suppress(OSError):  # a full disk costs the rank's files; each of them bears that
            rank_dir.root.mkdir(parents=True, exist_ok=True)
            rank_dir.forget()
        stdout, stderr = self._open_streams(place, rank_dir.output)
        status = StatusPipe(rank, rank_dir.output)
        self.status.append(status)
        self.console.selector.register(status.reader, selectors.EVENT_READ, lambda: self._hear(status))
        job = rank_job(self.spec, place, str(rank_dir.root), self.probe_options)
        command = fresh_command(self.spec.program, os.environ) if self.fresh else []
        files = (stdout, stderr, status.writer)
        with contextlib.suppress(channel.Closed):  # the zygote has died: `watch` hears of it and ends the run
            self.zygote.ask("start", rank.key, files, job=job, command=command)
        for file in files:
            os.close(file)

    def close(self) -> None:
        """After the ranks' end: hears the last of each, and lets go."""
        for status in list(self.status):
            while status in self.status and self._hear(status):
                pass
        self.console.drain()

    def _hear(self, status: StatusPipe) -> bool:
        before = status.partial
        alive = status.read()
        if not alive:
            self.status.remove(status)
            self.console.selector.unregister(status.reader)
            os.close(status.reader)
        return alive and status.partial != before

    def _open_streams(self, place: RankPlace, log: Path) -> tuple[int, int]:
        """Where the rank writes stdout and stderr: one pipe for both when both of ours are the same file, so that
        their order is kept."""
        stdout = self._open_stream(place, 1, place.stdout, place.tee_stdout, log)
        own = place.stdout or place.stderr or place.tee_stdout or place.tee_stderr
        if self.console.merged and not own:
            return stdout, os.dup(stdout)
        return stdout, self._open_stream(place, 2, place.stderr, place.tee_stderr, log)

    def _open_stream(self, place: RankPlace, target: int, path: str, tee: str, log: Path) -> int:
        if path:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        shown = place.shown and not (self.spec.quiet_ranks and place.rank > 0)
        reader, writer = os.pipe()
        stream = Stream(reader, target if shown else None, self.console.assembler(self._prefix(place)), [Log(log)])
        if tee:
            stream.files.append(Log(Path(tee)))
            self._add_filter(stream, place, target)
        self.console.add(stream)
        return writer

    def _add_filter(self, stream: Stream, place: RankPlace, target: int) -> None:
        name = "stdout" if target == 1 else "stderr"
        needles = self.spec.torch_options[f"duplicate_{name}_filters"]
        path = getattr(place, f"filtered_{name}")
        if needles and path:
            stream.filtered = tuple(needle.encode() for needle in needles)
            stream.filter_file = Log(Path(path))

    def _prefix(self, place: RankPlace) -> bytes:
        template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        if template is None:
            return make_prefix(place.rank, int(place.variables["WORLD_SIZE"]))
        with contextlib.suppress(ValueError):
            names = {"role_name": place.variables["ROLE_NAME"], "rank": place.rank, "local_rank": place.local_rank}
            return Template(template).safe_substitute(names).encode()
        return b""
