"""Copy a store into another one: with another codec, key, secret or prefix, or of another kind.

Blocks are read and written as by any process that uses the stores, so each is verified when it is
read, and once more after it was written. Blocks that are there already are left out. So a migration
that was interrupted goes on when it is started again, and replicas may use both stores meanwhile.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.core.config import DEFAULT_CODING, CodingConfig
from kvtier.core.errors import CacheError, ConfigError
from kvtier.core.types import BlockKey, BlockName
from kvtier.layout import KVGroup, opaque
from kvtier.tiers.codecs.codec import Uint8s
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.bucket.opening import PACK_FILE, PACK_STORES, SERVICES, endpoint_of
from kvtier.tiers.remote.keeper import EntryBlocks, StoreKeeper
from kvtier.tiers.remote.location import read_location, read_options
from kvtier.tiers.remote.pruning import SCHEMES, make_keeper
from kvtier.tiers.remote.valkey.connection_pool import PORT, ValkeyOptions
from kvtier.tiers.row import STORES, make_storage, split_storage
from kvtier.tiers.storage import Outcome, StorageTier
from kvtier.tiers.wrappers.wrapper import StorageWrapper

BATCH_BYTES: Final = 16 << 20
"""Bytes of blocks that are copied at a time, unless they are a pack."""
NUM_AT_ONCE: Final = 2
"""Batches in flight: one is read while another is written."""
MAX_RATIO: Final = 4
"""Bytes of blocks per stored byte, at most, with any codec."""
CALL_S: Final = 60.0
NUM_TRIES: Final = 2
LISTED_AT_ONCE: Final = 1000
HEADERS_AT_ONCE: Final = 256
"""Entries whose headers are read at a time."""
ALL_BYTES: Final = 1 << 63
MARK_BYTES: Final = 4096
"""Size of the block by which a store is recognised under another URL."""
NAMESPACE: Final = b""
"""Stores find blocks by their keys alone."""

THERE, ABSENT, DAMAGED, FAILED = Outcome


@dataclass(slots=True)
class Migrated:
    """Blocks of a migration.

    num_bytes: of the copied blocks, decoded.
    num_there: blocks that were in the target before.
    num_damaged: damaged in the source, or changed on the way.
    num_unreadable: of another key, secret or codec, or removed meanwhile.
    num_refused: blocks for which the target has no room.
    """

    num_copied: int = 0
    num_bytes: int = 0
    num_there: int = 0
    num_damaged: int = 0
    num_unreadable: int = 0
    num_refused: int = 0

    @property
    def num_blocks(self) -> int:
        not_copied = self.num_damaged + self.num_unreadable + self.num_refused
        return self.num_copied + self.num_there + not_copied

    def add(self, other: Migrated) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


Call = Callable[[Sequence[BlockKey], Pieces, float], list[Outcome]]
Note = Callable[[int, int], None]
"""Called with the blocks that are done, and all blocks."""


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """URL of a store, and codec and keys of its blocks.

    group: shape of the blocks, for a disk; None for blocks of any shape.
    namespace: for a disk.
    capacity_bytes: of a disk.
    """

    url: str
    coding: CodingConfig = DEFAULT_CODING
    group: KVGroup | None = None
    namespace: bytes = NAMESPACE
    capacity_bytes: int = 0

    def open(self, name: str, block_bytes: int, capacity_bytes: int) -> StorageTier:
        """Open the store for blocks of one size. name: for messages."""
        _, scheme, rest = split_storage(self.url)
        location = f"{name}={scheme}:{rest}"
        group = self.group or opaque(block_bytes)
        capacity = self.capacity_bytes or capacity_bytes
        return make_storage(location, group, capacity, None, self.coding)


def migrate(
    source: StoreAccess,
    target: StoreAccess,
    note: Note,
    is_real: bool = True,
    max_bytes: int = ALL_BYTES,
    takes: Callable[[int], bool] = lambda num_bytes: True,
) -> Migrated:
    """Copy the blocks of the store ``source`` into the store ``target``.

    Args:
        source, target: the stores.
        note: called as blocks are done.
        is_real: False to find out which blocks are in the target already; the others count as
            copied.
        max_bytes: most bytes of blocks, decoded. The last used or written ones are copied.
        takes: return whether the target has room for so many bytes more. Any thread calls it.

    Raises ``ConfigError`` for stores that can't be used, and ``CacheError`` if one stops answering.
    """
    if target.group is None:
        check_places(source.url, target.url)
    keeper = make_keeper(source.url)
    try:
        keeper.test()
        where = keeper.where
        can_be_same = split_storage(target.url)[1] in (*SCHEMES, *PACK_STORES)
        can_be_same &= split_storage(source.url)[1] != PACK_FILE
        batches = (
            _with_mark(keeper, target, max_bytes)
            if is_real and can_be_same
            else _batches(keeper, max_bytes)
        )
        # Of a part of a store, the tier has to know all blocks: it may forget those of this part.
        stored_bytes = (
            sum(entry.num_bytes for entry in keeper.entries()) if max_bytes < ALL_BYTES else 0
        )
    finally:
        keeper.close()
    done, num_all = Migrated(), sum(len(keys) for some in batches.values() for keys in some)
    note(0, num_all)
    for block_bytes, some in sorted(batches.items()):
        num_blocks = sum(map(len, some))
        known_bytes = max(num_blocks * block_bytes, MAX_RATIO * stored_bytes)
        copier = Copier(source, target, block_bytes, num_blocks, is_real, takes, known_bytes)
        try:
            for part in copier.run(some):
                done.add(part)
                note(done.num_blocks, num_all)
        finally:
            copier.close()
    if done.num_unreadable and done.num_unreadable == done.num_blocks:
        raise ConfigError(
            f"{where}: none of its {num_all:,} blocks can be read; give it the key, the secret and "
            "the codec that they were stored with"
        )
    return done


def check_places(source: str, target: str) -> None:
    """Raise ``ConfigError`` for a target that is no store, or is the source."""
    _, scheme, rest = split_storage(target)
    if scheme == PACK_FILE:
        raise ConfigError("TO is a pack file, which is only read; make one with kvtier export")
    if scheme not in STORES:
        is_path = ":" not in target
        folder = f"; for that directory dir://{Path(target).absolute()}" if is_path else ""
        known = "://, ".join(sorted(STORES - {PACK_FILE}))
        raise ConfigError(f"TO is no store; give a URL that begins with {known}://{folder}")
    if place_of(source) == place_of(target):
        raise _same_place(str(read_location(scheme, rest)))


def _same_place(where: str) -> ConfigError:
    return ConfigError(
        f"{where}: FROM and TO are the same place; give TO another prefix, and let the replicas "
        "use that"
    )


def place_of(url: str) -> tuple[object, ...]:
    """Return the place of a store's blocks, with defaults filled in."""
    _, scheme, rest = split_storage(url)
    location = read_location(SCHEMES.get(scheme, scheme), rest)
    if scheme in SCHEMES:
        prefix = read_options(ValkeyOptions, location).prefix
        return "valkey", location.host, location.port or PORT, int(location.path or 0), prefix
    service = SERVICES.get(scheme)
    endpoint = endpoint_of(location, read_options(service.options, location)) if service else ""
    return scheme, location.host, location.port, location.path, endpoint.rstrip("/")


