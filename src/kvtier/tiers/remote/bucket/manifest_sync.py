"""Exchange of manifests among processes that share a bucket."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Final

from kvtier.core.types import BlockKey
from kvtier.tiers.codecs.codec import RAW
from kvtier.tiers.remote.bucket.catalogue import Catalogue
from kvtier.tiers.remote.bucket.manifest_log import FOLDER, LogObject, log_path, number_of
from kvtier.tiers.remote.bucket.manifests import (
    MAX_BYTES,
    Manifest,
    Pack,
    Tombstone,
    manifest_path,
    writer_of,
)
from kvtier.tiers.remote.bucket.object_store import Listed, Missing, ObjectStore, Taken
from kvtier.tiers.remote.bucket.packs import PackCoding, PackName
from kvtier.tiers.storage import Keys

logger = logging.getLogger(__name__)

NUM_READS: Final = 32
"""Concurrent reads of manifests."""
MARGIN_S: Final = 10.0
"""Difference of the clocks of a store's servers, and their resolution."""
FEW: Final = 16
"""Largest number of new manifests that a list reads one by one although the merger copies them into
the log: the merger may be dead, and ``kvtier export`` ends before another process replaces it."""
LIST_S: Final = 600.0
"""Interval of lists, in case that a manifest is missing in the log."""
MAX_AHEAD_NS: Final = 15 * 60 * 10**9
"""A manifest whose stamp is further in the future is ignored until then, because the stamps of this
process have to be larger than all that it has read. S3 refuses clients with such a clock."""


