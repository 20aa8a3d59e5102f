"""Test that a store behaves as packs and manifests require."""

from __future__ import annotations

import time
from typing import Final

from kvtier.tiers.remote.errors import Unsound
from kvtier.tiers.remote.s3.objects import Objects, Taken

PATH: Final = "self-test/probe"
"""One object shared by all processes; its content never changes."""
PROBE: Final = bytes(range(64))
START: Final = 8
END: Final = 24


async def self_test(objects: Objects) -> float:
    """Test the store. Return the seconds of one request.

    Lists first, so that a missing bucket is reported by its name.

    Raises ``Unsound`` if the store cannot be relied on, and what ``Objects`` raises.
    """
    await objects.names("self-test")
    await _create(objects)
    if await _create(objects):
        raise Unsound(
            "it writes over an object that was only to be created: it ignores If-None-Match"
        )
    await _look(objects, "")
    began = time.monotonic()
    await _look(objects, "")
    request_s = time.monotonic() - began
    await _look(objects, await objects.version(PATH))
    return request_s


async def _create(objects: Objects) -> bool:
    """Create the probe. Return whether it was created now."""
    try:
        await objects.put(PATH, PROBE, create=True)
    except Taken:
        return False
    return True


async def _look(objects: Objects, version: str) -> None:
    if await objects.part(PATH, START, END, version) != PROBE[START:END]:
        raise Unsound("it answers a request for a part of an object with something else")
