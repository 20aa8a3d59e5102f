"""Interface of the flat index, for engines that name blocks by keys of whole prefixes.

The native core and a Python class implement it. Both assign the same block numbers, and choose the
same victims under LRU, so tests compare them. Other policies exist only in the native core.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.core.hints import BlockHint
from kvtier.core.keys import child_keys
from kvtier.core.types import NO_BLOCK, BlockId, BlockName, Slot
from kvtier.index.block_index import BlockIndex
from kvtier.index.policies.replayed import LRU, POLICIES
from kvtier.index.residency import State
from kvtier.index.selection import as_array, select
from kvtier.index.slot_leases import PythonSlotLeases, SlotArrays, SlotLeases

UNKNOWN = 0
"""State in ``KeyMatches.states`` of a block that the index does not know."""


class KeyMatches(NamedTuple):
    """Result of ``KeyIndex.find_all``.

    blocks: the block of each key; ``NO_BLOCK`` if it is unknown.
    states: for each key one byte per tier, the value of the ``State``; ``UNKNOWN`` for an unknown
        block.
    """

    blocks: Sequence[BlockId]
    states: bytes

    @property
    def known(self) -> Sequence[BlockId]:
        """The blocks that the index knows, in the order of their keys."""
        if UNKNOWN not in self.states:
            return self.blocks
        return select(self.blocks, as_array(self.blocks) != NO_BLOCK)


class MissingKeys(NamedTuple):
    """Result of ``KeyIndex.missing``.

    keys: the missing keys, each once. ready: the blocks of other keys that are ready.
    """

    keys: Sequence[bytes]
    ready: Sequence[BlockId]


@dataclass(frozen=True, slots=True)
class KeyedBlock:
    """Snapshot of a block. places: per tier its state, slot (-1 for none) and leases."""

    block: BlockId
    key: bytes
    num_uses: int
    depth: int
    places: tuple[tuple[State, Slot, int], ...]


class KeyIndex(BlockIndex):
    """Index of blocks by key.

    By default a tier evicts its blocks in LRU order, and blocks of the same use from the end of
    the prompt to its start. The order of the calls counts; their times are ignored.

    If an eviction meets a block that is leased or being written, the block is taken out of the
    order. When it becomes evictable, it is the next victim. So every call takes constant time per
    block, no matter how many blocks are leased.

    All keys have the same length, 1 to 256 bytes.

    Args:
        policies: policy of each tier, fastest tier first: one of ``POLICIES``. All but ``lru``
            choose the victims from the requests that are reported to them.
        namespace: returns the digest of everything else that determines the bytes of a block.
        group_bytes: for models with several groups of layers, the number of bytes at the end of a
            key that name the group. Keys that differ only in these bytes belong to the same *place*
            in a prompt. A policy evicts all blocks of a place together, so an eviction may take
            more blocks than requested.

    Raises:
        ValueError: a policy is unknown. Calls with a key of a wrong length raise it, too.
    """

    def __init__(
        self,
        policies: Mapping[str, str],
        namespace: Callable[[], bytes],
        group_bytes: int = 0,
    ) -> None:
        self.tiers, self._policies = tuple(policies), tuple(policies.values())
        for policy in self._policies:
            if policy not in POLICIES:
                raise ValueError(f"no policy is called {policy!r}; there are {', '.join(POLICIES)}")
        self._namespace = namespace

    @property
    def learns(self) -> bool:
        """Whether some tier's policy chooses the victims from the requests reported to it."""
        return any(policy != LRU for policy in self._policies)

    # -- queries ----------------------------------------------------------------------------------

    @abstractmethod
    def find_all(self, keys: Collection[bytes]) -> KeyMatches:
        """Return the blocks of ``keys``, and their states in each tier."""

    def find(self, key: bytes) -> tuple[BlockId, tuple[State, ...]] | None:
        """Return the block of ``key`` and its state in each of ``tiers``; None if unknown."""
        [block], states = self.find_all((key,))
        return None if block == NO_BLOCK else (block, tuple(map(State, states)))

    @abstractmethod
    def missing(self, keys: Collection[bytes], tier: str) -> MissingKeys:
        """Return the keys of the blocks that ``tier`` neither has nor is being filled with."""

    @abstractmethod
    def hashes(self, blocks: Sequence[BlockId]) -> Sequence[int]:
        """Return a number per block that follows from its key: 0 <= number < 2**63."""

    @abstractmethod
    def in_slots(self, slots: Collection[Slot], tier: str) -> Sequence[BlockId]:
        """Return the blocks in slots of ``tier``. O(all blocks)."""

    @abstractmethod
    def keys(self, blocks: Iterable[BlockId]) -> list[bytes]:
        """Return the key of each block, as the engine gave it."""

    def names(self, blocks: Sequence[BlockId]) -> list[BlockName]:
        namespace = self._namespace()
        known = zip(map(self.depth, blocks), child_keys(namespace, self.keys(blocks)), strict=True)
        return [BlockName(namespace, depth, key) for depth, key in known]

    def prefixes(self, blocks: Iterable[BlockId], tier: str) -> Sequence[BlockId]:
        """Return nothing: only the engine knows which block continues which."""
        return []

    @abstractmethod
    def depth(self, block: BlockId) -> int:
        """Return the position of the block in its prompt, set by ``set_depths``; 0 before."""

    def facts(self, blocks: Sequence[BlockId]) -> tuple[bytes, Sequence[int]]:
        """Return the keys of blocks, one after the other, and their depths."""
        return b"".join(self.keys(blocks)), [self.depth(block) for block in blocks]

    # -- writing ----------------------------------------------------------------------------------

    def expect(self, num_blocks: int) -> None:
        """Allocate the tables for about ``num_blocks`` blocks, at most 2**32 - 1.

        So they need not grow while requests are served.
        """
        return

    @abstractmethod
    def make(self, keys: Sequence[bytes]) -> Sequence[BlockId]:
        """Return the blocks of ``keys``; make unknown ones.

        The caller begins a write of each new block before it calls anything else.
        """

    def write_new(
        self, keys: Sequence[bytes], tier: str, slots: Sequence[Slot], now: float
    ) -> tuple[Sequence[BlockId], Sequence[int]]:
        """Note that the blocks of keys are written to slots, and used; make unknown ones.

        keys: blocks of one prompt that ``tier`` has not, in its order. Returns the blocks, and
        their ``hashes``.
        """
        blocks = self.make(keys)
        self.begin_write(blocks, tier, slots)
        self.touch(blocks, now)
        return blocks, self.hashes(blocks)

    def commit_prompt(
        self, blocks: Sequence[BlockId], depths: Sequence[int], tier: str, now: float
    ) -> None:
        """Note that blocks of one prompt, in its order, are in their slots.

        The first ones are evicted last. depths: see ``set_depths``.
        """
        self.set_depths(blocks, depths)
        self.commit(blocks[::-1], tier, now)

    @abstractmethod
    def set_depths(self, blocks: Sequence[BlockId], depths: Sequence[int]) -> None:
        """Set the positions of blocks in their prompts."""

    # -- requests, where a policy learns -----------------------------------------------------------

    def set_num_last(self, num_blocks: int) -> None:
        """Set how many of the last blocks of a prompt will be written, if not all.

        For KV that a prompt needs only in front of a cut, such as a window's or a state. Policies
        count these blocks of a prompt, and those of its other blocks that are cached already.
        """
        return

    @abstractmethod
    def on_request(self, keys: Iterable[bytes], now: float) -> None:
        """Report a new request to learning policies.

        Called once per request, before any of its blocks is written.

        keys: keys of all blocks of its prompt, known or not, in order. Keys of the same place are
        neighbours.
        """

    @abstractmethod
    def retain(self, keys: Iterable[bytes], block_hint: BlockHint, now: float) -> None:
        """Apply a hint on a prompt's future use. keys: see ``on_request``.

        Raises ValueError for an invalid hint.
        """

    @abstractmethod
    def continues(self, keys: Iterable[bytes], before: bytes) -> None:
        """Report blocks of an answer, which continue the block ``before`` in order.

        No request has contained them yet. Called before they are written.
        """

    @abstractmethod
    def admit_keys(
        self, keys: Sequence[bytes], tier: str, num_free: int, least_chance: float = 0.0
    ) -> Sequence[bytes]:
        """Return the keys of the blocks to admit; see ``admit``. The blocks may be unknown."""

    def admit(
        self,
        blocks: Sequence[BlockId],
        tier: str,
        num_free: int,
        least_chance: float = 0.0,
    ) -> Sequence[BlockId]:
        keys = self.keys(blocks)
        admitted = set(self.admit_keys(keys, tier, num_free, least_chance))
        return [block for block, key in zip(blocks, keys, strict=True) if key in admitted]

    # -- use --------------------------------------------------------------------------------------

    def slot_leases(
        self,
        tier: str,
        arrays: SlotArrays,
        num_leases: npt.NDArray[np.uint32],
        is_reserved: npt.NDArray[np.bool_],
        bit: int,
        keeps: int,
    ) -> SlotLeases:
        """Return the leases of one user on slots of ``tier``; see ``PythonSlotLeases``."""
        return PythonSlotLeases(self, tier, arrays, num_leases, is_reserved, bit, keeps)

    # -- for tests --------------------------------------------------------------------------------

    @abstractmethod
    def known(self) -> list[KeyedBlock]:
        """Return all known blocks."""

    @abstractmethod
    def order(self, tier: str) -> Sequence[BlockId]:
        """Return the blocks of ``tier`` in the order in which evictions examine them."""
