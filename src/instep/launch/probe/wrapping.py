"""DistributedDataParallel: what each rank wraps, and what becomes of it."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import sys
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.sites import is_users_file
from instep.launch.probe.stop_requests import watch_stop_requests
from instep.launch.probe.unused import UsedParameters, watch_used

_MOST_NAMES = 400


class Wrapped:
    """One wrapped model. expects_reduction: a forward has run whose backward has to average the gradients."""

    def __init__(self, number: int, model: DistributedDataParallel, site: int) -> None:
        self.number, self.site = number, site
        self.model = weakref.ref(model)
        inner = model.module
        self.inner = weakref.ref(inner)
        self.parameters = [p for p in inner.parameters() if p.requires_grad]
        self.ids = {id(p) for p in self.parameters}
        self.dtypes = [p.dtype for p in self.parameters]
        self.sizes = {p.numel() for p in self.parameters}
        self.num_elements = sum(p.numel() for p in self.parameters)
        self.expects_reduction = self.expects_local = self.forward_since_step = False
        self.forwards = self.steps = self.reduced_in_step = self.local_since_reduced = 0
        self.adds_up = False  # the backward that runs adds to gradients that were averaged and not used
        self.version = -1
        self.used: UsedParameters | None = None
        self.backward_site = 0
        self.averaged_by_hand = self.catching = False
        self.caught = 0
        self.sequence_before = 0
        self.rests = 0  # of the recorder, at its newest step that was watched
        self.uses_default = getattr(model, "process_group", None) is dist.group.WORLD

    def sequence(self, of_default: int) -> int:
        """Operations given to the group that averages this model's gradients. of_default: those of the default group."""
        if self.uses_default:
            return of_default
        model: Any = self.model()
        if model is None:
            return 0
        try:
            return model.process_group._get_sequence_number_for_group()
        except (RuntimeError, AttributeError):
            return 0

    def present_parameters(self) -> list[torch.nn.Parameter]:
        """Those that the model has now: a script may have put others in the place of those that were wrapped."""
        model: Any = self.model()
        return list(model.module.parameters()) if model is not None else self.parameters

    def is_adding_up(self) -> bool:
        """Whether the last average is still there and has not been used: neither cleared nor followed by an update, as
        the closures of LBFGS and two-step optimizers do."""
        first = self.parameters[0] if self.parameters else None
        return first is not None and first._version == self.version and first.grad is not None

    def remember_version(self) -> None:
        self.version = self.parameters[0]._version if self.parameters else -1


class Wrappers:
    """All wrapped models of this rank."""

    def __init__(self) -> None:
        self.all: list[Wrapped] = []
        self.no_sync_site = 0

    def of_model(self, model: Any) -> Wrapped | None:
        for one in self.all:
            if one.model() is model:
                return one
        return None

    def of_inner(self, module: Any) -> Wrapped | None:
        return next((one for one in self.all if (m := one.model()) is not None and m.module is module), None)


WRAPPERS = Wrappers()
TRAFFIC: list[
    Callable[[torch.Tensor, int], None]
] = []  # told of a collective's tensor before it starts, and of its line


@contained
def note_parameter_traffic(recorder: Recorder, tensor: torch.Tensor, site: int, operation: str) -> None:
    """The script averages parameters or gradients itself (as local SGD does): ranks may differ in between.

    A tensor that is none of them counts when it is as large as a good part of them: a flat copy. States of generators,
    which training libraries broadcast, and results that are gathered do not.
    """
    for follow in TRAFFIC if "all_to_all" not in operation else ():  # rows that change ranks, as of experts
        follow(tensor, site)
    elements = tensor.numel()
    may_be_copy = tensor.is_floating_point() and "gather" not in operation
    for wrapped in WRAPPERS.all:
        if wrapped.averaged_by_hand or (elements not in wrapped.sizes and 4 * elements < wrapped.num_elements):
            continue
        pointer = tensor.data_ptr() if elements in wrapped.sizes else 0
        own = any(
            p.data_ptr() == pointer or (p.grad is not None and p.grad.data_ptr() == pointer)
            for p in wrapped.parameters
            if p.numel() == elements
        )
        if own or (may_be_copy and 4 * elements >= wrapped.num_elements > 64):
            wrapped.averaged_by_hand = True
            recorder.log.note("averaged-by-hand", wrapper=wrapped.number, site=site)


def watch_wrapping(recorder: Recorder) -> None:
    replace(DistributedDataParallel, "__init__", lambda original: _wrap_init(recorder, original))
    replace(DistributedDataParallel, "no_sync", lambda original: _wrap_no_sync(recorder, original))
    replace(Join, "__enter__", lambda original: _wrap_join(recorder, original))
    replace(torch.nn.Module, "_apply", lambda original: _wrap_apply(recorder, original))
    replace(DistributedDataParallel, "register_comm_hook", lambda original: _wrap_comm_hook(recorder, original))


