"""Exchange of manifests among processes that share a bucket."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Final

from kvtier.core.types import BlockKey
from kvtier.tiers.codecs.codec import RAW
from kvtier.tiers.remote.bucket.catalogue import Catalogue
from kvtier.tiers.remote.bucket.manifests import MAX_BYTES, Manifest, Pack, Tombstone, manifest_path
from kvtier.tiers.remote.bucket.object_store import Listed, Missing, ObjectStore, Taken
from kvtier.tiers.remote.bucket.packs import PackCoding, PackName
from kvtier.tiers.storage import Keys

logger = logging.getLogger(__name__)

NUM_READS: Final = 16
"""Concurrent reads of manifests."""
NUM_MERGED: Final = 64
MAX_AHEAD_NS: Final = 15 * 60 * 10**9
"""A manifest whose stamp is further in the future is ignored until then: this process's own stamps
would have to follow it. S3 refuses clients whose clock is off by this much."""


class ManifestSync:
    """Publishes what this process writes, and reads what others have published.

    The coroutines run in one event loop; other methods are thread-safe.

    max_age_ns: age from which packs are not used; 0 for no limit.
    now_ns: the time of day.
    can_read: whether packs of a codec and a key are of use here, see ``BlockCoder.can_read``. The
        blocks of others are taken for absent, and so written again.
    """

    def __init__(
        self,
        objects: ObjectStore,
        catalogue: Catalogue,
        block_bytes: int,
        max_age_ns: int = 0,
        now_ns: Callable[[], int] = time.time_ns,
        can_read: Callable[[int, int], bool] = lambda codec, key_id: not (codec or key_id),
    ) -> None:
        self.writer = os.urandom(8).hex()
        self._num_foreign = 0
        self._too_early: dict[str, int] = {}
        """Manifests with a stamp far in the future, and the time from which they are read."""
        self._objects = objects
        self._catalogue = catalogue
        self._block_bytes = block_bytes
        self._max_age_ns = max_age_ns
        self._now_ns = now_ns
        self._can_read = can_read
        self._lock = Lock()
        self._packs: list[Pack] = []
        self._tombstones: dict[BlockKey, Tombstone] = {}
        self._number = 0
        self._read: set[str] = set()
        self._publishing = asyncio.Lock()
        self._own: list[list[str]] = [[]]
        """Existing manifests of this process: small ones, merged ones, and so on."""

    @property
    def since(self) -> int:
        """Stamp of the oldest usable pack; 0 for any."""
        return max(0, self._now_ns() - self._max_age_ns) if self._max_age_ns else 0

    @property
    def num_unread(self) -> int:
        """Manifests that are not used.

        They are not understood, have another block size, or are stamped far in the future.
        """
        return self._num_foreign + len(self._too_early)

    @property
    def num_pending(self) -> int:
        """Packs and tombstones that are not published yet."""
        return len(self._packs) + len(self._tombstones)

    def add(self, keys: Keys, coding: PackCoding | None = None) -> None:
        """Record a pack that was written."""
        with self._lock:
            pack = Pack(self._catalogue.next_stamp(self._now_ns()), keys, coding)
            self._packs.append(pack)
        self._catalogue.add([pack], self.since)

    def apply_tombstones(self, keys: Sequence[BlockKey]) -> list[PackName]:
        """Bury blocks, so that no process finds them. Return packs that are useless now."""
        with self._lock:
            stamp = self._catalogue.next_stamp(self._now_ns())
            tombstones = [Tombstone(stamp, key) for key in keys]
            self._tombstones.update((tombstone.key, tombstone) for tombstone in tombstones)
        return self._catalogue.apply_tombstones(tombstones)

    async def publish(self) -> None:
        """Publish what is pending. Raises what ``Objects`` raises; it stays pending then."""
        async with self._publishing:
            with self._lock:
                packs, tombstones = self._packs[:], list(self._tombstones.values())
            if not packs and not tombstones:
                return
            for content in self._contents(packs, tombstones):
                self._own[0].append(await self._write(content))
            with self._lock:
                del self._packs[: len(packs)]
                for tombstone in tombstones:
                    if self._tombstones.get(tombstone.key) is tombstone:
                        del self._tombstones[tombstone.key]

    def _contents(self, packs: Sequence[Pack], tombstones: Sequence[Tombstone]) -> list[bytes]:
        """Return the manifests of packs and tombstones.

        Coded packs have one of their own: versions of kvtier that can't read them read the rest.
        """
        plain = [pack for pack in packs if pack.coding is None]
        coded = [pack for pack in packs if pack.coding is not None]
        made = [Manifest(self._block_bytes, plain, tombstones)] if plain or tombstones else []
        made += [Manifest(self._block_bytes, coded)] if coded else []
        return [each.to_bytes() for each in made]

    async def _write(self, content: bytes) -> str:
        """Write a manifest and return its path.

        An existing manifest is never overwritten: a copy of this process (a virtual machine's
        snapshot) may use the same name.
        """
        while True:
            path = manifest_path(self.writer, self._number)
            self._number += 1
            self._read.add(path)
            try:
                await self._objects.put(path, content, create=True)
            except Taken:
                continue
            return path

    async def merge(self) -> None:
        """Merge manifests of this process, so that listings stay short.

        ``NUM_MERGED`` small ones become one, then as many merged ones. Raises what ``Objects``
        raises.
        """
        for level, paths in enumerate(self._own):
            if len(paths) >= NUM_MERGED:
                await self._merge(level, paths[:NUM_MERGED])

    async def _merge(self, level: int, paths: Sequence[str]) -> None:
        contents = []
        for path in paths:
            with suppress(Missing):  # deleted by the bucket's lifecycle rules
                contents.append(await self._objects.get(path))
        read = [each for each in map(Manifest.from_bytes, contents) if each is not None]
        if sum(map(len, contents)) > MAX_BYTES or not read:
            del self._own[level][: len(paths)]  # keep them unmerged
            return
        since = self.since
        packs = [pack for each in read for pack in each.packs if pack.stamp >= since]
        tombstones = {tombstone.key: tombstone for each in read for tombstone in each.tombstones}
        if level + 1 == len(self._own):
            self._own.append([])
        for content in self._contents(packs, list(tombstones.values())):
            self._own[level + 1].append(await self._write(content))
        del self._own[level][: len(paths)]
        await self._objects.delete(paths)

    async def poll(self) -> None:
        """Read newly published manifests of others.

        Raises what ``Objects`` raises; manifests read before the error count.
        """
        before = set(self._read)
        listed = await self._objects.listed("manifests")
        there = {each.path for each in listed}
        self._read -= before - there  # they are gone
        self._too_early = {path: at for path, at in self._too_early.items() if path in there}
        few = asyncio.Semaphore(NUM_READS)

        async def read(listed: Listed) -> None:
            async with few:
                await self._read_one(listed.path, listed.num_bytes)

        now = self._now_ns()
        reads = [
            read(each)
            for each in listed
            if each.path not in self._read and self._too_early.get(each.path, 0) <= now
        ]
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _read_one(self, path: str, size: int) -> None:
        manifest = None
        if size <= MAX_BYTES:
            try:
                manifest = Manifest.from_bytes(await self._objects.get(path))
            except Missing:
                return
        was_early = self._too_early.pop(path, None) is not None
        if manifest is not None and manifest.newest > self._now_ns() + MAX_AHEAD_NS:
            self._too_early[path] = manifest.newest - MAX_AHEAD_NS
            if not was_early:
                logger.warning("a manifest is stamped far ahead, and is read later path=%s", path)
            return
        self._read.add(path)
        if manifest is None:
            self._num_foreign += 1
            logger.warning("a manifest is not understood path=%s", path)
            return
        self._catalogue.apply_tombstones(manifest.tombstones)
        if manifest.block_bytes != self._block_bytes:
            self._num_foreign += 1
            return
        since = self.since
        packs = [pack for pack in manifest.packs if pack.stamp >= since and self._is_known(pack)]
        self._catalogue.add(packs, since)

    def _is_known(self, pack: Pack) -> bool:
        """Return whether the codec and the key of a pack are known here."""
        coding = pack.coding
        return self._can_read(coding.codec, coding.key_id) if coding else self._can_read(RAW, 0)
