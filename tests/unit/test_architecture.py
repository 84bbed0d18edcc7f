"""Who may import whom, and which parts stay without torch. A failure names the file and line of the import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "instep"

# A part may import itself and the parts of lower levels; peers of one level meet in cli or in files.
LEVELS = {
    "errors": 0, "units": 0, "settings": 0, "overrides": 0, "rulebook": 0,
    "records": 1,
    "machine": 2,
    "train": 3, "launch": 3, "diagnose": 3, "plan": 3, "lint": 3, "report": 3,
    "verify": 4, "tune": 4,
    "cli": 5,
    "__init__": 6, "__main__": 6,
}  # fmt: skip
GROUND = ("errors", "units", "settings", "overrides", "rulebook")  # these few may import each other, without cycles
HIGH_PEERS = {"verify": ("launch",), "tune": ("plan", "launch")}  # all of level 3 that they may import
# The public module hands out names of these on first use.
PUBLIC = ("errors", "records", "train")

# Where torch may be imported: training, and what runs inside ranks, the zygote, the agent or a probe of the machine.
WITH_TORCH = (
    "train/",
    "verify/record/",
    "plan/model_facts.py",
    "launch/agent.py",
    "launch/numa.py",  # loaded in ranks
    "launch/profile_steps.py",  # loaded in ranks
    "launch/store_host.py",
    "launch/worker_entry.py",
    "launch/worker_group.py",
    "launch/zygote.py",
    "launch/probe/",
    "machine/probe/",
)
FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "base", "manager", "helpers"}


@dataclass(frozen=True)
class Import:
    file: str
    line: int
    module: str
    at_top: bool

    def __str__(self) -> str:
        return f"src/instep/{self.file}:{self.line} imports {self.module}"


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import of a file, those inside functions too; those for the type checker alone are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    package = ("instep", *path.relative_to(root).with_suffix("").parts[:-1])
    skipped = {id(node) for block in ast.walk(tree) if is_type_checking(block) for node in ast.walk(block)}
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for module in modules_named_by(node, package):
            yield Import(str(path.relative_to(root)), node.lineno, module, id(node) not in inside)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def modules_named_by(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
    module = ".".join(part for part in (base, node.module) if part)
    return [f"{module}.{alias.name}" for alias in node.names] if module.startswith("instep") else [module]


@cache
def all_imports(root: Path = SOURCE) -> list[Import]:
    return [found for path in sorted(root.rglob("*.py")) for found in imports_of(path, root)]


def part_of(file: str) -> str:
    first = Path(file).parts[0]
    return first.removesuffix(".py")


def part_of_module(module: str) -> str:
    """The part an import of ours names; `from instep import errors` names errors, `from instep import Run` the root."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVELS else "__init__"


def complaint(found: Import) -> str | None:
    """Why this import goes the wrong way, or None."""
    if found.module.split(".")[0] != "instep":
        return None
    source, target = part_of(found.file), part_of_module(found.module)
    if source == target or source in ("cli", "__main__"):
        return None
    if source == "__init__":
        return None if target in PUBLIC else f"{found}: the public module hands out {', '.join(PUBLIC)} only"
    if found.module == "instep.__version__":  # defined there
        return None
    if target == "__init__":
        return f"{found}: parts import the module that defines a name, not the public one"
    if source in GROUND and target in GROUND:
        return None
    if source in HIGH_PEERS and LEVELS[target] == 3 and target not in HIGH_PEERS[source]:
        return f"{found}: {source} may use {', '.join(HIGH_PEERS[source])} of the parts beside it"
    if LEVELS[target] < LEVELS[source]:
        return None
    return f"{found}: {source} (level {LEVELS[source]}) may import lower levels only, {target} is at {LEVELS[target]}"


def needs_torch(module: str) -> bool:
    return module.split(".")[0] in ("torch", "torchvision", "transformers", "accelerate")


def may_use_torch(file: str) -> bool:
    return file.startswith(WITH_TORCH)


def test_every_part_has_a_level() -> None:
    parts = {path.stem if path.is_file() else path.name for path in SOURCE.iterdir() if is_code(path)}
    assert parts <= LEVELS.keys(), f"give {parts - LEVELS.keys()} a level in this file"


def is_code(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and any(path.glob("**/*.py")))


def test_imports_point_downwards() -> None:
    complaints = [text for found in all_imports() if (text := complaint(found))]
    assert not complaints, "\n" + "\n".join(complaints)


