"""Recorded runs: each ill one gives the finding of its folder, with the line to change; healthy ones give none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from instep.diagnose.engine import diagnose, find_rules

CASES = Path(__file__).parents[2] / "cases"
RECORDED = sorted(path.parent for path in CASES.glob("*/*/run.tar.xz"))
ILL = [path for path in RECORDED if path.parent.name != "healthy"]
HEALTHY = [path for path in RECORDED if path.parent.name == "healthy"]


def load_recording() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recording", CASES / "recording.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(case: Path) -> str:
    return f"{case.parent.name}/{case.name}"


@pytest.mark.parametrize("case", ILL, ids=name_of)
def test_names_the_fault_and_the_line(case: Path, tmp_path: Path) -> None:
    load_recording().unpack(case, tmp_path)
    expected = json.loads((case / "expected.json").read_text())
    findings = diagnose(tmp_path)
    first = findings[0]
    assert first.id == f"{case.parent.name}/{case.name}".replace("_", "-")
    assert list(first.ranks) == expected["ranks"]
    assert first.where is not None and expected["line"] in first.where.source
    assert first.evidence and first.fix and first.cause
    assert [one.id for one in findings[1:]] == expected.get("also", [])


@pytest.mark.parametrize("case", HEALTHY, ids=name_of)
def test_says_nothing_of_a_healthy_run(case: Path, tmp_path: Path) -> None:
    load_recording().unpack(case, tmp_path)
    assert diagnose(tmp_path) == []


def test_there_are_cases_of_both_kinds() -> None:
    assert len(ILL) >= 10 and len(HEALTHY) >= 5


def test_rules_are_found_by_walking_the_folder() -> None:
    rules = find_rules()
    assert {"hang/uneven-batches", "numbers/silent-pairing", "crash/unused-parameters"} <= set(rules)
    folder = Path(__file__).parents[3] / "src/instep/diagnose/rules"
    files = [path for path in folder.glob("*/*.py") if path.name != "__init__.py"]
    assert len(rules) == len(files)
