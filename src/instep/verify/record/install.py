"""Puts the recorders into this rank, before the program of the user begins."""

from __future__ import annotations

import os
import random

import torch

from instep.verify.record.forwards import record_forwards
from instep.verify.record.gradients import record_gradients
from instep.verify.record.loading import record_loading
from instep.verify.record.options import Options
from instep.verify.record.pieces import record_pieces
from instep.verify.record.state import Recording
from instep.verify.record.traffic import record_traffic
from instep.verify.record.updates import record_updates


def install(options: Options) -> Recording:
    recording = Recording(options)
    recording.note("start", rank=recording.rank, world_size=recording.world_size, pid=os.getpid())
    calls = record_forwards(recording)
    scaling = record_gradients(recording, calls)
    record_pieces()
    record_loading(recording)
    record_traffic(recording)
    record_updates(recording, scaling)
    _seed(recording.rank)
    return recording


def _seed(rank: int) -> None:
    """Scripts that do not seed would differ between any two runs. Ranks still differ, as unseeded ones do."""
    random.seed(rank)
    torch.manual_seed(rank)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(rank)
