"""Putting a recorder's wrapper in the place of a function of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replace(owners: tuple[Any, ...], name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """One wrapper for `name` in all owners that have it. A version of torch without the name is left as it is."""
    original = next((found for owner in owners if (found := getattr(owner, name, None)) is not None), None)
    if original is None:
        return
    wrapper = functools.wraps(original)(wrap(original))
    for owner in owners:
        if hasattr(owner, name):
            setattr(owner, name, wrapper)
