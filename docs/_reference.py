"""Pages of the reference that are made from the code when the docs are built: commands, settings, findings.

Also fills the places of the navigation that end in `*` with the pages of that folder.
"""

from __future__ import annotations

import contextlib
import io
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from instep.cli.main import COMMANDS, existing_commands
from instep.rulebook import Page, read_pages
from instep.settings import ROWS, Row

DOCS = Path(__file__).parent


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = fill(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, content in make_pages().items():
        files.append(File.generated(config, name, content=content))
    return files


def fill(item: Any) -> Any:
    """The navigation with `folder/*` replaced by the pages of the folder."""
    if isinstance(item, list):
        return [fill(entry) for entry in item]
    if isinstance(item, dict):
        return {title: fill(entry) for title, entry in item.items()}
    if not item.endswith("/*"):
        return item
    folder = item.removesuffix("*")
    written = [f"{folder}{path.name}" for path in (DOCS / folder).glob("*.md")]
    made = [name for name in make_pages() if name.startswith(folder)]
    return sorted({*written, *made}, key=lambda name: (not name.endswith("index.md"), name))


def make_pages() -> dict[str, str]:
    """Generated pages by their place below docs/."""
    pages = read_pages()
    made = {f"reference/findings/{page.id}.md": write_finding(page) for page in pages}
    made["reference/findings/index.md"] = write_findings_index(pages)
    made["reference/commands.md"] = write_commands()
    made["reference/settings.md"] = write_settings()
    return made


def write_finding(page: Page) -> str:
    return f"# {page.id}\n\n**{page.title}**\n\n{page.body}\n"


def write_findings_index(pages: list[Page]) -> str:
    lines = ["# Findings", "", "One page for each finding of `instep run` and `instep diagnose`, and for the mistakes",
             "that errors refer to. `instep explain ID` prints the same text.", ""]  # fmt: skip
    for family in sorted({page.family for page in pages}):
        lines += [f"## {family}", "", "| finding | what it is |", "|---|---|"]
        lines += [f"| [{page.id}]({page.id}.md) | {page.title} |" for page in pages if page.family == family]
        lines.append("")
    return "\n".join(lines)


def write_commands() -> str:
    lines = ["# Commands", "", "Exit code 0 on success, 2 on bad usage with one sentence on stderr.", ""]
    for name in existing_commands():
        lines += [f"## instep {name}", "", COMMANDS[name] + ".", "", "```text", read_help(name), "```", ""]
    return "\n".join(lines)


def read_help(name: str) -> str:
    """What `instep NAME --help` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        import_module(f"instep.cli.{name}").run(["--help"])
    return out.getvalue().strip()


def write_settings() -> str:
    lines = ["# Settings", "", "An argument beats the variable, which beats `[tool.instep]` of the nearest pyproject.toml,",
             "which beats the default. `instep settings` shows each value and where it came from.", "",
             "| setting | meaning | option | variable | `[tool.instep]` | default |", "|---|---|---|---|---|---|"]  # fmt: skip
    return "\n".join([*lines, *map(write_row, ROWS)]) + "\n"


def write_row(row: Row) -> str:
    key = f"`{row.key}`" if row.key else "not there"
    option = f"`{row.option}`" if row.option else "none"
    return f"| {row.name} | {row.meaning} | {option} | `{row.variable}` | {key} | `{row.default}` |"
