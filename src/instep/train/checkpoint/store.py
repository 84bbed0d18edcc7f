"""The checkpoints of a run: saved in the background, kept or removed, found again and opened.

Every rank calls `save`, `newest_good`, `open` and `close`; what they decide is the same on all ranks.
"""

from __future__ import annotations

import json
import platform
import secrets
import socket
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch

from instep.errors import CheckpointError, InstepError, UsageError
from instep.records.run_dir import CheckpointDir, RunDir
from instep.train.checkpoint.agreement import Agreement, open_store
from instep.train.checkpoint.durable_file import FileEntry
from instep.train.checkpoint.encode import JSON
from instep.train.checkpoint.file_image import FileImage
from instep.train.checkpoint.lock import Lock, sees_lock, take_lock
from instep.train.checkpoint.manifest import Damage, Manifest, find_damage, read_manifest
from instep.train.checkpoint.pieces import Part, assign_writers, describe_parts, select
from instep.train.checkpoint.retention import choose_removed
from instep.train.checkpoint.saved import Saved
from instep.train.checkpoint.saving import Order, Saving
from instep.train.checkpoint.shelf import Shelf
from instep.train.world import World

LEAVE_SECONDS = 10.0  # how long a rank that fails lets a save in flight finish


class Checkpoints:
    """keep: how many of the newest stay (None: all); keep_every: steps that it divides stay for good; say: takes one
    sentence for the user, on rank 0. Raises UsageError when another run uses the directory or it cannot be written."""

    def __init__(
        self,
        directory: Path | str,
        world: World,
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r} has to be a whole number of at least 1, or None.")
        self.run_dir, self._world, self._keep, self._keep_every = RunDir(Path(directory)), world, keep, keep_every
        self._say = say if world.is_main else _say_nothing
        self._shelf = Shelf(self.run_dir)
        self._lock: Lock | None = None
        self._check_shared(self._on_main(self._occupy, "opening the run directory"))
        self._store = open_store(world)
        self._image = FileImage(world.device)
        self._held: list[list[Part]] = [[] for _ in range(world.size)]
        self._writes: list[list[Part]] = []
        self._digest = ""
        self._saving: Saving | None = None
        self._known_good: Path | None = None
        self._damaged: set[str] = set()
        self.is_reserved = False

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, JSON],
        *,
        step: int,
        metric: float | None = None,
        best: Literal["max", "min"] | None = None,
        wait: bool = False,
        own_values: Mapping[str, Mapping[str, JSON]] | None = None,
    ) -> None:
        """Blocks until the tensors are copied to host memory, and with `wait` until the checkpoint is durable.

        tensors: as `capture` gives them; one that only some ranks hold is written by one of those. values: rank 0's
        count. own_values: what is this rank's alone, merged over ranks by the keys of its second level.
        Waits first for the save before, and raises CheckpointError if that one failed.
        """
        self.wait()
        self._known_good = None
        self.is_reserved = True
        snapshot = _snapshot(values) if self._world.is_main else {}
        mine, total = self._share_out(tensors, step)
        token = secrets.token_hex(4)
        token, sequence = self._on_main(lambda: self._begin(step, token, total), f"checkpoint of step {step}")
        partial = self.run_dir.partial_checkpoint(step, token)
        self._image.stage(select(tensors, mine))
        order = Order(
            step,
            self._world.rank,
            self._world.size,
            partial,
            self._image.contents(),
            snapshot,
            {key: dict(value) for key, value in (own_values or {}).items()},
            lambda files: self._publish(
                partial, token, _describe(step, sequence, self._world.size, files, metric, best)
            ),
            lambda: self._shelf.discard(partial),
        )
        self._saving = Saving(order, Agreement(self._world, self._store, f"instep/checkpoint/{token}"))
        self._saving.start()
        if wait:
            self.wait()

    def reserve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Gets the memory for the first save in the background. Call it once the optimizer has its state; local."""
        self.is_reserved = True
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._image.reserve(int(total / self._world.size * 1.02) + (1 << 20))

    @property
    def failure(self) -> str | None:
        """Why the last save failed, as far as this rank knows; None while it is in flight."""
        return self._saving.failure if self._saving is not None and not self._saving.is_alive() else None

    def check(self) -> None:
        """Raises CheckpointError when a save in the background has failed. Local, and free of cost otherwise."""
        if self._saving is not None and not self._saving.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits until the save in flight is durable. Raises CheckpointError if it failed."""
        if self._saving is None:
            return
        self._saving.join()
        failure, self._saving = self._saving.failure, None
        if failure is not None:
            raise CheckpointError(failure)

    def newest_good(self) -> Path | None:
        """The newest checkpoint that is whole, all its checksums verified; what is wrong with newer ones is said."""
        self.wait()
        names = self._on_main(self._list_candidates, "looking for the newest checkpoint")
        for index, name in enumerate(names):
            path = self.run_dir.checkpoints / name
            problems = self._inspect(path)
            if not problems:
                self._known_good = path
                return path
            self._damaged.add(name)
            rest = "trying the one before" if index + 1 < len(names) else "there is none before it"
            self._say(f"checkpoint {name} is not usable: {'; '.join(problems)}; {rest}.")
        return None

    def open(self, path: Path | str = "latest") -> Saved:
        """Raises CheckpointError when the one asked for by name is damaged, or when `latest` finds none."""
        if str(path) == "latest":
            found = self._known_good or self.newest_good()
            if found is None:
                raise CheckpointError(f"there is no whole checkpoint in {self.run_dir.checkpoints}.")
        else:
            found = self._find(Path(path))
            problems = [] if found == self._known_good else self._inspect(found)
            if problems:
                raise CheckpointError(f"the checkpoint {found} cannot be restored: {'; '.join(problems)}.")
        self._known_good = None
        return Saved(found, read_manifest(found))

    def close(self) -> None:
        """Waits for the save in flight, raises if it failed, and gives up the lock."""
        try:
            self.wait()
        finally:
            self._release()

    def abandon(self, timeout_seconds: float = LEAVE_SECONDS) -> None:
        """For a rank that fails: lets a save in flight finish where the others still take part. Never raises."""
        if self._saving is not None:
            self._saving.join(timeout_seconds)
            self._saving.agreement.given_up.set()
            self._saving.join(1.0)
            self._saving = None
        self._release()

    def _occupy(self) -> str:
        try:
            self.run_dir.root.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.run_dir)
            self._shelf.open()
            return self._lock.holder
        except OSError as error:
            self._release()
            raise UsageError(
                f"checkpoints cannot be written to {self.run_dir.root}: {error.strerror}. Give the run a directory "
                "that this user can write."
            ) from None

    def _check_shared(self, holder: str) -> None:
        """Raises UsageError on every rank when one of them sees another directory than rank 0."""
        blind = None if self._world.is_main or sees_lock(self.run_dir, holder) else socket.gethostname()
        hosts = self._world.gather_objects(blind, "opening the run directory on every rank")
        found = [f"rank {rank} on {host}" for rank, host in enumerate(hosts) if host is not None]
        if found:
            self._release()
            raise UsageError(
                f"{', '.join(found)} does not see the run directory {self.run_dir.root} of rank 0: checkpoints of "
                "several nodes need a directory on storage that all of them share."
            )

    def _release(self) -> None:
        self._image_done()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _image_done(self) -> None:
        if hasattr(self, "_image"):
            self._image.finish_reserving()

    def _share_out(self, tensors: Mapping[str, torch.Tensor], step: int) -> tuple[list[Part], int]:
        """What this rank writes, and the bytes of all. Worked out anew only when a rank's list has changed."""
        parts = describe_parts(tensors)
        digest = sha256(repr(parts).encode()).hexdigest()
        news = None if digest == self._digest else parts
        everyone = self._world.gather_objects(news, f"saving the checkpoint of step {step}")
        if any(theirs is not None for theirs in everyone):
            self._held = [held if theirs is None else theirs for held, theirs in zip(self._held, everyone)]
            self._writes = assign_writers(self._held)
        self._digest = digest
        return self._writes[self._world.rank], sum(part.num_bytes for share in self._writes for part in share)

    def _begin(self, step: int, token: str, num_bytes: int) -> tuple[str, int]:
        try:
            self._shelf.begin(step, token, num_bytes)
            complete, _ = self._shelf.list_complete()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be begun in {self.run_dir.checkpoints}: {error.strerror}. "
                "The older checkpoints are whole."
            ) from None
        return token, 1 + max((manifest.sequence for _, manifest in complete), default=0)

    def _publish(self, partial: CheckpointDir, token: str, manifest: Manifest) -> None:
        written = self._shelf.publish(partial, manifest, token)
        self._damaged.discard(written.root.name)
        complete, _ = self._shelf.list_complete()
        usable = [item for item in complete if item[0].root.name not in self._damaged]
        for directory in choose_removed(usable, self._keep, self._keep_every):
            self._shelf.remove(directory)

    def _list_candidates(self) -> list[str]:
        complete, problems = self._shelf.list_complete()
        for problem in problems:
            self._say(f"not a usable checkpoint: {problem}.")
        return [directory.root.name for directory, _ in complete]

    def _inspect(self, path: Path) -> list[str]:
        """What is wrong, agreed over ranks, of which each reads a share of the files through."""
        try:
            manifest = read_manifest(path)
            share = sorted(manifest.files)[self._world.rank :: self._world.size]
            mine = find_damage(path, manifest, share)
        except Damage as damage:
            mine = [str(damage)]
        everyone = self._world.gather_objects(mine, f"verifying the checkpoint {path.name}")
        return list(dict.fromkeys(problem for problems in everyone for problem in problems))

    def _find(self, path: Path) -> Path:
        inside = self.run_dir.checkpoints / path
        try:
            return inside if not path.exists() and inside.exists() else path
        except OSError as error:
            raise CheckpointError(f"the checkpoint {path} cannot be restored: {error.strerror}.") from None

    def _on_main(self, work: Callable[[], Any], what: str) -> Any:
        """Rank 0 works, all get its result or raise its error."""
        outcome: tuple[Any, InstepError | None] = (None, None)
        if self._world.is_main:
            try:
                outcome = (work(), None)
            except InstepError as error:
                outcome = (None, error)
        result, error = self._world.broadcast_object(outcome, what)
        if error is not None:
            raise error
        return result


def _snapshot(values: Mapping[str, JSON]) -> dict[str, JSON]:
    """A copy that later changes do not reach. Raises UsageError for what is no JSON."""
    try:
        return json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the values of a checkpoint have to be plain JSON: {error}.") from None


def _describe(
    step: int, sequence: int, world_size: int, files: dict[str, FileEntry], metric: float | None, best: str | None
) -> Manifest:
    from instep import __version__

    versions = {"instep": __version__, "torch": torch.__version__, "python": platform.python_version()}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    metric = None if metric is None else float(metric)
    return Manifest(step, sequence, now, world_size, files, metric, best, versions)


def _say_nothing(text: str) -> None:
    pass
