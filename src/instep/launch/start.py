"""Runs a module of the launcher by this file's path: `python start.py zygote ...`.

`python -m` would look into the current folder first, where a `torch` or a `json.py` of the user's may lie; what is in the
folder of the script is the rank's own matter, later.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

START_FILE = os.path.abspath(__file__)


def main() -> None:
    here = os.path.dirname(START_FILE)
    if sys.path and os.path.abspath(sys.path[0]) == here:
        sys.path.pop(0)
    root = os.path.dirname(os.path.dirname(here))
    sys.path.append(root)
    module = import_module(f"instep.launch.{sys.argv[1]}")
    sys.path.pop()
    del sys.argv[0]
    module.main()


if __name__ == "__main__":
    main()
