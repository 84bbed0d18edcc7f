"""What `instep explain` and the reference know: a page for each finding, and for each mistake an error refers to.

A finding's page is the docstring of its rule, diagnose/rules/<family>/<rule>.py, read from the source without running
it. A page that has no rule is pages/<family>/<name>.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from instep.errors import UsageError

PACKAGE = Path(__file__).parent
RULES = "diagnose/rules"
PAGES = "pages"


@dataclass(frozen=True)
class Page:
    """id: family/name; title: one sentence; body: Markdown, its sections headed by `##`."""

    id: str
    title: str
    body: str

    @property
    def family(self) -> str:
        return self.id.split("/")[0]


def find_pages(package: Path = PACKAGE) -> dict[str, Path]:
    """The file of every page by its id, in the order of ids."""
    rules = (path for path in package.glob(f"{RULES}/*/*.py") if not path.name.startswith("_"))
    pages = package.glob(f"{PAGES}/*/*.md")
    return dict(sorted((page_id(path), path) for path in (*rules, *pages)))


def page_id(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}".replace("_", "-")


def read_page(path: Path) -> Page:
    """Raises ValueError for a rule without a docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    if not text.strip():
        raise ValueError(f"{path} has no docstring to explain it")
    title, _, body = text.strip().partition("\n")
    return Page(page_id(path), title.removeprefix("# ").strip(), body.strip())


def read_pages(package: Path = PACKAGE) -> list[Page]:
    return [read_page(path) for path in find_pages(package).values()]


def look_up(word: str, package: Path = PACKAGE) -> list[Page]:
    """The page of an id or of a name without its family, or all pages of a family.

    Raises UsageError with the nearest ids when there is none.
    """
    paths = find_pages(package)
    wanted = word.strip().strip("[]").replace("_", "-").lower()
    found = [wanted] if wanted in paths else [name for name in paths if wanted in name.split("/")]
    if not found:
        raise UsageError(f"there is no finding {word!r}. {near_ids(wanted, paths)} All of them: instep explain")
    return [read_page(paths[name]) for name in found]


def near_ids(word: str, ids: Iterable[str]) -> str:
    """Ids like the word, compared whole and by the part after the family."""
    names = list(ids)
    by_part = {name.split("/")[1]: name for name in names}
    close = get_close_matches(word, names, n=3, cutoff=0.5)
    close += [by_part[part] for part in get_close_matches(word.split("/")[-1], by_part, n=3, cutoff=0.5)]
    return f"Nearest: {', '.join(dict.fromkeys(close))}." if close else f"Families: {', '.join(families(names))}."


def families(ids: Iterable[str]) -> list[str]:
    return sorted({name.split("/")[0] for name in ids})
