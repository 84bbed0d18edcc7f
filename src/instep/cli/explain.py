"""`instep explain ID`: what a finding means, why it matters, what to do, when it is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict

from instep.cli.arguments import CommandParser
from instep.rulebook import Page, look_up, read_pages


def run(argv: list[str]) -> int:
    parser = CommandParser(
        "explain",
        "What a finding means, why it matters, what to do, and when it is wrong.\n"
        "ID stands in brackets after a finding, or after `instep explain` in an error; a family lists its findings.",
        "instep explain hang/collective-mismatch",
    )
    parser.add_argument("id", metavar="ID", nargs="?", help="a finding or a family; without it, all are listed")
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects (id, title, body)")
    options = parser.parse_args(argv)
    pages = look_up(options.id) if options.id else read_pages()
    if options.json:
        print(json.dumps([asdict(page) for page in pages], indent=1))
    else:
        print(describe(pages[0]) if options.id and len(pages) == 1 else list_titles(pages))
    return 0


def describe(page: Page) -> str:
    return f"{page.id}: {page.title}\n\n{page.body}"


def list_titles(pages: list[Page]) -> str:
    width = max((len(page.id) for page in pages), default=0)
    return "\n".join(f"{page.id:<{width}}  {page.title}" for page in pages)
