"""A command's argument parser: bad usage is one sentence, help ends with an example."""

from __future__ import annotations

import argparse
from typing import NoReturn

from instep.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """`run(argv)` of a command parses with it; a mistake raises UsageError instead of printing the whole usage."""

    def __init__(self, command: str, description: str, example: str) -> None:
        super().__init__(
            prog=f"instep {command}",
            description=description,
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.color = False  # Python 3.14 colours help; plain text reads well in a log too

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('instep ')}: {message}. See: {self.prog} --help")
