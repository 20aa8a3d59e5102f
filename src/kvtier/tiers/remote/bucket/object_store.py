"""Interface of a store of objects, and what all of them have to do for packs and manifests."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.tiers.remote.bucket.opening import (
    DIRECTORY,
    BucketOptions,
    PackFileOptions,
    PackOptions,
)
from kvtier.tiers.remote.errors import Refused, Unsound
from kvtier.tiers.remote.location import Location

PROBE_PATH: Final = "self-test/probe"
"""Object of the self-test, shared by all processes; its content never changes."""
PROBE: Final = bytes(range(64))


class Missing(Exception):  # noqa: N818 - an outcome
    """The object, or the requested version of it, does not exist."""


class Taken(Exception):  # noqa: N818 - an outcome
    """The object exists already."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing. written_s: unix time by the store's clock."""

    path: str
    num_bytes: int
    written_s: float


class ObjectStore(ABC):
    """Objects below a prefix.

    All calls raise only ``Missing``, ``Taken``, ``Unwritable``, ``Refused``, ``Unreachable`` or
    ``Unsound``. Their messages contain no secrets.

    touch_s: a read records the use of an object if the last one was longer ago, where the store
        has times of use; 0 for never.
    """

    touch_s: float = 0.0

    @abstractmethod
    async def put(self, path: str, content: object, create: bool = False) -> None:
        """Write an object, completely or not at all. create: raise ``Taken`` if it exists."""

    @abstractmethod
    async def get(self, path: str) -> bytes:
        """Return a whole, small object."""

    @abstractmethod
    async def part(self, path: str, start: int, end: int) -> memoryview:
        """Return a range of bytes of an object, cut at its end."""

    @abstractmethod
    async def listed(self, path: str) -> list[Listed]:
        """Return the objects below ``path``; a list that does not end is ``Unreachable``."""

    @abstractmethod
    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""

    @abstractmethod
    def explain(self, error: Refused | Unsound) -> str:
        """Return why the store is not used, and the remedy."""

    async def self_test(self) -> float:
        """Test that the store behaves as packs and manifests require.

        Lists first, so that a missing bucket is reported by its name.

        Returns the seconds of one request. Raises ``Unsound`` if the store cannot be relied on.
        """
        await self.listed("self-test")
        await self._create_probe()
        if await self._create_probe():
            raise Unsound(
                "it writes over an object that was only to be created: it ignores If-None-Match"
            )
        for _ in range(2):  # the second one has a connection
            began = time.monotonic()
            if await self.part(PROBE_PATH, 8, 24) != PROBE[8:24]:
                raise Unsound("it answers a request for a part of an object with something else")
        return time.monotonic() - began

    async def _create_probe(self) -> bool:
        """Create the probe. Return whether it was created now."""
        try:
            await self.put(PROBE_PATH, PROBE, create=True)
        except Taken:
            return False
        return True


def make_objects(location: Location, options: PackOptions) -> ObjectStore:
    """Return the objects of a bucket, a directory or a pack file. Buckets need their client."""
    if location.scheme == DIRECTORY:
        from kvtier.tiers.remote.bucket.directory import Directory

        return Directory(location)
    if isinstance(options, PackFileOptions):
        from kvtier.tiers.remote.bucket.pack_objects import PackFileObjects, open_pack_file

        return PackFileObjects(open_pack_file(location, options))
    from kvtier.tiers.remote.bucket.objects import Objects

    assert isinstance(options, BucketOptions)
    return Objects(location, options)