class ManifestSync:
    """Publishes what this process writes, and reads what others have published.

    A process that starts lists the manifests, and reads those that are no longer in the log. Then
    it reads the log, into which the merger (see ``merging``) copies the manifests of all processes:
    each poll requests the next object.

    position: number of the newest object of the log that was read.
    last: that object; None if there is none, or if it was not understood.
    seen_s: when it was read, by the loop's clock.
    read: paths of manifests whose content is known here.
    logged: paths of manifests that are in the log.
    not_understood: paths of manifests that are damaged or of another version.
    must_list: whether the next poll lists all manifests.

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
        """Manifests whose stamps are far in the future, and when to read them, ns."""
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
        self._publishing = asyncio.Lock()
        self._list_at_s = 0.0
        self._has_all = False
        """Whether all manifests in the log were read here, so merged ones need not be read."""
        self._unclear = 0
        """Number of the newest object of the log that was not understood."""
        self.position = 0
        self.last: LogObject | None = None
        self.seen_s = float("-inf")
        self.read: set[str] = set()
        self.logged: set[str] = set()
        self.not_understood: set[str] = set()
        self.must_list = True

    @property
    def since(self) -> int:
        """Stamp of the oldest usable pack; 0 for any."""
        return max(0, self._now_ns() - self._max_age_ns) if self._max_age_ns else 0

    @property
    def pace_s(self) -> float:
        """Shortest interval at which a process should publish, seconds; set by the merger."""
        return self.last.pace_ms / 1e3 if self.last is not None else 0.0

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
        """Record tombstones, so that no process finds these blocks. Return packs without blocks."""
        with self._lock:
            stamp = self._catalogue.next_stamp(self._now_ns())
            tombstones = [Tombstone(stamp, key) for key in keys]
            self._tombstones.update((tombstone.key, tombstone) for tombstone in tombstones)
        return self._catalogue.apply_tombstones(tombstones)

    def next_stamp(self) -> int:
        """Return a stamp that is newer than all known ones."""
        return self._catalogue.next_stamp(self._now_ns())

    async def publish(self) -> None:
        """Publish what is pending. Raises what ``ObjectStore`` raises; it stays pending then."""
        async with self._publishing:
            with self._lock:
                packs, tombstones = self._packs[:], list(self._tombstones.values())
            if not packs and not tombstones:
                return
            for content in self.contents(self._block_bytes, packs, tombstones):
                await self.write(content)
            with self._lock:
                del self._packs[: len(packs)]
                for tombstone in tombstones:
                    if self._tombstones.get(tombstone.key) is tombstone:
                        del self._tombstones[tombstone.key]

    @staticmethod
    def contents(
        block_bytes: int, packs: Iterable[Pack], tombstones: Sequence[Tombstone]
    ) -> list[bytes]:
        """Return the manifests of packs and tombstones.

        Coded packs are in a separate manifest, because old versions of kvtier can't read them.
        """
        plain: list[Pack] = []
        coded: list[Pack] = []
        for pack in packs:
            (plain if pack.coding is None else coded).append(pack)
        made = [Manifest(block_bytes, plain, tombstones)] if plain or tombstones else []
        made += [Manifest(block_bytes, coded)] if coded else []
        return [each.to_bytes() for each in made]

    async def write(self, content: bytes) -> str:
        """Write a manifest and return its path.

        An existing manifest is never overwritten: a copy of this process (a virtual machine's
        snapshot) may use the same name.
        """
        while True:
            path = manifest_path(self.writer, self._number)
            self._number += 1
            self.read.add(path)
            try:
                await self._objects.put(path, content, create=True)
            except Taken:
                continue
            return path

    async def poll(self) -> None:
        """Read newly published manifests of others.

        Raises what ``ObjectStore`` raises; manifests read before the error count.
        """
        if self.must_list or asyncio.get_running_loop().time() >= self._list_at_s:
            await self.read_all(skips_newest=True)
        else:
            await self.follow()

    async def read_all(self, skips_newest: bool = False) -> None:
        """List the manifests, read the unknown ones, and read the log to its end.

        skips_newest: if more than ``FEW`` are unread, read only those that the log does not bring.

        Raises what ``ObjectStore`` raises; manifests read before the error count.
        """
        if self.last is not None:
            await self.follow()
        log = await self._objects.listed(FOLDER)
        newest = max((number_of(each.path) for each in log), default=0)
        self._has_all &= not self.must_list
        # From here on, others may set it again. After an error, the next poll lists again.
        self.must_list, self._list_at_s = False, 0.0
        listed = await self.list_manifests()
        now = self._now_ns()
        unread = [
            each
            for each in listed
            if each.path not in self.read and self._too_early.get(each.path, 0) <= now
        ]
        if self.last is None or newest != self.position or not self._has_all:
            self._has_all = False
            self.position, begin_s = _where_to_begin(log, unread, min(self._unclear, newest))
            await self.get_each([each for each in unread if each.written_s < begin_s], self.take)
        await self.follow()
        self.must_list |= self.position < newest  # the next object was deleted meanwhile
        left = [each for each in unread if each.path not in self.read]
        if skips_newest and len(left) > FEW:
            left = [each for each in left if self._is_due(each)]
        await self.get_each(left, self.take)
        self._has_all = not self.must_list
        self._list_at_s = asyncio.get_running_loop().time() + LIST_S * random.uniform(0.75, 1.25)

    def _is_due(self, unread: Listed) -> bool:
        """Return whether the log will not bring the content of a manifest any more."""
        if self.last is None or not self.last.covered_ns:
            return True
        is_merged = unread.path in self.logged or writer_of(unread.path) == self.last.writer
        return is_merged or unread.written_s < self.last.covered_ns / 1e9 - MARGIN_S

    async def list_manifests(self) -> list[Listed]:
        """List all manifests, and forget deleted ones."""
        known = [self.read, self.logged, self.not_understood]
        before = [set(paths) for paths in known]
        listed = await self._objects.listed("manifests")
        there = {each.path for each in listed}
        for paths, old in zip(known, before, strict=True):
            paths -= old - there
        self._too_early = {path: at for path, at in self._too_early.items() if path in there}
        return listed

    async def get_each(
        self, listed: Iterable[Listed], take: Callable[[str, bytes], object]
    ) -> None:
        """Read manifests, and call ``take`` with each.

        One that does not exist any more was merged into another: the next poll lists again.
        """
        few = asyncio.Semaphore(NUM_READS)

        async def get(each: Listed) -> None:
            if each.num_bytes > MAX_BYTES:
                take(each.path, b"")
                return
            async with few:
                try:
                    content = await self._objects.get(each.path)
                except Missing:
                    self.must_list = True
                    return
            take(each.path, content)

        for outcome in await asyncio.gather(*map(get, listed), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def follow(self) -> None:
        """Read the new objects of the log. Raises what ``ObjectStore`` raises."""
        while True:
            try:
                content = await self._objects.get(log_path(self.position + 1))
            except Missing:
                return
            self.advance(LogObject.from_bytes(content))

    def advance(self, found: LogObject | None) -> None:
        """Apply the next object of the log. found: None for one that is not understood."""
        self.position += 1
        self.last = found
        self.seen_s = asyncio.get_running_loop().time()
        if found is None:
            logger.warning("an object of the log is not understood number=%d", self.position)
            self.must_list, self._unclear = True, self.position
            return
        packs: list[Pack] = []
        for path, content in found.entries:
            self.logged.add(path)
            if path in self.read:
                continue
            if content:
                packs += self._taken(path, content)
            elif self._has_all and not self.must_list and not self._too_early:
                self.read.add(path)
        if packs:
            self._catalogue.add(packs, self.since)
        if found.deleted:
            self._catalogue.lose_packs(found.deleted, found.stamp)

    def take(self, path: str, content: bytes) -> None:
        """Apply a manifest: add its packs, and remove what its tombstones name."""
        if packs := self._taken(path, content):
            self._catalogue.add(packs, self.since)

    def _taken(self, path: str, content: bytes) -> list[Pack]:
        """Apply a manifest, except that its usable packs are returned and not added."""
        manifest = Manifest.from_bytes(content)
        was_early = self._too_early.pop(path, None) is not None
        if manifest is not None and manifest.newest > self._now_ns() + MAX_AHEAD_NS:
            self._too_early[path] = manifest.newest - MAX_AHEAD_NS
            if not was_early:
                logger.warning("a manifest is stamped far ahead, and is read later path=%s", path)
            return []
        self.read.add(path)
        if manifest is None:
            self._num_foreign += 1
            self.not_understood.add(path)
            logger.warning("a manifest is not understood path=%s", path)
            return []
        if manifest.tombstones:
            self._catalogue.apply_tombstones(manifest.tombstones)
        if manifest.block_bytes != self._block_bytes:
            self._num_foreign += 1
            return []
        since = self.since
        return [pack for pack in manifest.packs if pack.stamp >= since and self._is_known(pack)]

    def _is_known(self, pack: Pack) -> bool:
        """Return whether the codec and the key of a pack are known here."""
        coding = pack.coding
        return self._can_read(coding.codec, coding.key_id) if coding else self._can_read(RAW, 0)


def _where_to_begin(
    log: Sequence[Listed], unread: Sequence[Listed], after: int
) -> tuple[int, float]:
    """Choose where a process that knows nothing begins to read the log.

    An object of the log has the content of hundreds of manifests, so reading some old objects can
    replace many requests. Manifests that were written after an object are in later ones.

    after: number of an object that can't be read; 0 for none.

    Returns the number of the object before the first one to read, and the time up to which
    manifests are not certain to be in the log from there on. That makes the fewest requests.
    """
    written_s = sorted(each.written_s for each in unread)
    objects = sorted(((number_of(each.path), each.written_s) for each in log), reverse=True)
    newest = objects[0][0] if objects else 0
    best, begin, begin_s = len(unread) + 1, max(after, newest - 1), float("inf")
    for num, (number, at_s) in enumerate(objects):
        if number <= after or number != newest - num:  # objects before a gap can't be followed
            break
        until_s = at_s + MARGIN_S if number > 1 else 0.0  # nothing was logged before the first one
        num_requests = num + 1 + bisect_left(written_s, until_s)
        if num_requests < best:
            best, begin, begin_s = num_requests, number - 1, until_s
    return begin, begin_s
