"""Remove entries of kvtier from a store, by age and by size.

Replicas may run meanwhile: a removed block that one of them knows is a miss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Final

from kvtier.core.errors import ConfigError
from kvtier.tiers.remote.bucket.opening import PACK_STORES
from kvtier.tiers.remote.keeper import Entry, StoreKeeper
from kvtier.tiers.remote.location import read_location, read_options
from kvtier.tiers.remote.valkey.connection_pool import ValkeyOptions
from kvtier.tiers.row import split_storage

AT_ONCE: Final = 1000
"""Entries that are examined and removed at a time."""
SCHEMES: Final = {"redis": "valkey", "rediss": "valkeys", "valkey": "valkey", "valkeys": "valkeys"}


@dataclass(frozen=True, slots=True)
class Contents:
    """Summary of the entries of a store that seem to be kvtier's by their names.

    Each is verified before it is removed.
    """

    num_entries: int
    num_bytes: int
    oldest_s: float | None
    newest_s: float | None

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Contents:
        ages = [entry.age_s for entry in entries]
        num_bytes = sum(entry.num_bytes for entry in entries)
        return cls(len(entries), num_bytes, max(ages, default=None), min(ages, default=None))


@dataclass(frozen=True, slots=True)
class Pruned:
    """Entries removed, or to be removed in a dry run.

    before: contents before.
    num_strange: entries kept because they are damaged or not kvtier's.
    num_notes: manifests removed with the entries.
    """

    before: Contents
    num_entries: int
    num_bytes: int
    num_strange: int
    num_notes: int


def make_keeper(url: str) -> StoreKeeper:
    """Make the keeper of the store at a URL of ``--storage``. Raises ``ConfigError``."""
    _, scheme, rest = split_storage(url)
    if scheme in SCHEMES:
        from kvtier.tiers.remote.valkey.keeper import ValkeyKeeper

        location = read_location(SCHEMES[scheme], rest)
        return ValkeyKeeper(location, read_options(ValkeyOptions, location))
    if scheme in PACK_STORES:
        from kvtier.tiers.remote.bucket.keeper import BucketKeeper

        return BucketKeeper(*PACK_STORES[scheme].read(rest))
    shown = repr(scheme) if re.fullmatch(r"[\w.-]+", scheme) and rest else "this"
    raise ConfigError(
        f"{shown} is no store that can be looked after from here; give a URL that begins "
        f"with {'://, '.join((*PACK_STORES, *sorted(SCHEMES)))}://"
    )


def prune(
    keeper: StoreKeeper, older_than_s: float = inf, max_bytes: float = inf, is_real: bool = True
) -> Pruned:
    """Remove entries older than ``older_than_s``, then the oldest until ``max_bytes`` are left.

    Only kvtier's entries are removed. is_real: False for a dry run.
    """
    entries = there = keeper.entries()
    if sum(entry.num_bytes for entry in entries) > max_bytes:
        there = [entry for some in _pieces(entries) for entry in keeper.ours(some)]
    num_entries = num_bytes = 0
    num_strange = len(entries) - len(there)
    removed: list[bytes] = []
    for some in _pieces(chosen(there, older_than_s, max_bytes)):
        ours = keeper.ours(some)
        if is_real:
            keeper.remove(ours)
        removed += [entry.name for entry in ours]
        num_entries += len(ours)
        num_bytes += sum(entry.num_bytes for entry in ours)
        num_strange += len(some) - len(ours)
    num_notes = keeper.remove_notes(removed, is_real)
    return Pruned(Contents.of(entries), num_entries, num_bytes, num_strange, num_notes)


def chosen(entries: Sequence[Entry], older_than_s: float, max_bytes: float) -> list[Entry]:
    """Return the entries to remove, the oldest first."""
    left = sum(entry.num_bytes for entry in entries)
    found = []
    for each in sorted(entries, key=lambda entry: -entry.age_s):
        if each.age_s <= older_than_s and left <= max_bytes:
            break
        found.append(each)
        left -= each.num_bytes
    return found


def _pieces(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    left = iter(entries)
    while some := list(islice(left, AT_ONCE)):
        yield some
