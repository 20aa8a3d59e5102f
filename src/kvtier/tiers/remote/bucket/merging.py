"""Merges the manifests of all processes, so that each process reads few objects.

The process that wrote the newest object of the log is the merger. About once a second it lists the
manifests, and copies the new ones into the next object of the log, which all others read. It also
replaces many small manifests by a large one, so that lists stay short, and deletes old objects of
the log.

Objects of the log are created, and never overwritten. If two processes merge at the same time, only
one of them can create the next object; the other one finds it there and stops merging. If there is
no new object for some polls, any process may create an empty one, and becomes the merger.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvtier.core.types import BlockKey
from kvtier.tiers.remote.bucket.bound import Bound
from kvtier.tiers.remote.bucket.manifest_log import FOLDER, LogObject, log_path, number_of
from kvtier.tiers.remote.bucket.manifest_sync import LIST_S, MARGIN_S, ManifestSync
from kvtier.tiers.remote.bucket.manifests import MAX_BYTES, Manifest, Pack, Tombstone
from kvtier.tiers.remote.bucket.object_store import Listed, Missing, ObjectStore, Taken
from kvtier.tiers.remote.bucket.packs import PackName

NUM_MERGED: Final = 16
"""As many manifests of about one size become one."""
SMALL_BYTES: Final = 256 << 10
"""All sizes below count as one, so that few manifests are left for a process that starts."""
MAX_ENTRIES: Final = 4096
MAX_ENTRY_BYTES: Final = 16 << 20
"""Limits of one object of the log. The rest is left for the next one."""
NUM_KEPT: Final = 256
"""Number of objects of the log that are kept, for readers that are behind."""
TRIM_EVERY: Final = 64
PATIENCE: Final = 2.5
"""Polls without a new object of the log after which a process tries to become the merger. Up to one
more is added at random, so that few try at the same time."""
MAX_RATE: Final = 400.0
"""Manifests per second that one merger can read. If there are more, all processes publish less
often."""
READS_PER_S: Final = 2000.0
"""Requests per second for new objects of the log, by all processes. With more processes the merger
writes objects less often, but at least one per poll. S3 promises 5,500 requests for a prefix."""
PACE_POLLS: Final = 3.0
"""Number of polls over which the rate of new manifests is measured."""


class Merger:
    """Merges, if this process is the merger; otherwise waits until it has to take over.

    poll_s: interval of polls, seconds; the longest time between two objects of the log.
    publish_s: interval of publishing, seconds; the shortest time between two objects.
    bound: keeps the packs within their capacity; None for a store without one.
    """

    def __init__(
        self,
        objects: ObjectStore,
        sync: ManifestSync,
        poll_s: float,
        publish_s: float,
        bound: Bound | None = None,
    ) -> None:
        self._bound = bound
        self._objects = objects
        self._sync = sync
        self._poll_s = poll_s
        self._publish_s = publish_s
        self._patience_s = poll_s * (PATIENCE + random.random())
        self._idle_s = publish_s
        self._merged: list[str] = []
        """Paths of merged manifests that are not in the log yet."""
        self._num_left = 0
        self._num_arrived = 0
        self._pace_ms = 0
        self._paced_s = 0.0
        self._writers: set[str] = set()
        self._num_writers = 0
        self._counted_s = 0.0

    @property
    def is_merger(self) -> bool:
        """Whether this process has written the newest object of the log that it knows of."""
        last = self._sync.last
        return last is not None and last.writer == self._sync.writer

    @property
    def pause_s(self) -> float:
        """Time until the next poll and the next call of ``step``."""
        return min(self._idle_s, self._poll_s) if self.is_merger else self._poll_s

    async def step(self) -> None:
        """Merge, or become the merger if there is none. Raises what ``ObjectStore`` raises."""
        if self.is_merger:
            await self._merge()
            return
        last = self._sync.last
        is_unbounded = self._bound is not None and last is not None and not last.touch_s
        if is_unbounded or _now() - self._sync.seen_s > self._patience_s:
            await self._claim()

    async def _claim(self) -> None:
        """Become the merger, unless the log has a new object."""
        sync = self._sync
        if await self._newest() != sync.position:
            sync.must_list = True  # objects were deleted before they were read here
            return
        last = sync.last or LogObject(sync.writer)
        if self._bound is not None:
            self._bound.forget()
        made = replace(last, writer=sync.writer, entries=(), deleted=(), **self._usage())
        if await self._append(made):
            self._num_left = self._num_arrived = 0
            self._paced_s, self._pace_ms = _now(), last.pace_ms
            await self._check_newest()

    async def _append(self, made: LogObject) -> bool:
        """Create the next object of the log. Return whether this process has created it."""
        path, content = log_path(self._sync.position + 1), made.to_bytes()
        try:
            await self._objects.put(path, content, create=True)
        except Taken:
            try:
                is_own = await self._objects.get(path) == content  # a request was repeated
            except Missing:
                self._sync.must_list = True
                return False
            if not is_own:
                await self._sync.follow()
                return False
        self._sync.advance(made)
        return True

    async def _newest(self) -> int:
        listed = await self._objects.listed(FOLDER)
        return max((number_of(each.path) for each in listed), default=0)

    async def _check_newest(self) -> bool:
        """Return whether the last object is the newest one.

        A process that slept may have created an object under the number of a deleted one.
        """
        is_newest = await self._newest() == self._sync.position
        if not is_newest:
            self._sync.last, self._sync.must_list = None, True
        return is_newest

    # -- rounds ------------------------------------------------------------------------------------

    async def _merge(self) -> None:
        sync, last = self._sync, self._sync.last
        assert last is not None
        listed = await sync.list_manifests()
        newest_s = max((each.written_s for each in listed), default=0.0)
        covered_s = last.covered_ns / 1e9 or max(0.0, newest_s - LIST_S)
        # Those of old versions may be too large for the log. They are found by lists.
        sync.logged |= {each.path for each in listed if each.num_bytes > MAX_ENTRY_BYTES}
        new = sorted(
            (
                each
                for each in listed
                if each.path not in sync.logged and each.written_s >= covered_s - MARGIN_S
            ),
            key=lambda each: each.written_s,
        )
        some = _first(new)
        entries: list[tuple[str, bytes]] = []
        await sync.get_each(some, lambda path, content: entries.append((path, content)))
        self._num_arrived += max(0, len(new) - self._num_left)
        self._num_left = len(new) - len(some)
        covered_s = new[len(some)].written_s if self._num_left else max(newest_s, covered_s)
        for path, content in entries:
            if path not in sync.read:
                sync.take(path, content)
        entries += [(path, b"") for path in self._merged]
        stamp, deleted = sync.next_stamp(), await self._make_room(entries)
        if not entries and not deleted and _now() - sync.seen_s < self._poll_s:
            self._idle_s = min(1.5 * self._idle_s, max(self._poll_s / 2, self._publish_s))
            return
        if entries or deleted:
            self._count_writers(entries)
            wanted_s = min(self._poll_s, self._num_writers / READS_PER_S)
            self._idle_s = 0.0 if self._num_left else max(self._publish_s, wanted_s)
        self._set_pace()
        made = LogObject(
            sync.writer,
            entries,
            self._pace_ms,
            int(covered_s * 1e9),
            deleted=deleted,
            stamp=stamp,
            **self._usage(),
        )
        if await self._append(made):
            self._merged.clear()
            are_out = {each.path for each in listed if each.written_s < covered_s - MARGIN_S}
            some = [each for each in listed if each.path in are_out | sync.logged]
            await self._compact(some, dict(made.entries))
            if not sync.position % TRIM_EVERY and await self._check_newest():
                await self._trim()

    def _count_writers(self, entries: Sequence[tuple[str, bytes]]) -> None:
        """Count the processes that have written in the last minutes."""
        self._writers |= {path.rpartition("/")[0] for path, _ in entries}
        self._num_writers = max(self._num_writers, len(self._writers))
        if _now() - self._counted_s > LIST_S:
            self._num_writers, self._counted_s = len(self._writers), _now()
            self._writers.clear()

    async def _make_room(self, entries: Sequence[tuple[str, bytes]]) -> list[PackName]:
        """Count new packs, and delete some if there is too little room. Return their names."""
        if self._bound is None:
            return []
        for _, content in entries:
            manifest = Manifest.from_bytes(content)
            if manifest is not None:
                self._bound.note(manifest)
        return await self._bound.make_room()

    def _usage(self) -> dict[str, int]:
        """Return the fields of a log object that describe all packs; 0 if they are not counted."""
        if self._bound is None:
            return {"used_bytes": 0, "touch_s": 0}
        used = self._bound.used_bytes if self._bound.is_counted else 0
        return {"used_bytes": used, "touch_s": int(self._bound.touch_s)}

    def _set_pace(self) -> None:
        """Set the interval at which all processes publish, so that one merger can follow."""
        took_s, pace_s = _now() - self._paced_s, self._pace_ms / 1e3
        if took_s <= 0:  # not all processes know the last pace yet
            self._num_arrived = 0
            return
        rate = self._num_arrived / took_s + self._num_left / 60
        is_flood = not pace_s and took_s > 2 * self._publish_s and rate > 4 * MAX_RATE
        if took_s < PACE_POLLS * self._poll_s and not is_flood:
            return
        wanted_s = max(pace_s, self._publish_s) * rate / MAX_RATE
        self._pace_ms = int(1e3 * wanted_s) if wanted_s > self._publish_s else 0
        self._num_arrived = 0
        self._paced_s = _now()
        if self._pace_ms or pace_s:
            self._paced_s += self._poll_s + max(pace_s, wanted_s)

    async def _trim(self) -> None:
        """Delete the old objects of the log."""
        listed = await self._objects.listed(FOLDER)
        oldest = self._sync.position - NUM_KEPT
        await self._objects.delete(
            [each.path for each in listed if 0 < number_of(each.path) <= oldest]
        )

    # -- fewer manifests ---------------------------------------------------------------------------

    async def _compact(self, listed: Sequence[Listed], contents: Mapping[str, bytes]) -> None:
        """Replace manifests by larger ones.

        listed: manifests whose content is in the log.
        contents: content of some by path; the others are read.
        """
        sync = self._sync
        groups: dict[int, list[Listed]] = defaultdict(list)
        for each in listed:
            if each.path in sync.read and each.path not in sync.not_understood:
                groups[max(each.num_bytes, SMALL_BYTES).bit_length() // 4].append(each)
        least, bound = NUM_MERGED, self._bound
        if bound is not None and bound.num_deleted > len(
            bound
        ):  # most packs in manifests are deleted
            groups = {0: [each for group in groups.values() for each in group]}
            least, bound.num_deleted = 1, 0
        for group in groups.values():
            some = _first(sorted(group, key=lambda each: each.written_s), MAX_BYTES)
            if len(some) >= least:
                if not await self._check_newest():
                    return
                await self._replace(some, contents)

    async def _replace(self, listed: Sequence[Listed], contents: Mapping[str, bytes]) -> None:
        """Write the content of some manifests as one per block size and coding; delete them."""
        found = {each.path: contents.get(each.path, b"") for each in listed}
        unread = [each for each in listed if not found[each.path]]
        await self._sync.get_each(unread, found.__setitem__)
        packs: dict[int, list[Pack]] = defaultdict(list)
        tombstones: dict[int, dict[BlockKey, Tombstone]] = defaultdict(dict)
        read = []
        since = self._sync.since
        for path, content in found.items():
            manifest = Manifest.from_bytes(content)
            if manifest is None:
                continue
            read.append(path)
            packs[manifest.block_bytes] += [
                pack
                for pack in manifest.packs
                if pack.stamp >= since and (self._bound is None or self._bound.has(pack))
            ]
            known = tombstones[manifest.block_bytes]
            for each in manifest.tombstones:
                if each.key not in known or known[each.key].stamp < each.stamp:
                    known[each.key] = each
        for block_bytes, some in packs.items():
            deleted = list(tombstones[block_bytes].values())
            for content in self._sync.contents(block_bytes, some, deleted):
                path = await self._sync.write(content)
                self._sync.logged.add(path)
                self._merged.append(path)
        await self._objects.delete(read)


def _first(listed: Sequence[Listed], max_bytes: int = MAX_ENTRY_BYTES) -> list[Listed]:
    """Return the first manifests that fit into one object; one at least, if there is any."""
    num_bytes = 0
    found: list[Listed] = []
    for each in listed[:MAX_ENTRIES]:
        num_bytes += each.num_bytes
        if found and num_bytes > max_bytes:
            break
        found.append(each)
    return found


def _now() -> float:
    return asyncio.get_running_loop().time()
