"""Memory of a killed node, one file of it damaged, beside an engine that still writes to it.

The next node takes it over, or makes new memory. Either way it serves right bytes only.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.node.damaging import DAMAGES, files_of, survive

OUTCOMES = frozenset({"taken over", "new"})
INPUTS = 3
"""A case starts two nodes."""


def attempt(rng: random.Random, folder: Path) -> str:
    def damage(directory: Path) -> None:
        path = rng.choice(files_of(directory))
        rng.choice(DAMAGES)(path, rng)

    return "taken over" if survive(folder, damage) else "new"
