"""`python -m instep` is the command `instep`."""

from __future__ import annotations

import sys

from instep.cli.main import main

sys.exit(main())
