"""Keeps the packs of a shared directory within its capacity.

Only the merger does this. It lists the packs when it starts merging, and then once an hour; in
between it counts the packs in new manifests. It deletes the packs that were used longest ago, and
writes their names into the log, where all processes find them.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Final

from kvtier.tiers.remote.bucket.directory import Directory
from kvtier.tiers.remote.bucket.manifests import Manifest, Pack
from kvtier.tiers.remote.bucket.packs import PackName, PackShape, pack_name_of, pack_path

LIST_S: Final = 3600.0
"""Interval of lists, which find packs of writers that were killed before publishing them."""
SLACK: Final = 1 / 16
"""Share of the capacity that is kept free for the writes of other processes. As much is deleted at
a time."""
AT_ONCE: Final = 512
TURNOVER_SHARE: Final = 1 / 8
MIN_TOUCH_S, MAX_TOUCH_S = 60.0, 3600.0
"""The use of a pack is recorded once in this share of the time from its last use to its deletion,
within these limits, seconds."""


class Bound:
    """Deletes packs so that all of them take at most ``capacity_bytes``.

    num_deleted: packs deleted since ``num_deleted`` was set to 0.
    """

    def __init__(
        self, objects: Directory, capacity_bytes: int, now_s: Callable[[], float] = time.time
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_deleted = 0
        self.touch_s = MIN_TOUCH_S
        self.used_bytes = 0
        self._objects = objects
        self._now_s = now_s
        self._packs: dict[str, tuple[float, int]] = {}
        """Time of the last use, as far as known, and size of each pack."""
        self._oldest: list[tuple[float, str]] = []
        """Heap of these times. Entries that differ from ``_packs`` are outdated."""
        self._list: asyncio.Task[None] | None = None
        self._listed_s = float("-inf")

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def is_counted(self) -> bool:
        """Whether all packs are known."""
        return self._listed_s > float("-inf")

    def forget(self) -> None:
        """Begin anew: other processes may have written and deleted packs."""
        self._packs.clear()
        self._oldest.clear()
        self.used_bytes, self._listed_s = 0, float("-inf")

    def note(self, manifest: Manifest) -> None:
        """Count the packs in a manifest."""
        for pack in manifest.packs:
            size = PackShape(manifest.block_bytes, 0).offsets(len(pack.keys), pack.coding)[-1]
            self._set(pack_path(pack.name), min(pack.stamp / 1e9, self._now_s()), int(size))

    def has(self, pack: Pack) -> bool:
        """Return whether a pack exists, or may exist."""
        return not self.is_counted or pack_path(pack.name) in self._packs

    def _set(self, path: str, used_s: float, num_bytes: int) -> None:
        self.used_bytes += num_bytes - self._packs.get(path, (0.0, 0))[1]
        self._packs[path] = used_s, num_bytes
        heapq.heappush(self._oldest, (used_s, path))

    async def make_room(self) -> list[PackName]:
        """Delete packs if there is too little room. Return their names.

        Raises what ``ObjectStore`` raises.
        """
        self._begin_list()
        slack = int(self.capacity_bytes * SLACK)
        if not self.is_counted or self.used_bytes <= self.capacity_bytes - slack:
            return []
        deleted = []
        while self._oldest and self.used_bytes > self.capacity_bytes - 2 * slack:
            some: dict[str, float] = {}
            num_bytes = self.used_bytes - self.capacity_bytes + 2 * slack
            while self._oldest and len(some) < AT_ONCE and num_bytes > 0:
                used_s, path = heapq.heappop(self._oldest)
                if path not in some and self._packs.get(path, (0.0, 0))[0] == used_s:
                    some[path] = used_s
                    num_bytes -= self._packs[path][1]
            for path, used_now_s in (await self._objects.delete_unused(some)).items():
                if used_now_s is not None:
                    self._set(path, used_now_s, self._packs[path][1])
                    continue
                self.used_bytes -= self._packs.pop(path)[1]
                if (name := pack_name_of(path)) is not None:
                    deleted.append(name)
                age_s = max(0.0, self._now_s() - some[path])
                self.touch_s = min(MAX_TOUCH_S, max(MIN_TOUCH_S, age_s * TURNOVER_SHARE))
        self.num_deleted += len(deleted)
        return deleted

    def _begin_list(self) -> None:
        if self._list is not None and self._list.done():
            self._list.exception()  # after an error, the next call lists again
            self._list = None
        is_due = asyncio.get_running_loop().time() - self._listed_s >= LIST_S
        if self._list is None and is_due:
            self._list = asyncio.get_running_loop().create_task(self._read_list())

    async def _read_list(self) -> None:
        before = set(self._packs)
        listed = {each.path: each for each in await self._objects.listed("packs")}
        for path in before - set(listed):
            if path in self._packs:
                self.used_bytes -= self._packs.pop(path)[1]
        for path, each in listed.items():
            self._set(path, each.written_s, each.num_bytes)
        self._oldest = [(used_s, path) for path, (used_s, _) in self._packs.items()]
        heapq.heapify(self._oldest)
        self._listed_s = asyncio.get_running_loop().time()