def test_torch_stays_in_training_and_in_ranks() -> None:
    wrong = [f"{found}: this part has to work without torch" for found in all_imports()
             if needs_torch(found.module) and not may_use_torch(found.file)
             and not (part_of(found.file) == "cli" and not found.at_top)]  # fmt: skip
    assert not wrong, "\n" + "\n".join(wrong)


def test_torch_free_parts_do_not_import_parts_with_torch() -> None:
    wrong = [
        f"{found}: it imports torch, and this part has to work without"
        for found in all_imports()
        if found.at_top and not may_use_torch(found.file) and part_of(found.file) != "__init__"
        if any(may_use_torch(name) for name in files_named_by(found.module))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def files_named_by(module: str) -> list[str]:
    """`instep.train.slots.plan_slots` and the file that it is in, as path texts below src/instep."""
    parts = module.split(".")[1:]
    if module.split(".")[0] != "instep":
        return []
    for end in range(len(parts), 0, -1):
        stem = SOURCE.joinpath(*parts[:end])
        if stem.with_suffix(".py").is_file():
            file = str(stem.with_suffix(".py").relative_to(SOURCE))
            return [file] if file not in torch_free_files() else []
    return []


@cache
def torch_free_files() -> set[str]:
    """Files below a folder with torch that import none of it, directly or through each other."""
    graph = top_level_graph()
    tainted = {found.file for found in all_imports() if found.at_top and needs_torch(found.module)}
    while more := {file for file, targets in graph.items() if file not in tainted and targets & tainted}:
        tainted |= more
    return set(graph) - tainted


def top_level_graph(root: Path = SOURCE) -> dict[str, set[str]]:
    """Which files a file imports when it is imported."""
    files = {str(path.relative_to(root)) for path in root.rglob("*.py")}
    graph: dict[str, set[str]] = {file: set() for file in files}
    for found in all_imports(root):
        parts = found.module.split(".")
        if found.at_top and parts[0] == "instep":
            ends = ("/".join(parts[1:end]) + ".py" for end in range(len(parts), 1, -1))
            graph[found.file] |= {next((file for file in ends if file in files), found.file)} - {found.file}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(file: str, path: list[str]) -> list[str]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file in done:
            return []
        for target in sorted(graph[file]):
            if cycle := visit(target, [*path, file]):
                return cycle
        done.add(file)
        return []

    return next((cycle for file in sorted(graph) if (cycle := visit(file, []))), [])


def test_there_are_no_import_cycles() -> None:
    cycle = find_cycle(top_level_graph())
    assert not cycle, " -> ".join(cycle)


def test_modules_are_named_after_an_idea() -> None:
    named = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*") if path.stem.lstrip("_") in FORBIDDEN_NAMES]
    assert not named, f"{named}: say what the module is for"


def test_variables_of_instep_are_read_in_one_place() -> None:
    """Only settings.py reads INSTEP_*; the environment of ranks is written in launch/."""
    wrong = [f"src/instep/{path.relative_to(SOURCE)}:{line}: {text.strip()}" for path in SOURCE.rglob("*.py")
             if part_of(str(path.relative_to(SOURCE))) not in ("settings", "launch")
             for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
             if "environ" in text and "INSTEP_" in text]  # fmt: skip
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "diagnose/engine.py",
            "from instep.launch.watch import look",
            "diagnose (level 3) may import lower levels only",
        ),
        ("records/finding.py", "import instep.machine.host", "records (level 1) may import lower levels only"),
        ("verify/compare.py", "from instep.train.run import Run", "verify may use launch of the parts beside it"),
        ("train/run.py", "def f():\n    from instep import cli", "train (level 3) may import lower levels only"),
        ("train/run.py", "from instep import UsageError", "import the module that defines a name"),
        ("train/data/loader.py", "from ...launch import watch", "train (level 3) may import lower levels only"),
        ("diagnose/engine.py", "from instep.records import finding", None),
        ("tune/search.py", "from instep.launch.watch import look", None),
    ],
)
def test_an_import_the_wrong_way_is_named(tmp_path: Path, file: str, text: str, expected: str | None) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    complaints = [said for found in imports_of(path, tmp_path) if (said := complaint(found))]
    if expected is None:
        assert complaints == []
    else:
        assert len(complaints) == 1
        assert f"src/instep/{file}:{len(text.splitlines())} imports" in complaints[0]
        assert expected in complaints[0]


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_no_module_name_hides_one_of_python() -> None:
    hidden = {path.stem for path in SOURCE.glob("*.py")} & set(sys.stdlib_module_names) - {"__main__"}
    assert not hidden
