"""`python -m instep.verify.record OPTIONS (SCRIPT | -m MODULE) [arguments]`: a rank of `instep verify`."""

from __future__ import annotations

import os
import sys

from instep.launch.run_program import run_program
from instep.records.launch_spec import Program
from instep.verify.record.install import install
from instep.verify.record.options import Options


def main() -> None:
    _, options, *words = sys.argv
    is_module = words[0] == "-m"
    program = Program("module", words[1], tuple(words[2:])) if is_module else Program("script", words[0], (*words[1:],))
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path.pop(0)  # the place of `-m` for this module; the program gets its own
    recording = install(Options.from_text(options))
    try:
        run_program(program)
    except BaseException as error:
        recording.close(error)
        raise
    recording.close(None)


main()
