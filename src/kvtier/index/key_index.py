"""The index for engines that bring keys: a key names a whole prefix, there is no path to walk.

The native core and a Python twin implement it. Both number blocks in the same way, and under LRU
choose the same victims, so tests compare them. Other policies exist in the native core only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.hints import Said
from kvtier.index.block_index import BlockIndex
from kvtier.index.policies.replayed import LRU, POLICIES, RUNS
from kvtier.index.residency import State
from kvtier.keys import next_key
from kvtier.types import AnyColumn, BlockId, BlockName, Slot

UNKNOWN = 0
"""In ``KeyMatches.states``: the index does not know the block."""


class KeyMatches(NamedTuple):
    """Result of ``KeyIndex.find_all``.

    blocks: one of each key, None where it is not known. states: key by key, the number of the
    ``State`` in every tier; ``UNKNOWN`` in all of them where the block is not known.
    """

    blocks: list[BlockId | None]
    states: bytes


@dataclass(frozen=True, slots=True)
class KeyedBlock:
    """A block as it is now; per tier its state, slot (-1 for none) and leases."""

    block: BlockId
    key: bytes
    num_uses: int
    depth: int
    places: tuple[tuple[State, Slot, int], ...]


class KeyIndex(BlockIndex):
    """Index of blocks by key.

    A column has them in one order: who was used longest ago leaves first; of the blocks of one use,
    those at the end of the prompt. The order is that of the calls: the times that they bring are
    not looked at.

    What an eviction meets and may not take, for it is held or being written, leaves the order until
    it is let go of, and is then the next to leave. So no call takes longer where more is held, and
    every call takes constant time per block, however many there are.

    tiers: fastest tier first. namespace: digest of all else that decides on the bytes of a block.
    learning: tiers in which ``policy`` decides what leaves, by the requests and at the times that
    it is told of; none where that is ``lru``, which this order is. Keys have 1 to 256 bytes, and as
    many as the first one had: ValueError otherwise, and for a policy that there is not.

    group_bytes: for models with several groups of layers, how many bytes at the end of a key name
    the group. Keys that are alike but for these are of one *place* in a prompt. Where a policy
    decides, its blocks leave together, those of groups that have none there left out; an eviction
    may take more blocks than it was asked for, to the end of a place.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        namespace: Callable[[], bytes],
        learning: Collection[str] = (),
        policy: str = RUNS,
        group_bytes: int = 0,
    ) -> None:
        self.tiers = tuple(tiers)
        self.policy = policy
        if policy not in POLICIES:
            raise ValueError(f"no policy is called {policy!r}; there are {', '.join(POLICIES)}")
        self.learning = tuple(tier for tier in tiers if tier in learning and policy != LRU)
        self._namespace = namespace

    @property
    def policies(self) -> str:
        """In words, what decides on what leaves."""
        return self.policy if self.learning else LRU

    # -- queries ----------------------------------------------------------------------------------

    @abstractmethod
    def find_all(self, keys: Sequence[bytes]) -> KeyMatches:
        """The blocks of ``keys``, and where they stand."""

    def find(self, key: bytes) -> tuple[BlockId, tuple[State, ...]] | None:
        """The block of ``key``, and where it stands in each of ``tiers``.

        None where it is not known.
        """
        [block], states = self.find_all((key,))
        return None if block is None else (block, tuple(map(State, states)))

    @abstractmethod
    def keys(self, blocks: Iterable[BlockId]) -> list[bytes]:
        """Return the engine's key of each block."""

    def name(self, block: BlockId) -> BlockName:
        return self.names([block])[0]

    def names(self, blocks: Sequence[BlockId]) -> list[BlockName]:
        namespace = self._namespace()
        known = zip(map(self.depth, blocks), self.keys(blocks), strict=True)
        return [BlockName(namespace, depth, next_key(namespace, key)) for depth, key in known]

    def prefixes(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[BlockId]:
        """None: only the engine knows which block continues which."""
        return []

    @abstractmethod
    def depth(self, block: BlockId) -> int:
        """Place of the block in its prompt, as ``set_depths`` said; 0 before."""

    # -- writing ----------------------------------------------------------------------------------

    def expect(self, num_blocks: int) -> None:
        """There will be about ``num_blocks``, at most 2**32 - 1.

        What finds them is made now, and not piece by piece beside requests.
        """
        return

    @abstractmethod
    def make(self, keys: Sequence[bytes]) -> Sequence[BlockId]:
        """Numbers of blocks, known or new. Begin a write of a new one before anything else."""

    @abstractmethod
    def set_depths(self, blocks: Sequence[BlockId], depths: Sequence[int]) -> None:
        """Places of blocks in their prompts."""

    # -- requests, where a policy learns -----------------------------------------------------------

    @abstractmethod
    def on_request(self, keys: Iterable[bytes], now: float) -> None:
        """Report a request that begins.

        To be told once of each, with all of its prompt from the first block on, known or not,
        before anything is written for it. Keys of one place come together.
        """

    @abstractmethod
    def retain(self, keys: Iterable[bytes], said: Said, now: float) -> None:
        """Somebody says something of a prompt, which is given as to ``on_request``.

        ValueError for what nobody can mean.
        """

    @abstractmethod
    def continues(self, keys: Iterable[bytes], before: bytes) -> None:
        """Place blocks of an answer one behind the other, and behind the block ``before``.

        They were in no request yet. To be told before they are written.
        """

    @abstractmethod
    def admit_keys(
        self, keys: Sequence[bytes], column: AnyColumn, num_free: int, least_chance: float = 0.0
    ) -> list[bytes]:
        """``admit``, of blocks that may not be known."""

    def admit(
        self,
        blocks: Sequence[BlockId],
        column: AnyColumn,
        num_free: int,
        least_chance: float = 0.0,
    ) -> Sequence[BlockId]:
        keys = self.keys(blocks)
        admitted = set(self.admit_keys(keys, column, num_free, least_chance))
        return [block for block, key in zip(blocks, keys, strict=True) if key in admitted]

    # -- for tests --------------------------------------------------------------------------------

    @abstractmethod
    def known(self) -> list[KeyedBlock]:
        """Return all known blocks."""

    @abstractmethod
    def order(self, column: AnyColumn) -> Sequence[BlockId]:
        """Blocks of ``column`` that an eviction would look at, in this order."""
