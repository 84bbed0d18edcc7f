"""Pages come from docstrings of rules and from pages/; `instep explain` prints them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from instep import rulebook
from instep.cli.explain import run
from instep.errors import UsageError

RULE = '''"""Ranks wait in different collectives.

## What it sees
They differ in kind.
"""
raise RuntimeError("a rule is read, never run, to explain it")
'''
HANGS = ["hang/collective-mismatch", "hang/rank-left-early"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("collective_mismatch", "rank_left_early"):
        path = tmp_path / rulebook.RULES / "hang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RULE)
    (path.parent / "__init__.py").write_text("")
    page = tmp_path / rulebook.PAGES / "startup" / "port-in-use.md"
    page.parent.mkdir(parents=True)
    page.write_text("# The port is taken.\n\n## What to do\nTake another.\n")
    return tmp_path


def test_finds_rules_and_pages_by_id(package: Path) -> None:
    assert list(rulebook.find_pages(package)) == [
        "hang/collective-mismatch",
        "hang/rank-left-early",
        "startup/port-in-use",
    ]


def test_reads_a_rule_without_running_it(package: Path) -> None:
    [page] = rulebook.look_up("hang/collective-mismatch", package)
    assert page.title == "Ranks wait in different collectives."
    assert page.body == "## What it sees\nThey differ in kind."
    assert page.family == "hang"


def test_reads_a_page(package: Path) -> None:
    [page] = rulebook.look_up("startup/port-in-use", package)
    assert (page.title, page.body) == ("The port is taken.", "## What to do\nTake another.")


@pytest.mark.parametrize("word", ["rank-left-early", "hang/rank_left_early", "[hang/rank-left-early]"])
def test_understands_what_people_paste(package: Path, word: str) -> None:
    assert [page.id for page in rulebook.look_up(word, package)] == ["hang/rank-left-early"]


def test_a_family_gives_all_its_pages(package: Path) -> None:
    assert [page.id for page in rulebook.look_up("hang", package)] == [
        "hang/collective-mismatch",
        "hang/rank-left-early",
    ]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("hang/rank-left", "there is no finding 'hang/rank-left'. Nearest: hang/rank-left-early."),
        ("port-used", "there is no finding 'port-used'. Nearest: startup/port-in-use."),
        ("xyz", "there is no finding 'xyz'. Families: hang, startup."),
    ],
)
def test_an_unknown_id_is_answered_with_the_nearest(package: Path, word: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        rulebook.look_up(word, package)
    assert str(caught.value) == f"{sentence} All of them: instep explain"


def test_a_rule_without_docstring_is_named(package: Path) -> None:
    path = package / rulebook.RULES / "hang" / "silent.py"
    path.write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"silent\.py has no docstring to explain it"):
        rulebook.read_pages(package)


def test_every_page_of_this_version_answers_the_four_questions() -> None:
    for page in rulebook.read_pages():
        headings = re.findall(r"^## (.+)$", page.body, flags=re.MULTILINE)
        assert headings == ["What it sees", "Why it matters", "What to do", "When it is wrong"], page.id
        assert page.title.endswith("."), page.id


def test_every_id_that_an_error_refers_to_has_a_page() -> None:
    ids = rulebook.find_pages()
    for path in rulebook.PACKAGE.rglob("*.py"):
        for name in re.findall(r"instep explain ([a-z]+/[a-z-]+)", path.read_text(encoding="utf-8")):
            if path.name != "explain.py":
                assert name in ids, f"{path}: no page for {name}"


def test_command_prints_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["startup/batch-does-not-fit"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "startup/batch-does-not-fit: The global batch cannot be shared among the ranks.\n\n## What it sees"
    )


def test_command_lists_all_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(rulebook.find_pages())


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--json", "batch-does-not-fit"]) == 0
    [page] = json.loads(capsys.readouterr().out)
    assert page["id"] == "startup/batch-does-not-fit"
