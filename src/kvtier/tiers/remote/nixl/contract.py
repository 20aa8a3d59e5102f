"""Behaviour that a NIXL plug-in must show before it may store blocks.

Some versions report a failed or truncated read as done and leave the previous content in memory;
some report the error for another transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Final

import numpy as np

from kvtier.tiers.disk.bounce import ALIGNMENT
from kvtier.tiers.remote.bounce_workers import BounceRows
from kvtier.tiers.remote.envelope import HEADER_BYTES
from kvtier.tiers.remote.errors import Unreachable, Unsound
from kvtier.tiers.remote.nixl.agent import READ, WRITE, Agent, Place

NUM_PAGES: Final = 8
VALUE_BYTES: Final = 2 * ALIGNMENT
LONGER_BYTES: Final = 4 * ALIGNMENT


def check_contract(make_agent: Callable[[BounceRows], Agent], probe: Place) -> str:
    """Check a plug-in. Return its name and version.

    Raises ``Unsound`` if a read that must fail is reported as done, ``Unreachable`` if nothing can
    be written now.

    probe: an empty file that may be written and read.
    """
    rows = BounceRows(NUM_PAGES, ALIGNMENT - HEADER_BYTES)
    content = np.frombuffer(rows.memory.owner, np.uint8)  # type: ignore[call-overload]
    begin = rows.memory.address
    wanted = np.random.default_rng().integers(0, 256, VALUE_BYTES, np.uint8)
    agent = make_agent(rows)
    name = f"{agent.plugin} of NIXL {metadata.version('nixl')}"
    try:
        content[:VALUE_BYTES] = wanted
        if agent.move(WRITE, [[(begin, VALUE_BYTES, probe)]]) != [True]:
            raise Unreachable(f"{name}: a write failed")
        content[:] = 0
        good = [(begin, VALUE_BYTES, probe)]
        cut_short = [(begin + LONGER_BYTES, LONGER_BYTES, probe)]
        for transfers in ([good, cut_short], [cut_short, good]):
            done = agent.move(READ, transfers)
            if done[transfers.index(cut_short)]:
                raise Unsound(f"{name} calls a read done that was cut short; it is not used")
            if not done[transfers.index(good)]:
                raise Unsound(f"{name} gives a read the error of another one; it is not used")
        if (content[:VALUE_BYTES] != wanted).any():
            raise Unsound(f"{name} does not give back what it was given; it is not used")
    finally:
        agent.close()
    return name