def _with_mark(
    keeper: StoreKeeper, target: StoreAccess, max_bytes: int
) -> dict[int, list[list[BlockKey]]]:
    """Return the keys of the source's blocks; see ``_batches``.

    A block of a random name is in the target meanwhile. If the source has it, too, the two are one
    place under two names, which no comparison of URLs can show.

    Raises ``ConfigError`` then.
    """
    mark, content = BlockKey(os.urandom(32)), np.zeros((1, MARK_BYTES), np.uint8)
    tier = target.open("to", MARK_BYTES, 2 * MARK_BYTES)
    try:
        _tried(tier, partial(_put, NAMESPACE, tier), [mark], content)
    finally:
        tier.close()
    try:
        batches = _batches(keeper, max_bytes)
    finally:
        _remove(mark, target.url)
    if any(mark in keys for some in batches.values() for keys in some):
        raise _same_place(keeper.where)
    return batches


def _remove(mark: BlockKey, target: str) -> None:
    """Remove the block ``mark`` from a store."""
    keeper = make_keeper(target)
    try:
        small = [entry for entry in keeper.entries() if entry.num_bytes <= 3 * MARK_BYTES]
        for start in range(0, len(small), LISTED_AT_ONCE):
            some = small[start : start + LISTED_AT_ONCE]
            found = zip(some, keeper.blocks(some), strict=True)
            marks = [entry for entry, stored in found if stored and stored.keys == [mark]]
            keeper.remove(marks)
            keeper.remove_notes([entry.name for entry in marks], is_real=True)
    finally:
        keeper.close()


def _batches(keeper: StoreKeeper, max_bytes: int) -> dict[int, list[list[BlockKey]]]:
    """Return the keys of the hottest blocks by the size of a block; see ``hottest_batches``."""
    found: dict[int, list[list[BlockKey]]] = defaultdict(list)
    for batch in hottest_batches(keeper, max_bytes):
        found[batch.block_bytes].append(batch.keys)
    return found


