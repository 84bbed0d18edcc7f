"""Sleeping until a number in shared memory changes: Linux's futex, the call under its locks.

A rank that waits this way uses no core and is woken at once; where many processes share few cores, one that looks at the
number again and again, or naps in between, comes too late.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_SYSCALL = 202  # futex on x86_64
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def has_futex() -> bool:
    """On this processor a plain store is also seen after all stores before it, which other kinds do not promise."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32


class Futex:
    """address: of a 64-bit number, of which the low half is watched."""

    def __init__(self) -> None:
        self._call = ctypes.CDLL(None).syscall
        self._call.argtypes = (
            *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
            *(ctypes.POINTER(_Timespec), ctypes.c_void_p, ctypes.c_uint32),
        )
        self._call.restype = ctypes.c_long

    def wait(self, address: int, value: int, seconds: float) -> None:
        """Returns when the number is not `value`, was changed and woken, or the time is over; also for no reason."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._call(_SYSCALL, address, _WAIT, value & 0xFFFFFFFF, ctypes.byref(limit), None, 0)

    def wake(self, address: int) -> None:
        """Wakes all that wait for the number, which has to be changed before."""
        self._call(_SYSCALL, address, _WAKE, _ALL, None, None, 0)
