"""Opens partitions beside the node's event loop, since a disk or a store may take long to open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
        self._opening: dict[PartitionKey, asyncio.Task[tuple[int, Partition]]] = {}
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
        task = self._opening.get(key)
        if task is None:
            task = self._opening[key] = asyncio.create_task(self._open(key))
            task.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(task)

    def _end(self, key: PartitionKey, task: asyncio.Task[tuple[int, Partition]]) -> None:
        del self._opening[key]
        if not task.cancelled():
            task.exception()  # those who wait have it

    async def _open(self, key: PartitionKey) -> tuple[int, Partition]:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Storages] = loop.create_future()

        def run() -> None:
            try:
                storages, error = self._node.open_storages(key), None
            except Exception as failure:
                storages, error = {}, failure
            with self._lock:
                if not self._is_closed:
                    loop.call_soon_threadsafe(_settle, opened, storages, error)
                    return
            _close(storages)

        Thread(target=run, name="kvtier node open", daemon=True).start()
        with _closed_unless_used(opened):
            return self._node.enter(key, await opened)

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
        for task in list(self._opening.values()):
            task.cancel()
            with suppress(asyncio.CancelledError, CacheError):
                await task


def _settle(opened: asyncio.Future[Storages], storages: Storages, error: Exception | None) -> None:
    if opened.cancelled():
        _close(storages)
    elif error is not None:
        opened.set_exception(error)
    else:
        opened.set_result(storages)


@contextmanager
def _closed_unless_used(opened: asyncio.Future[Storages]) -> Iterator[None]:
    """Close storage that was opened for a partition that could not be made."""
    try:
        yield
    except BaseException:
        if opened.done() and not opened.cancelled() and opened.exception() is None:
            _close(opened.result())
        raise


def _close(storages: Storages) -> None:
    for storage in storages.values():
        with suppress(CacheError):
            storage.close()
