"""What instep raises.

InstepError              everything of ours
 +- UsageError           an argument or a call that cannot work; the text says what would (a ValueError too)
 +- CheckpointError      a checkpoint that is missing, damaged, foreign or of another shape (a RuntimeError too)
 +- RanksDisagree        the ranks came with different models, arguments or calls (a RuntimeError too)

Under `instep run` an error of this tree is printed as its text and one line of the user's code, without a
traceback, and the rank exits with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InstepError(Exception):
    exit_code = 1


class UsageError(InstepError, ValueError):
    exit_code = 2


class CheckpointError(InstepError, RuntimeError):
    exit_code = 1


class RanksDisagree(InstepError, RuntimeError):
    exit_code = 2


def nearest(word: str, allowed: Iterable[str], most: int = 3) -> str:
    """A sentence for the end of an error: the allowed names that look like `word`, or all of them."""
    names = list(allowed)
    close = get_close_matches(word, names, n=most, cutoff=0.5)
    return f"Nearest: {', '.join(close)}." if close else f"Allowed: {', '.join(names)}."
