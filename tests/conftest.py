"""Every test leaves this process as it found it: variables, threads, child processes, the process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leaks import leaks_since, look_around


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    before = look_around()
    yield
    leaks = leaks_since(before)
    if leaks:
        pytest.fail("this test left behind: " + "; ".join(leaks), pytrace=False)