def _wrap_init(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        site = recorder.sites.here(1)
        module = args[0] if args else kwargs.get("module")
        _note_model(recorder, site, module, kwargs, is_users_file(sys._getframe(1).f_code.co_filename))
        original(self, *args, **kwargs)
        _remember(recorder, self, site)
        watch_stop_requests(recorder)

    return call


@contained
def _note_model(recorder: Recorder, site: int, module: torch.nn.Module, options: dict[str, Any], by_user: bool) -> None:
    """Before the ranks compare their models: names and shapes, and where their classes stand. by_user: the line that
    wraps is the user's own, not that of a training library."""
    named = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters() if p.requires_grad]
    group = options.get("process_group")
    recorder.log.note(
        "wrap",
        wrapper=len(WRAPPERS.all),
        site=site,
        module=type(module).__name__,
        digest=zlib.crc32(repr(named).encode()),
        num_parameters=len(named),
        names=[name for name, _, _ in named[:_MOST_NAMES]],
        shapes=[list(shape) for _, shape, _ in named[:_MOST_NAMES]],
        classes=describe_classes(module),
        find_unused=bool(options.get("find_unused_parameters", False)),
        static_graph=bool(options.get("static_graph", False)),
        by_user=by_user,
        **_device_facts(module),
        broadcast_buffers=options.get("broadcast_buffers"),
        ranks=dist.get_process_group_ranks(group) if group is not None else None,
        bytes=sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad),
        buffers=sum(1 for _ in module.buffers()),
        batch_norms=sum(
            isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in module.modules()
        ),
    )


def _device_facts(module: torch.nn.Module) -> dict[str, Any]:
    first = next(module.parameters(), None)
    return {
        "device": str(first.device) if first is not None else "cpu",
        "device_count": torch.cuda.device_count() if first is not None and first.device.type == "cuda" else 0,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "host": socket.gethostname(),
    }


def describe_classes(module: torch.nn.Module) -> list[dict[str, Any]]:
    """The user's module classes inside a model, with file, first and last line, and one place in the model."""
    found: dict[type, str] = {}
    for name, part in module.named_modules():
        found.setdefault(type(part), name)
    rows = []
    for kind, name in found.items():
        try:
            file = inspect.getsourcefile(kind)
            if file is None or not is_users_file(file):
                continue
            lines, first = inspect.getsourcelines(kind)
        except (OSError, TypeError):
            continue
        rows.append(
            {"class": kind.__qualname__, "file": file, "line": first, "last": first + len(lines) - 1, "at": name}
        )
    return rows[:50]


@contained
def _remember(recorder: Recorder, model: DistributedDataParallel, site: int) -> None:
    wrapped = Wrapped(len(WRAPPERS.all), model, site)
    wrapped.used = watch_used(recorder, wrapped.number, wrapped.parameters, model)
    recorder.wake()
    WRAPPERS.all.append(wrapped)
    if len(WRAPPERS.all) > 16:  # scripts that wrap again and again, as trainers do between stages
        WRAPPERS.all = [one for one in WRAPPERS.all if one.model() is not None]


@contained
def note_unused(recorder: Recorder, model: DistributedDataParallel, error: BaseException) -> None:
    """The names behind the indices in DDP's error about gradients that never came."""
    text = str(error)
    if "Expected to have finished reduction" not in text:
        return
    tail = text.rpartition("for rank")[2].partition(":")[2]
    indices = [int(word) for word in tail.replace("\n", " ").split(" In addition")[0].split() if word.isdecimal()]
    named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
    names = [name for name, _ in named]
    wrapped = WRAPPERS.of_model(model)
    known = wrapped.ids if wrapped is not None else {id(p) for _, p in named}
    recorder.log.note(
        "unused-parameters",
        indices=indices,
        replaced=[name for name, p in named if id(p) not in known][:20],
        site=wrapped.site if wrapped is not None else 0,
        names=[names[i] for i in indices if i < len(names)],
        classes=describe_classes(model.module),
        owners=_owners(model.module, [names[i] for i in indices if i < len(names)]),
    )


def _owners(module: torch.nn.Module, names: list[str]) -> list[dict[str, str]]:
    """For each prefix of an unused parameter: the class that holds that child, and the child's name."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        parts = name.split(".")
        for depth in range(len(parts) - 1):
            parent = module.get_submodule(".".join(parts[:depth]))
            rows[(type(parent).__qualname__, parts[depth])] = {
                "class": type(parent).__qualname__,
                "child": parts[depth],
                "path": ".".join(parts[: depth + 1]),
            }
    return list(rows.values())


def _wrap_no_sync(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any) -> contextlib.AbstractContextManager[None]:
        WRAPPERS.no_sync_site = recorder.sites.here(1)
        return original(self)

    return call


def _wrap_join(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Inside `with Join(...)` a rank that is done answers the collectives of the others: counts rightly differ."""

    def __enter__(self: Any) -> Any:
        if not recorder.has_joined:
            recorder.has_joined = True
            recorder.log.note("join", site=recorder.sites.here(1))
        return original(self)

    return __enter__


def _wrap_apply(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """`model.double()`, `.to(...)` and the like; called for every module inside too, of which only the outermost counts."""

    def _apply(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = WRAPPERS.of_model(self) or WRAPPERS.of_inner(self) if WRAPPERS.all else None
        if wrapped is not None:
            recorder.log.note("module-changed", wrapper=wrapped.number, site=recorder.sites.here(1))
        return original(self, fn, *args, **kwargs)

    return _apply


def _wrap_comm_hook(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, state: object, hook: Callable[..., Any]) -> Any:
        _note_hook(recorder, self, hook)
        return original(self, state, hook)

    return call


@contained
def _note_hook(recorder: Recorder, model: Any, hook: Callable[..., Any]) -> None:
    wrapped = WRAPPERS.of_model(model)
    name = getattr(hook, "__name__", type(hook).__name__)
    recorder.log.note("comm-hook", wrapper=wrapped.number if wrapped else None, hook=name)
