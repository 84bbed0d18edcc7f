"""Runs a script or a module in this process exactly as `python script.py` and `python -m module` would.

A fresh `__main__` module takes the place of ours, `sys.argv`, `sys.path[0]` and `sys.orig_argv` are what Python would
have set. What ends the program goes up to the caller: a normal return, SystemExit or another exception.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from typing import Any

from instep.records.launch_spec import Program


def run_program(program: Program) -> None:
    """Comes back when the program ends by itself; its exceptions pass through, with this file's frames on top."""
    sys.orig_argv = [sys.executable, "-u", *_python_arguments(program)]
    if program.kind == "module":
        _enter(["-m", *program.args], os.getcwd())
        _make_main(None)
        runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]  # what `python -m` itself calls
    elif os.path.isdir(program.target) or _is_archive(program.target):
        _enter([program.target, *program.args], program.target)
        _make_main(None)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # what `python folder` calls
    else:
        _run_file(program)


def _python_arguments(program: Program) -> list[str]:
    return [*(["-m"] if program.kind == "module" else []), program.target, *program.args]


def _run_file(program: Program) -> None:
    path = program.target
    _enter([path, *program.args], os.path.dirname(os.path.realpath(path)))
    full = os.path.abspath(path)
    try:
        code = _read_code(full)
    except OSError as error:
        # The words of the interpreter, which names itself and the absolute path.
        sys.exit(_cannot_open(full, error))
    main = _make_main(full)
    exec(code, main.__dict__)


def _cannot_open(path: str, error: OSError) -> int:
    print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
    return 2


def _enter(argv: list[str], first_path: str) -> None:
    sys.argv[:] = argv
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, first_path)


def _make_main(path: str | None) -> types.ModuleType:
    main = types.ModuleType("__main__")
    names: dict[str, Any] = {"__builtins__": sys.modules["builtins"]}
    if sys.version_info < (3, 14):  # since then annotations are made when they are asked for
        names["__annotations__"] = {}
    if path is not None:
        loader = (
            importlib.machinery.SourcelessFileLoader if path.endswith(".pyc") else importlib.machinery.SourceFileLoader
        )
        names |= {"__file__": path, "__cached__": None, "__loader__": loader("__main__", path)}
    main.__dict__.update(names)
    sys.modules["__main__"] = main
    return main


def _read_code(path: str) -> types.CodeType:
    with io.open_code(path) as file:
        code = pkgutil.read_code(file) if path.endswith(".pyc") else None
    if code is not None:
        return code
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _is_archive(path: str) -> bool:
    return os.path.isfile(path) and not path.endswith(".py") and pkgutil.get_importer(path) is not None
