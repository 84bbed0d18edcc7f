"""`instep settings`: every setting, its value, and where it came from."""

from __future__ import annotations

import json
import os

from instep.cli.arguments import CommandParser
from instep.settings import ROWS, Setting, read_all, unknown_variables


def run(argv: list[str]) -> int:
    parser = CommandParser(
        "settings",
        "Every setting of instep, its value, and where it came from.\n"
        "An option beats the variable, which beats [tool.instep] of the nearest pyproject.toml,\n"
        "which beats the default.",
        "INSTEP_STALL_AFTER=60 instep settings",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    options = parser.parse_args(argv)
    settings = read_all()
    if options.json:
        print(json.dumps([as_json(setting) for setting in settings], indent=1))
    else:
        print("\n".join(describe(settings, unknown_variables(os.environ))))
    return 0


def as_json(setting: Setting) -> dict[str, object]:
    row = setting.row
    return {
        "name": row.name,
        "value": setting.value,
        "source": setting.source,
        "default": row.default,
        "variable": row.variable,
        "key": row.key,
        "option": row.option,
        "meaning": row.meaning,
    }


def describe(settings: list[Setting], unknown: list[str]) -> list[str]:
    lines: list[str] = []
    for setting in settings:
        row = setting.row
        places = [place for place in (row.option, row.variable, row.key and f"[tool.instep] {row.key}") if place]
        lines.append(f"{row.name} = {json.dumps(setting.value)}  (from: {setting.source})")
        lines.append(f"    {row.meaning}")
        lines.append(f"    set it with {', '.join(places)}; default {json.dumps(row.default)}")
    variables = ", ".join(row.variable for row in ROWS)
    lines += [f"{name} is set, but no setting reads it; those that exist: {variables}" for name in unknown]
    return lines
