"""Deletion of blocks and of whole partitions: complete only once every tier has confirmed it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from kvtier.core.config import without_password
from kvtier.core.errors import CacheError
from kvtier.node.server import stores
from kvtier.node.server.partition import DELETED_AT_ONCE, Partition

logger = logging.getLogger(__name__)

Wait = Callable[[float], Awaitable[bool]]
"""Wait for a change until a deadline; return whether there is time left."""


async def delete_blocks(
    partition: Partition, keys: Sequence[bytes], wait: Wait, until_s: float
) -> set[int]:
    """Delete blocks from every tier, and wait until storage has confirmed it.

    Returns the positions of the keys that storage has not confirmed by ``until_s``. Their deletion
    is retried while the node runs; until then nothing finds them.
    """
    begins = range(0, len(keys), DELETED_AT_ONCE)
    for at in begins:
        partition.delete(keys[at : at + DELETED_AT_ONCE])
        await asyncio.sleep(0)
    left: set[int] = set()
    for at in begins:
        some = keys[at : at + DELETED_AT_ONCE]
        while unconfirmed := partition.undeleted(some):
            if not await wait(until_s):
                left.update(at + position for position in unconfirmed)
                break
        await asyncio.sleep(0)
    return left


@dataclass(slots=True)
class PartitionDeletion:
    """Result of the deletion of a whole partition.

    name: of the partition. problems: storage that has not confirmed it, with the reason.
    """

    name: str
    problems: list[str] = field(default_factory=list)


async def delete_partition(
    name: str, partition: Partition | None, locations: Sequence[str], wait: Wait, until_s: float
) -> PartitionDeletion:
    """Delete all blocks of a partition from every tier, and wait until storage has confirmed it.

    Args:
        name: of the partition.
        partition: the partition; None if it exists in stores only.
        locations: of the stores.
        wait: see ``Wait``.
        until_s: deadline of the wait, without that for stores that list their blocks.
    """
    done = PartitionDeletion(name)
    if partition is not None:
        for _ in partition.delete_all():
            await asyncio.sleep(0)
        while partition.has_undeleted:
            if not await wait(until_s):
                done.problems.append(f"storage has not confirmed it: {_late(partition)}")
                break
    for location in locations:
        where = without_password(location)
        if not stores.is_listed(location):
            done.problems.append(
                f"{where}: blocks that the node does not know can't be listed there"
            )
            continue
        try:
            num = await asyncio.to_thread(stores.delete_all, location, name)
            logger.info("deleted from store room=%s store=%s entries=%d", name, where, num)
        except CacheError as error:
            done.problems.append(str(error))
    return done


def _late(partition: Partition) -> str:
    reasons = (f"{name}: {why}" for name, why in partition.storage_errors().items())
    return "; ".join(reasons) or "it takes too long; the deletion is retried"
