"""Inspection and removal of packs and manifests in a bucket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from threading import TIMEOUT_MAX
from typing import Any, Final, TypeVar

from kvtier.core.errors import CacheError, ConfigError
from kvtier.tiers.remote.bucket.manifest_log import FOLDER
from kvtier.tiers.remote.bucket.manifests import MAX_BYTES, Manifest
from kvtier.tiers.remote.bucket.object_store import Listed, Missing, Taken, make_objects
from kvtier.tiers.remote.bucket.opening import PackOptions
from kvtier.tiers.remote.bucket.packs import MAX_BLOCKS, PackShape, contents_of, pack_path
from kvtier.tiers.remote.errors import Refused, Unreachable, Unsound, Unwritable
from kvtier.tiers.remote.keeper import Entry, EntryBlocks, StoreKeeper
from kvtier.tiers.remote.location import Location
from kvtier.tiers.remote.requests import RequestLoop

Item = TypeVar("Item")
Result = TypeVar("Result")

HEADER_BYTES: Final = PackShape(1, 0).header_bytes(MAX_BLOCKS)
"""Size of the longest pack header."""
AT_ONCE: Final = 16
"""Concurrent requests."""
CLOSE_S: Final = 3.0


class BucketKeeper(StoreKeeper):
    """Keeper of a bucket.

    A manifest is removed when none of its packs exists and none of its tombstones can concern
    an existing pack.
    """

    kind = "pack"
    age = "written {} ago"

    def __init__(self, location: Location, options: PackOptions) -> None:
        self.where = str(location)
        self._loop: RequestLoop | None = None
        self._objects = make_objects(location, options)
        # Listed before the packs, so that all packs of these manifests are in the later list.
        self._manifests: list[Listed] = []
        self._packs: set[str] = set()

    def test(self) -> str:
        request_s = self._asked(self._objects.self_test())
        return f"answers, in {1000 * request_s:.1f} ms a request"

    def entries(self) -> list[Entry]:
        self._manifests = self._asked(self._objects.listed("manifests"))
        listed = self._asked(self._objects.listed("packs"))
        self._packs = {each.path for each in listed}
        now = time.time()
        return [
            Entry(each.path.encode(), max(0.0, now - each.written_s), each.num_bytes)
            for each in listed
        ]

    def blocks(self, entries: Sequence[Entry]) -> list[EntryBlocks | None]:
        return self._asked(_each(self._blocks, entries))

    async def _blocks(self, entry: Entry) -> EntryBlocks | None:
        path = entry.name.decode()
        if not entry.num_bytes:
            return None
        try:
            header = await self._objects.part(path, 0, min(HEADER_BYTES, entry.num_bytes))
        except Missing:
            return None
        found = contents_of(bytes(header))
        if found is None or found.num_bytes != entry.num_bytes or pack_path(found.name) != path:
            return None
        return EntryBlocks(found.block_bytes, found.keys)

    def remove(self, entries: Sequence[Entry]) -> None:
        self._asked(self._objects.delete([entry.name.decode() for entry in entries]))

    def remove_notes(self, removed: Iterable[bytes], is_real: bool) -> int:
        left = self._packs - {name.decode() for name in removed}
        read = self._asked(_each(self._read, self._manifests))
        known = [
            (listed.path, manifest)
            for listed, manifest in zip(self._manifests, read, strict=True)
            if manifest is not None
        ]
        stamps = {
            path: [pack.stamp for pack in each.packs if pack_path(pack.name) in left]
            for path, each in known
        }
        oldest = min((min(stamp) for stamp in stamps.values() if stamp), default=None)
        useless = [
            path
            for path, each in known
            if not stamps[path]
            and not any(
                oldest is not None and tombstone.stamp >= oldest for tombstone in each.tombstones
            )
        ]
        if is_real:
            self._asked(self._objects.delete(useless))
            if len(useless) == len(self._manifests):  # no pack is left that the log could name
                log = self._asked(self._objects.listed(FOLDER))
                self._asked(self._objects.delete([each.path for each in log]))
        return len(useless)

    async def _read(self, listed: Listed) -> Manifest | None:
        """Return the manifest; None if it is not kvtier's."""
        if listed.num_bytes > MAX_BYTES:
            return None
        try:
            return Manifest.from_bytes(await self._objects.get(listed.path))
        except Missing:
            return None

    def _asked(self, request: Coroutine[Any, Any, Result]) -> Result:
        try:
            if self._loop is None:
                self._loop = RequestLoop(f"kvtier {self.where}", AT_ONCE)
            return self._loop.run(lambda: request, TIMEOUT_MAX)
        except (Refused, Unsound) as error:
            raise ConfigError(f"{self.where}: {self._objects.explain(error)}") from None
        except Unwritable as error:
            raise CacheError(f"{self.where} takes no writes: {error}") from None
        except (Missing, Taken, Unreachable, TimeoutError) as error:
            raise CacheError(f"{self.where} does not answer: {error}") from None

    def close(self) -> None:
        """Cancel the request of another thread, if there is one."""
        if self._loop is not None:
            self._loop.close(CLOSE_S)


async def _each(ask: Callable[[Item], Awaitable[Result]], items: Sequence[Item]) -> list[Result]:
    """Return the results for all items, with ``AT_ONCE`` concurrent calls."""
    few = asyncio.Semaphore(AT_ONCE)

    async def one(item: Item) -> Result:
        async with few:
            return await ask(item)

    return list(await asyncio.gather(*map(one, items)))