def hottest_batches(
    keeper: StoreKeeper, max_bytes: int, only_bytes: int = 0
) -> Iterator[EntryBlocks]:
    """Yield the blocks of a store in batches of one size: the last used or written first.

    The blocks of a pack are a batch, so that they become one again. Each key is yielded once.

    Args:
        keeper: the store. It is listed at the first batch; headers are read as batches are taken.
        max_bytes: most bytes of all batches, decoded.
        only_bytes: size of the wanted blocks; 0 for all sizes.
    """
    seen: set[BlockKey] = set()
    singles: dict[int, list[BlockKey]] = defaultdict(list)
    for stored in _by_age(keeper):
        size = stored.block_bytes
        if only_bytes not in (0, size):
            continue
        if max_bytes < size:
            break
        keys = [key for key in stored.keys if key not in seen][: max_bytes // size]
        seen.update(keys)
        max_bytes -= len(keys) * size
        if len(stored.keys) > 1 and keys:
            yield EntryBlocks(size, keys)
            continue
        singles[size] += keys
        if len(singles[size]) >= max(1, BATCH_BYTES // size):
            yield EntryBlocks(size, singles.pop(size))
    yield from (EntryBlocks(size, keys) for size, keys in singles.items() if keys)


def _by_age(keeper: StoreKeeper) -> Iterator[EntryBlocks]:
    """Yield the blocks of each entry that kvtier has written, the youngest first."""
    entries = sorted(keeper.entries(), key=lambda entry: entry.age_s)
    for start in range(0, len(entries), HEADERS_AT_ONCE):
        found = keeper.blocks(entries[start : start + HEADERS_AT_ONCE])
        yield from (stored for stored in found if stored is not None)


class Copier:
    """Copies blocks of one size. known_bytes: of all blocks that the source may have."""

    def __init__(
        self,
        source: StoreAccess,
        target: StoreAccess,
        block_bytes: int,
        num_blocks: int,
        is_real: bool,
        takes: Callable[[int], bool],
        known_bytes: int,
    ) -> None:
        self._block_bytes = block_bytes
        self._is_real = is_real
        self._takes = takes
        self._put = partial(_put, target.namespace)
        capacity = num_blocks * block_bytes
        self._source = source.open("from", block_bytes, known_bytes)
        try:
            self._target = target.open("to", block_bytes, 2 * capacity)
        except BaseException:
            self._source.close()
            raise
        for tier in (self._source, self._target):
            learn(tier)

    def run(self, batches: Sequence[list[BlockKey]]) -> Iterator[Migrated]:
        """Copy all batches, and yield what became of each."""
        facts = self._source.facts, self._target.facts
        num_threads = min(NUM_AT_ONCE, *(min(each.num_readers, each.num_writers) for each in facts))
        with ThreadPoolExecutor(num_threads) as threads:
            yield from threads.map(self._copy, batches)

    def _copy(self, keys: Sequence[BlockKey]) -> Migrated:
        source, target = self._source, self._target
        read, again = (np.empty((len(keys), self._block_bytes), np.uint8) for _ in range(2))
        found = _tried(target, lambda some, _, limit_s: target.find(some, limit_s), keys, read)
        new = [key for key, outcome in zip(keys, found, strict=True) if outcome is not THERE]
        done = Migrated(num_there=len(keys) - len(new))
        if new and not self._takes(len(new) * self._block_bytes):
            return replace(done, num_refused=len(new))
        if not self._is_real:
            return replace(done, num_copied=len(new), num_bytes=len(new) * self._block_bytes)
        outcomes = _tried(source, source.get, new, read)
        there = [at for at, outcome in enumerate(outcomes) if outcome is THERE]
        done.num_damaged = outcomes.count(DAMAGED)
        done.num_unreadable = outcomes.count(ABSENT)
        copied, content = [new[at] for at in there], read[there]
        _tried(target, partial(self._put, target), copied, content)
        outcomes = _tried(target, target.get, copied, again)
        for outcome, one, other in zip(outcomes, content, again, strict=False):
            is_right = outcome is THERE and bool((one == other).all())
            done.num_copied += is_right
            done.num_bytes += is_right * self._block_bytes
            done.num_damaged += not is_right
        return done

    def close(self) -> None:
        self._source.close()
        self._target.close()


def _put(
    namespace: bytes,
    tier: StorageTier,
    keys: Sequence[BlockKey],
    blocks: Pieces,
    timeout_s: float,
) -> list[Outcome]:
    return tier.put([BlockName(namespace, 0, key) for key in keys], blocks, timeout_s)


def _tried(tier: StorageTier, call: Call, keys: Sequence[BlockKey], rows: Uint8s) -> list[Outcome]:
    """Return the outcomes of a call of ``tier``; it is repeated for keys that failed.

    rows: uint8 [num_blocks, block_bytes], the memory of the first blocks is that of the keys.

    Raises ``CacheError`` if some fail still.
    """
    outcomes = [FAILED] * len(keys)
    blocks = Pieces.whole(rows.ctypes.data + rows.shape[1] * np.arange(len(rows)), rows.shape[1])
    for _ in range(NUM_TRIES):
        left = [at for at, outcome in enumerate(outcomes) if outcome is FAILED]
        found = call([keys[at] for at in left], blocks.pick(left), CALL_S) if left else []
        for at, outcome in zip(left, found, strict=True):
            outcomes[at] = outcome
    if FAILED in outcomes:
        reason = tier.last_error or "no answer, or it is full"
        raise CacheError(
            f"{tier.name}: the store failed ({reason}); what was copied stays: start it again to "
            "copy the rest"
        )
    return outcomes


def learn(tier: StorageTier) -> None:
    """Have a tier that keeps a list of blocks read all of it."""
    while isinstance(tier, StorageWrapper):
        tier = tier.inner
    exchange = getattr(tier, "exchange", None)
    if exchange is not None:
        exchange(CALL_S)
