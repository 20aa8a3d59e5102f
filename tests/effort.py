"""How much of the long tests is run: all of it, unless ``KVTIER_EFFORT`` says for example 0.1."""

from __future__ import annotations

import os

EFFORT = float(os.environ.get("KVTIER_EFFORT", "1"))


def effort(num: int, step: int = 1) -> int:
    """So many of ``num`` turns, in whole steps."""
    return max(step, int(num * EFFORT) // step * step)
