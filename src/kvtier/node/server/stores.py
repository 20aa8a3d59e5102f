"""Stores of a node: each partition has its own place in every store that lists blocks.

All blocks of a partition can therefore be found and deleted, including blocks that no index knows.
"""

from __future__ import annotations

from math import inf
from urllib.parse import parse_qsl, quote, urlencode

from kvtier.tiers.remote.bucket.opening import SERVICES
from kvtier.tiers.remote.pruning import make_keeper, prune
from kvtier.tiers.remote.valkey.connection_pool import ValkeyOptions

BY_PREFIX = ("valkey", "valkeys", "redis", "rediss")
BY_PATH = tuple(SERVICES)
"""Buckets. Partitions share a directory, because its capacity holds for all its packs together."""


def is_listed(location: str) -> bool:
    """Return whether the blocks of a partition can be listed in this store."""
    return _scheme(location) in BY_PREFIX + BY_PATH


def _scheme(location: str) -> str:
    return location.partition(":")[0].rpartition("=")[2]


def partition_location(location: str, partition: str) -> str:
    """Return the location of a partition's blocks in a store. partition: its name."""
    url, mark, query = location.partition("?")
    if _scheme(location) in BY_PATH:
        return f"{url.rstrip('/')}/{quote(partition)}{mark}{query}"
    if _scheme(location) not in BY_PREFIX:
        return location
    options = dict(parse_qsl(query, keep_blank_values=True))
    options["prefix"] = f"{options.get('prefix', ValkeyOptions().prefix)}{partition}:"
    return f"{url}?{urlencode(options)}"


def delete_all(location: str, partition: str) -> int:
    """Delete all blocks of a partition from a store. Return how many entries were deleted.

    Raises ``CacheError`` if the store does not answer. Takes as long as the store does.
    """
    keeper = make_keeper(partition_location(location, partition))
    try:
        return prune(keeper, inf, -1).num_entries
    finally:
        keeper.close()
