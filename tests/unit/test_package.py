"""What `import instep` gives and costs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import instep

SOURCE = Path(instep.__file__).parent
PUBLIC_NAMES = ["CheckpointError", "InstepError", "Parallel", "RanksDisagree", "Run", "UsageError", "__version__"]
# A goal of the package: at most 0.15 s more than `import torch`. Without torch it is a few milliseconds.
IMPORT_SECONDS = 0.15

PROBE = """
import json, sys, time
before = set(sys.modules)
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "modules": sorted(set(sys.modules) - before)}}))
"""


def probe_import(module: str) -> dict[str, object]:
    """Imports it in a fresh interpreter: how long that took and what came along."""
    command = [sys.executable, "-c", PROBE.format(module=module)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


def test_public_names_are_these() -> None:
    assert sorted(instep.__all__) == PUBLIC_NAMES
    assert dir(instep) == PUBLIC_NAMES


def test_import_is_quick_and_does_not_import_torch() -> None:
    best = min((probe_import("instep") for _ in range(3)), key=lambda result: float(str(result["seconds"])))
    modules = best["modules"]
    assert isinstance(modules, list)
    assert not {"torch", "numpy", "rich", "psutil"} & set(modules)
    assert float(str(best["seconds"])) < IMPORT_SECONDS


@pytest.mark.parametrize("module", ["instep.cli.main", "instep.cli.explain", "instep.cli.settings"])
def test_commands_start_without_torch(module: str) -> None:
    modules = probe_import(module)["modules"]
    assert isinstance(modules, list)
    assert "torch" not in modules


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    with pytest.raises(AttributeError, match=r"module 'instep' has no attribute 'Trainer'; it has .*\bRun\b"):
        _ = instep.Trainer


def test_errors_are_the_documented_types() -> None:
    assert issubclass(instep.UsageError, (instep.InstepError, ValueError))
    assert issubclass(instep.CheckpointError, RuntimeError)
    assert issubclass(instep.RanksDisagree, RuntimeError)
    assert instep.UsageError("").exit_code == 2


def test_the_package_says_that_it_is_typed() -> None:
    assert (SOURCE / "py.typed").is_file()


def test_what_is_imported_is_declared() -> None:
    """Other packages that the source imports are dependencies; those of extras are imported when asked for."""
    project = (SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    required = names_of(project.split("dependencies = [", 1)[1].split("\n]", 1)[0])
    optional = names_of(project.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0])
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        lazily = {id(node) for outer in ast.walk(tree) if isinstance(outer, LAZY) for node in ast.walk(outer)}
        for node in ast.walk(tree):
            for name in roots_of(node) - sys.stdlib_module_names - {"instep", *required}:
                assert name in optional and id(node) in lazily, f"{path}:{getattr(node, 'lineno', 0)} imports {name}"


LAZY = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try, ast.If)
MODULES = {"scikit-learn": "sklearn", "mlflow-skinny": "mlflow", "pyyaml": "yaml"}


def names_of(requirements: str) -> set[str]:
    found = re.findall(r'"([A-Za-z0-9-]+)', requirements)
    return {MODULES.get(name.lower(), name.lower().replace("-", "_")) for name in found}


def roots_of(node: ast.AST) -> set[str]:
    """First parts of the modules that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.split(".")[0]}
    return set()


def test_source_is_written_for_python_3_10() -> None:
    for path in SOURCE.rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))
