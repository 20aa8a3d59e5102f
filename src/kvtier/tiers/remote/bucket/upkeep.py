"""Background work of a bucket: the self-test, others' manifests, own manifests, merging."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from kvtier.core.errors import ConfigError
from kvtier.tiers.remote.bucket.bound import Bound
from kvtier.tiers.remote.bucket.directory import Directory
from kvtier.tiers.remote.bucket.manifest_sync import ManifestSync
from kvtier.tiers.remote.bucket.merging import Merger
from kvtier.tiers.remote.bucket.object_store import ObjectStore
from kvtier.tiers.remote.bucket.opening import DirectoryOptions, PackOptions
from kvtier.tiers.remote.errors import Refused, Unsound, Unwritable
from kvtier.tiers.remote.location import Location
from kvtier.tiers.remote.requests import RequestLoop

logger = logging.getLogger(__name__)

IN_USE: Final = "in use"
OPEN_S: Final = 5.0
"""Longest wait at the start; manifests not read by then are read in the background."""
FIRST_S: Final = 10.0
"""Time limit of the self-test and the first poll."""
BACKGROUND_S: Final = 30.0
"""Time limit of a poll, and of publishing."""
RETRY_S: Final = 5.0
"""Pause between attempts to reach a store that could not be reached at the start, and between
writes to one that is full or read-only."""
COUNTED_BY: Final = 3
"""Objects of the log after which a pack is certainly included in ``used_bytes``."""


class Upkeep:
    """Background work of one bucket.

    is_sound: whether the store has passed its self-test.
    request_s: seconds of a request during the self-test.
    polling: held while manifests are read or merged.
    """

    def __init__(
        self, location: Location, objects: ObjectStore, exchange: ManifestSync, options: PackOptions
    ) -> None:
        self.is_sound = False
        self.request_s = 0.0
        self._location = location
        self._objects = objects
        self._exchange = exchange
        self._poll_s = options.poll_s
        self._publish_s = options.publish_s
        self._capacity = options.capacity if isinstance(options, DirectoryOptions) else 0
        bound = None
        if self._capacity:
            assert isinstance(objects, Directory)
            bound = Bound(objects, self._capacity)
        self.merger = Merger(objects, exchange, options.poll_s, options.publish_s, bound)
        self._written_bytes: dict[int, int] = {}
        """Bytes that this process wrote, by the newest object of the log at that time."""
        self._was_polled = False
        self.polling = asyncio.Lock()
        self._refusal = ""
        self._trouble = ""
        self._unwritable = ""
        self._next_write_s = 0.0

    @property
    def state(self) -> str:
        """State of the bucket in words."""
        if self._refusal:
            return f"not used: {self._refusal}"
        return self._trouble or (f"only read: {self._unwritable}" if self._unwritable else IN_USE)

    @property
    def usage(self) -> str:
        """Share of the capacity that is used, in words; "" without a capacity."""
        last = self._exchange.last
        if not self._capacity:
            return ""
        used = f"{last.used_bytes / 2**30:,.2f}" if last is not None and last.touch_s else "?"
        return f"{used} of {self._capacity / 2**30:,.2f} GiB"

    @property
    def takes_writes(self) -> bool:
        """Whether a write may succeed now."""
        return self.is_sound and time.monotonic() >= self._next_write_s

    def reserve(self, num_bytes: int) -> bool:
        """Return whether there is room for a pack, and count it.

        What others write at the same time is not known yet, so the bound may be exceeded by it.
        """
        last = self._exchange.last
        if not self._capacity or last is None:
            return True
        position = self._exchange.position
        for old in [at for at in self._written_bytes if at <= position - COUNTED_BY]:
            del self._written_bytes[old]
        if last.used_bytes + sum(self._written_bytes.values()) + num_bytes > self._capacity:
            return False
        self._written_bytes[position] = self._written_bytes.get(position, 0) + num_bytes
        return True

    def open(self, loop: RequestLoop) -> None:
        """Begin the background work.

        Raises ``ConfigError`` for a store that cannot be used; one that cannot be reached is
        retried.
        """
        try:
            loop.begin(self.look).result(OPEN_S)
        except TimeoutError:
            self.note("no answer")
        if self._refusal:
            raise ConfigError(f"storage: {self._location}: {self._refusal}")
        loop.begin(self._keep_looking)
        loop.begin(self._keep_publishing)

    async def _keep_looking(self) -> None:
        while not self._refusal:
            await asyncio.sleep(self.merger.pause_s if self._poll_s else RETRY_S)
            if self._poll_s or not self._was_polled:
                await self.look()

    async def look(self) -> None:
        """Run the self-test if necessary, then poll. Raises nothing."""
        try:
            time_s = BACKGROUND_S if self.is_sound else FIRST_S
            async with self.polling, asyncio.timeout(time_s):
                if not self.is_sound:
                    self.request_s = await self._objects.self_test()
                    self.is_sound = True
                await (self._exchange.poll() if self._poll_s else self._exchange.read_all())
                self._was_polled = True
                if self._capacity and self._exchange.last is not None:
                    self._objects.touch_s = self._exchange.last.touch_s
                if self._poll_s:
                    await self.merger.step()
                self.note("")
        except (Refused, Unsound) as error:
            if self.is_sound:  # it worked before; credentials may become valid again
                self.note(str(error))
            else:
                self._refusal = self._objects.explain(error)
                logger.error("not used store=%s reason=%r", self._location, self._refusal)
        except Unwritable as error:
            self.note("")
            self.note_write(str(error))
        except Exception as error:
            self.note(str(error) or "no answer")

    async def _keep_publishing(self) -> None:
        while True:
            await asyncio.sleep(max(self._publish_s, self._exchange.pace_s))
            if not self.takes_writes or not self._exchange.num_pending:
                continue
            try:
                async with asyncio.timeout(BACKGROUND_S):
                    await self._exchange.publish()
                    self.note("")
                    self.note_write("")
            except Unwritable as error:
                self.note_write(str(error))
            except Exception as error:
                self.note(str(error) or "no answer")

    def note_write(self, reason: str) -> None:
        """Record the outcome of a write: why the store takes none now, or "" for a success."""
        if reason:
            self._next_write_s = time.monotonic() + RETRY_S
            if not self._unwritable:
                logger.warning("the store is only read store=%s reason=%r", self._location, reason)
        elif self._unwritable:
            logger.info("the store takes writes again store=%s", self._location)
        self._unwritable = reason

    def note(self, reason: str) -> None:
        """Record an error, "" for none. The beginning and the end of an error state are logged."""
        if reason and not self._trouble:
            logger.warning("the store does not answer store=%s reason=%r", self._location, reason)
        elif self._trouble and not reason:
            logger.info("the store is in use again store=%s", self._location)
        self._trouble = reason
