"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

PATIENCE_S = 60.0


def wait_until(
    condition: Callable[[], object], what: str = "", patience_s: float = PATIENCE_S
) -> None:
    """Return as soon as a condition holds.

    what: the condition in words, for the failure after ``patience_s``.
    """
    end_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end_s:
            pytest.fail(f"not within {patience_s:g} s: {what or 'the condition holds'}")
        time.sleep(0.005)
