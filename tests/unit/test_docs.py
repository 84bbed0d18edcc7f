"""What the documentation says can be followed: links lead somewhere, code is Python, settings and commands exist."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from instep.cli.main import COMMANDS
from instep.errors import UsageError
from instep.overrides import read_override
from instep.rulebook import find_pages
from instep.settings import ROWS

ROOT = Path(__file__).parents[2]
TEXTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
GENERATED = ("reference/commands.md", "reference/settings.md", "reference/findings/")
NAMES = [str(path.relative_to(ROOT)) for path in TEXTS]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files(name: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", without_code(read(name)))
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path = (ROOT / name).parent / target
        made = str(path.resolve()).removeprefix(f"{(ROOT / 'docs').resolve()}/")
        assert path.exists() or made.startswith(GENERATED), f"{name} links to {target}, which is not there"


@pytest.mark.parametrize("name", NAMES)
def test_python_in_texts_is_python(name: str) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", read(name), flags=re.DOTALL | re.MULTILINE):
        ast.parse(textwrap.dedent(block))


@pytest.mark.parametrize("name", NAMES)
def test_after_a_diff_the_code_is_python(name: str) -> None:
    """Both sides of a diff: what is taken away and what is put there."""
    for block in re.findall(r"^```diff\n(.*?)^```", read(name), flags=re.DOTALL | re.MULTILINE):
        for dropped in "+-":
            lines = [line[1:] for line in block.splitlines() if not line.startswith(dropped)]
            ast.parse(textwrap.dedent("\n".join(lines)))


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_settings_in_texts_exist(name: str) -> None:
    text = read(name)
    variables = {row.variable for row in ROWS}
    assert set(re.findall(r"\bINSTEP_[A-Z_]+\b", text)) <= variables
    for command in re.findall(r"(?:^\$ |`)instep ([a-z]+)\b", text, flags=re.MULTILINE):
        assert command in COMMANDS, f"{name} speaks of `instep {command}`"
    for argument, value in re.findall(r"--set ([a-z_]+)=(\w+)", text):
        try:
            read_override(argument, value)
        except UsageError as error:
            assert value == "value", str(error)


@pytest.mark.parametrize("name", NAMES)
def test_findings_in_texts_exist(name: str) -> None:
    for finding in re.findall(
        r"\[((?:startup|crash|hang|numbers|nonfinite|memory|speed|storage)/[a-z-]+)\]", read(name)
    ):
        assert finding in find_pages(), f"{name} shows the finding {finding}"


def test_readmes_have_the_same_shape() -> None:
    """The Chinese README has the headings, code and tables of the English one, line by line equal where it is code."""
    english, chinese = read("README.md"), read("README.zh-CN.md")
    for pattern in (r"^#+ ", r"^\|", r"^- "):
        count = len(re.findall(pattern, without_code(english), flags=re.MULTILINE))
        assert len(re.findall(pattern, without_code(chinese), flags=re.MULTILINE)) == count, pattern
    blocks = r"^```.*?^```"
    assert code_lines(re.findall(blocks, chinese, flags=re.DOTALL | re.MULTILINE)) == code_lines(
        re.findall(blocks, english, flags=re.DOTALL | re.MULTILINE)
    )


def code_lines(blocks: list[str]) -> list[list[str]]:
    """Lines of code blocks, comments left out: those are translated."""
    return [[re.sub(r"\s*#.*", "", line) for line in block.splitlines()] for block in blocks]


def test_first_thirty_lines_of_the_readme_show_it() -> None:
    head = "\n".join(read("README.md").splitlines()[:30])
    assert "```diff" in head
    assert "instep run -n " in head
    assert "  more  instep explain " in head
    assert re.search(r"^(?:certain|likely|possible): .*\[[a-z]+/[a-z-]+\]$", head, flags=re.MULTILINE)
