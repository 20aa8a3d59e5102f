"""Opens partitions beside the node's event loop, since a disk or a store may take long to open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from threading import Lock, Thread

from kvtier.core.errors import CacheError
from kvtier.node.server.node import CacheNode
from kvtier.node.server.partition import Partition
from kvtier.node.server.partition_key import PartitionKey
from kvtier.tiers import StorageTier

logger = logging.getLogger(__name__)

Storages = Mapping[str, StorageTier]


class PartitionOpener:
    """Opens partitions of a node. The event loop's thread owns it.

    The storage of each partition is opened on a thread of its own, so that one disk that hangs
    delays no other partition.

    node: the node.
    """

    def __init__(self, node: CacheNode) -> None:
        self._node = node
        self._opening: dict[PartitionKey, asyncio.Future[tuple[int, Partition]]] = {}
        self._lock = Lock()
        self._is_closed = False

    async def open(self, key: PartitionKey) -> tuple[int, Partition]:
        """Return the number of a partition, and the partition; open it at its first use.

        Raises ``CacheError`` if it can't be opened.
        """
        key = self._node.check_key(key, self._opening)
        number = self._node.number_of(key)
        if number is not None:
            return number, self._node.partitions[number]
        if key not in self._opening:
            loop = asyncio.get_running_loop()
            open_ = partial(self._open_storages, key, loop)
            Thread(target=open_, name="kvtier node open", daemon=True).start()
            self._opening[key] = loop.create_future()  # it ends in this loop, so not before
        return await asyncio.shield(self._opening[key])

    def _open_storages(self, key: PartitionKey, loop: asyncio.AbstractEventLoop) -> None:
        storages: Storages = {}
        failure = None
        try:
            storages = self._node.open_storages(key)
        except Exception as error:
            failure = error
        with self._lock:
            if not self._is_closed:
                loop.call_soon_threadsafe(self._enter, key, storages, failure)
                return
        _close(storages)

    def _enter(self, key: PartitionKey, storages: Storages, failure: Exception | None) -> None:
        """Make a partition of storage that is open. Called in the event loop."""
        opening = self._opening.pop(key, None)
        if opening is None:  # the node has ended meanwhile
            _close(storages)
            return
        try:
            if failure is not None:
                raise failure
            opening.set_result(self._node.enter(key, storages))
        except Exception as error:
            _close(storages)
            opening.set_exception(error)
            opening.exception()  # those who wait have it

    async def named(self, name: str) -> Partition | None:
        """Return the partition of this name, and poll it for a while; None if there is none.

        A partition that only the disk has is opened. Raises ``CacheError`` if that fails.
        """
        for key in (
            *(partition.key for partition in self._node.partitions),
            *self._node.keys_on_disk(),
        ):
            if key.name == name:
                number, _ = await self.open(key)
                return self._node.partition_of(number, key.tenant)
        return None

    async def open_kept(self) -> None:
        """Open the partitions left by the previous process."""
        for key in self._node.kept_partitions:
            try:
                await self.open(key)
            except CacheError as error:
                logger.error("room %s of the node before is not opened: %s", key.name, error)

    async def close(self) -> None:
        """Open no further partition. What is opened later by threads is closed by them."""
        with self._lock:
            self._is_closed = True
        for opening in self._opening.values():
            opening.cancel()
        self._opening.clear()
        await asyncio.sleep(0)  # storage that was opened before is closed


def _close(storages: Storages) -> None:
    for storage in storages.values():
        with suppress(CacheError):
            storage.close()
