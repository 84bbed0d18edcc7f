"""A device with a queue of its own, for machines without one: kernels take their time there while the host goes on, and
`.item()` waits for them, and warns of it as CUDA does when it is told to."""

import time
import warnings

import torch

_busy_until = 0.0
_mode = 0


def launch(seconds):
    global _busy_until
    _busy_until = max(_busy_until, time.monotonic()) + seconds


def _set_mode(mode):
    global _mode
    _mode = mode


def pretend():
    read = torch.Tensor.item

    def item(tensor):
        if _mode:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        time.sleep(max(0.0, _busy_until - time.monotonic()))
        return read(tensor)

    torch.Tensor.item = item
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.is_initialized = lambda: True
    torch.cuda.get_sync_debug_mode = lambda: _mode
    torch.cuda.set_sync_debug_mode = _set_mode
