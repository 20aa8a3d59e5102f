"""The values that every part of kvtier shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType, overload

BlockId = NewType("BlockId", int)
"""A block in the index: a number, never used twice in one index."""

Slot = NewType("Slot", int)
"""Room for one block in a tier: 0 <= slot < num_slots."""

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

    An object for each would keep the collector of garbage busy for longer than it takes to read the
    blocks.
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


class Column(NamedTuple):
    """One tier's blocks of one group of layers. group: its number, 0 for the first."""

    tier: str
    group: int


AnyColumn = str | Column
"""The name of a tier alone is the column of its first group: a model of one group needs no more."""


def column_of(tier: str, group: int) -> AnyColumn:
    """The column of a group in a tier, in its shorter form where there is one."""
    return Column(tier, group) if group else tier


class WritePolicy(StrEnum):
    """When a block of the device tier is stored in the tier below."""

    WRITE_THROUGH = "write_through"
    """When the engine commits it, in batches."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it was used for the n-th time (``CacheConfig.store_after_uses``)."""
    WRITE_BACK = "write_back"
    """When it is evicted from the device tier."""


class LoadPolicy(StrEnum):
    """When cached blocks are loaded."""

    AUTO = "auto"
    """Load if that is predicted to be faster than computing."""
    ALWAYS = "always"
    """Whenever there are some: to compare, and to measure."""


class PrefetchPolicy(StrEnum):
    """Policy for a request whose turn comes while storage is still read for it."""

    BEST_EFFORT = "best_effort"
    """It takes its turn when it comes; the planner decides on what has not arrived by then."""
    WAIT_COMPLETE = "wait_complete"
    """Its turn comes when all that storage has of it is in host memory; others pass meanwhile."""
    TIMEOUT = "timeout"
    """As ``wait_complete``, but for ``CacheConfig.prefetch_timeout_s`` at most."""


class ClientHints(StrEnum):
    """Whether what clients say of their prompts counts; see ``kvtier.hints``."""

    ON = "on"
    """Within the share of a tier that is theirs."""
    OFF = "off"
    """It is read, checked, and ignored."""


class Durability(StrEnum):
    """Failures that an acknowledged block survives."""

    PROCESS = "process"
    """The end of the process, however it comes. After a power cut some blocks may be missing."""
    POWER = "power"
    """A power cut, too: data and journal are on the medium before the acknowledgement."""


class Verify(StrEnum):
    """Loads that compare the checksum. Key and length are always compared."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    """One in several, and what was not yet verified after a crash."""
    OFF = "off"
    """Only what was not yet verified after a crash."""


class Direct(StrEnum):
    """Whether blocks on disk go directly to the engine's memory, past the host tier."""

    AUTO = "auto"
    """Read directly if there is no host tier, or while it is short of free slots."""
    ON = "on"
    """All that a request waits for; the host tier has what was stored, and what is read ahead."""
    OFF = "off"
    """Never."""


class IoKind(StrEnum):
    """I/O engine of the disk."""

    AUTO = "auto"
    URING = "uring"
    PREADV = "preadv"


class LogFormat(StrEnum):
    """Format of a log."""

    TEXT = "text"
    """For people: time, level, logger, words and values."""
    JSON = "json"
    """For programs: an object in each line."""


@dataclass(frozen=True, slots=True)
class Match:
    """Longest cached prefix of a prompt. May be outdated at once: lease before use.

    blocks: the prefix, in prompt order; each is ready in at least one tier.
    tiers: per block the fastest tier that has it ready.
    in_flight: per block, whether it is on its way to the device already.
    num_asked: how many blocks were asked for.
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
        """The same match, cut to its first ``num_blocks`` blocks."""
        return Match(
            self.blocks[:num_blocks],
            self.tiers[:num_blocks],
            self.in_flight[:num_blocks],
            self.num_asked,
        )

    def on_device(self) -> Match:
        """The same match, cut before the first block that is not on the device."""
        elsewhere = (at for at, tier in enumerate(self.tiers) if tier != DEVICE)
        return self.first(next(elsewhere, self.num_blocks))

    def over_groups(self) -> GroupMatch:
        """The same match as one of a single group: every cut is possible."""
        return GroupMatch(
            self.blocks,
            (self.tiers,),
            (self.in_flight,),
            range(1, self.num_blocks + 1),
            self.num_asked,
        )


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """Cached blocks of a prompt, group by group. May be outdated at once: lease before use.

    blocks: the prompt's first ones, up to the last possible cut.
    tiers: [group][block], the fastest tier that has it ready; None where none has.
    in_flight: [group][block], whether it is on its way to the device, and ready elsewhere.
    cuts: after how many blocks compute can go on, because every group has what it needs there;
    ascending, without 0.
    num_asked: how many blocks were asked for.
    """

    blocks: Sequence[BlockId]
    tiers: tuple[tuple[str | None, ...], ...]
    in_flight: tuple[tuple[bool, ...], ...]
    cuts: Sequence[int]
    num_asked: int

    @property
    def num_blocks(self) -> int:
        """Return the longest possible cut."""
        return len(self.blocks)

    def over_groups(self) -> GroupMatch:
        """Return the match itself."""
        return self
