"""Value types that all parts of kvtier share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType, overload

BlockId = NewType("BlockId", int)
"""A block in the index: a number, never used twice in one index."""

NO_BLOCK = BlockId((1 << 63) - 1)
"""Stands for a key that the index does not know, where blocks are numbers in an array."""

Slot = NewType("Slot", int)
"""Index of the memory for one block in a tier: 0 <= slot < num_slots."""

BlockKey = NewType("BlockKey", bytes)
"""Chained hash of a prefix and its namespace: 32 bytes, the same in every process."""


class BlockName(NamedTuple):
    """Name of a block outside its process.

    depth: its position in the prompt, 0 for the first block.
    """

    namespace: bytes
    depth: int
    key: BlockKey


class BlockNames(Sequence[BlockName]):
    """Names of many blocks, as three lists.

    With one object per block, garbage collection would take longer than reading the blocks.
    """

    __slots__ = ("depths", "keys", "namespaces")

    def __init__(
        self, namespaces: Sequence[bytes], depths: Sequence[int], keys: Sequence[BlockKey]
    ) -> None:
        self.namespaces, self.depths, self.keys = namespaces, depths, keys

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> BlockName: ...
    @overload
    def __getitem__(self, at: slice) -> BlockNames: ...
    def __getitem__(self, at: int | slice) -> BlockName | BlockNames:
        if isinstance(at, slice):
            return BlockNames(self.namespaces[at], self.depths[at], self.keys[at])
        return BlockName(self.namespaces[at], self.depths[at], self.keys[at])

    def __iter__(self) -> Iterator[BlockName]:
        return map(BlockName, self.namespaces, self.depths, self.keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (BlockNames, list, tuple)):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none


def keys_of(names: Sequence[BlockName]) -> Sequence[BlockKey]:
    """Return the key of each name."""
    return names.keys if isinstance(names, BlockNames) else [name.key for name in names]


Label = bytes
"""Name of a block under its parent: its token ids, or a hash from the engine."""

DEVICE = "device"
HOST = "host"
DISK = "disk"


class WritePolicy(StrEnum):
    """When a block of the device tier is stored in the tier below."""

    WRITE_THROUGH = "write_through"
    """When the engine commits it, in batches."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it has been used ``CacheConfig.store_after_uses`` times."""
    WRITE_BACK = "write_back"
    """When it is evicted from the device tier."""


class LoadPolicy(StrEnum):
    """When cached blocks are loaded."""

    AUTO = "auto"
    """Load if that is predicted to be faster than computing."""
    ALWAYS = "always"
    """Load whenever blocks are cached: for comparisons and measurements."""


class CacheMode(StrEnum):
    """Whether an engine loads from the cache and stores into it."""

    BOTH = "both"
    """Load and store."""
    SAVE_ONLY = "save_only"
    """Store only: look-ups find nothing, and ask no tier."""
    LOAD_ONLY = "load_only"
    """Load only: no memory is reserved for what the engine computes."""

    @property
    def loads(self) -> bool:
        return self is not CacheMode.SAVE_ONLY

    @property
    def stores(self) -> bool:
        return self is not CacheMode.LOAD_ONLY


class PrefetchPolicy(StrEnum):
    """Policy for a queued request whose blocks are still being read from storage."""

    BEST_EFFORT = "best_effort"
    """Schedule it as usual; the planner decides on blocks that have not arrived by then."""
    WAIT_COMPLETE = "wait_complete"
    """Schedule it once all its blocks in storage are in host memory; other requests may pass it."""
    TIMEOUT = "timeout"
    """Like ``wait_complete``, but wait at most ``CacheConfig.prefetch_timeout_s``."""


class ClientHints(StrEnum):
    """Whether hints of clients are used; see ``kvtier.core.hints``."""

    ON = "on"
    """Use hints, within the share of a tier that hints may protect."""
    OFF = "off"
    """Check hints, and ignore them."""


class Durability(StrEnum):
    """Failures that an acknowledged block survives."""

    PROCESS = "process"
    """Any end of the process. After a power failure some blocks may be missing."""
    POWER = "power"
    """Also a power failure: data and journal are flushed before the acknowledgement."""


class Verify(StrEnum):
    """Loads for which the checksum is verified. Key and length are always compared."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    """One in several loads, and blocks not yet verified after a crash."""
    OFF = "off"
    """Only blocks not yet verified after a crash."""


class Direct(StrEnum):
    """Whether blocks on disk go directly to the engine's memory, past the host tier."""

    AUTO = "auto"
    """Read directly if there is no host tier, or while it is short of free slots."""
    ON = "on"
    """Read directly all blocks that a request waits for. Only stores and prefetches use the host
    tier."""
    OFF = "off"
    """Never read directly."""


class IoKind(StrEnum):
    """I/O engine of the disk."""

    AUTO = "auto"
    URING = "uring"
    PREADV = "preadv"


class LogFormat(StrEnum):
    """Format of a log."""

    TEXT = "text"
    """Plain text: time, level, logger, message and values."""
    JSON = "json"
    """One JSON object per line."""


@dataclass(frozen=True, slots=True)
class Match:
    """Longest cached prefix of a prompt. Blocks may be evicted any time: lease before use.

    Attributes:
        blocks: the prefix, in prompt order; each is ready in at least one tier.
        tiers: per block, the fastest tier that has it ready.
        in_flight: per block, whether it is being copied to the device already.
        num_asked: number of blocks requested.
    """

    blocks: Sequence[BlockId]
    tiers: tuple[str, ...]
    in_flight: tuple[bool, ...]
    num_asked: int

    @property
    def num_blocks(self) -> int:
        """Blocks that are ready, counted from the start of the prompt."""
        return len(self.blocks)

    def first(self, num_blocks: int) -> Match:
        """Return the match cut to its first ``num_blocks`` blocks."""
        return Match(
            self.blocks[:num_blocks],
            self.tiers[:num_blocks],
            self.in_flight[:num_blocks],
            self.num_asked,
        )

    def on_device(self) -> Match:
        """Return the match cut before the first block that is not on the device."""
        elsewhere = (at for at, tier in enumerate(self.tiers) if tier != DEVICE)
        return self.first(next(elsewhere, self.num_blocks))

    def over_groups(self) -> GroupMatch:
        """Return the match as one of a single group, where every cut is possible."""
        return GroupMatch(
            self.blocks,
            (self.tiers,),
            (self.in_flight,),
            range(1, self.num_blocks + 1),
            self.num_asked,
        )


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """Cached blocks of a prompt, by group. Blocks may be evicted any time: lease before use.

    Attributes:
        blocks: the prompt's first blocks, up to the last possible cut.
        tiers: [group][block], the fastest tier that has it ready; None if no tier has.
        in_flight: [group][block], whether it is being copied to the device from another tier.
        cuts: numbers of blocks after which compute can continue, because every group has what it
            needs there; ascending, without 0.
        num_asked: number of blocks requested.
    """

    blocks: Sequence[BlockId]
    tiers: tuple[tuple[str | None, ...], ...]
    in_flight: tuple[tuple[bool, ...], ...]
    cuts: Sequence[int]
    num_asked: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest possible cut."""
        return len(self.blocks)

    def over_groups(self) -> GroupMatch:
        """Return the match itself."""
        return self
