"""Writes what a rank can see of itself to $OUT<rank>, to be compared between launchers."""

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import warnings

MODULE_FACTS = {
    name: str(globals()[f"__{name}__"]).partition(" at 0x")[0] for name in ("name", "file", "doc", "package", "spec")
}


def look_around() -> dict:
    files = [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)]
    return {
        "module": MODULE_FACTS,
        "main": sorted(name for name in vars(sys.modules["__main__"]) if name.startswith("__")),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "cwd": os.getcwd(),
        "leads_its_session": os.getpgid(0) == os.getpid() == os.getsid(0),
        "signals": {s.name: str(signal.getsignal(s)) for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}},
        "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": signal.set_wakeup_fd(-1),
        "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.write_through, sys.stdout.name],
        "stderr": [sys.stderr.encoding, sys.stderr.errors, sys.stderr.write_through, sys.stderr.name],
        "stdin": files[0],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "threads": [thread.name for thread in threading.enumerate()],
        "deprecations_of_main": ("default", None, DeprecationWarning, "__main__", 0) in warnings.filters,
        "multiprocessing": [multiprocessing.get_start_method(True), str(multiprocessing.parent_process())],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "executable": sys.executable,
        "environment": dict(os.environ),
    }


def look_at_torch() -> dict:
    import torch

    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "grad": torch.is_grad_enabled(),
        "random": float(torch.rand(())),
    }


facts = look_around()
facts["torch"] = look_at_torch()
with open(os.environ["OUT"] + os.environ["RANK"], "w") as file:
    json.dump(facts, file)
