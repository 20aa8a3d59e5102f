"""Admission: which blocks a tier admits, which storage stores, and which are transient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvtier.cache.ladder.topology import Topology
from kvtier.cache.ladder.transfers import Transfers
from kvtier.cache.ladder.write_queues import WriteQueues
from kvtier.core.types import BlockId
from kvtier.index import BlockIndex, KeyIndex, State

Item = TypeVar("Item", BlockId, bytes)

Ask = Callable[[Sequence[Item], str, int, float], Sequence[Item]]
"""Admission by a tier's policy, as ``BlockIndex.admit``: takes (items, tier, free slots, least
probability of a use), and returns the items admitted."""


class Admitted(NamedTuple, Generic[Item]):
    """Items that a tier admits. passing: those among ``items`` that are transient."""

    items: Sequence[Item]
    passing: Collection[Item] = ()


class TransientBlocks:
    """Tracks blocks that are in staging memory only while they pass to storage, or from it.

    ``note`` marks newly arrived blocks that the policy would not admit. Once such a block has been
    written, or read by the request that needed it, it is evicted before all others. Until then it
    is evicted like any other block.
    """

    def __init__(
        self, topology: Topology, index: BlockIndex, transfers: Transfers, write_queues: WriteQueues
    ) -> None:
        self._memory = topology.staging
        self._room = topology.allocators[topology.staging]
        self._index = index
        self._transfers = transfers
        self._write_queues = write_queues
        self._passing: set[BlockId] = set()
        self._passed: dict[BlockId, None] = {}  # in the order of eviction

    def note(self, blocks: Collection[BlockId], passing: Collection[BlockId]) -> None:
        """Note blocks that enter memory. Those in ``passing`` are transient."""
        self.on_evict(blocks)
        self._passing.update(passing)

    def on_evict(self, blocks: Collection[BlockId]) -> None:
        """Forget blocks that are evicted from memory."""
        if self._passing:
            self._passing.difference_update(blocks)
        if self._passed:
            for block in self._passed.keys() & set(blocks):
                del self._passed[block]

    def passed(self, blocks: Sequence[BlockId]) -> None:
        """Note that a copy of blocks from memory has ended.

        Transient blocks may then be evicted, unless they wait for another write to storage.
        """
        if not self._passing or self._passing.isdisjoint(blocks):
            return
        mine = [block for block in blocks if block in self._passing]
        over = [block for block in mine if not self._write_queues.has(block)]
        self._passing.difference_update(over)
        self._passed.update(dict.fromkeys(reversed(over)))

    def make(self, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` transient blocks that have been copied and are not leased.

        Returns how many were evicted.
        """
        if not self._passed:  # as usual
            return 0
        gone: list[BlockId] = []
        while self._passed and len(gone) < num_blocks:
            block = next(iter(self._passed))
            del self._passed[block]
            is_ready = self._index.state(block, self._memory) is State.READY
            if is_ready and not self._index.num_leases(block, self._memory):
                gone.append(block)
        self._transfers.report(self._memory, gone, is_removed=True)
        slots = [self._index.lose(block, self._memory) for block in gone]
        self._room.free([slot for slot in slots if slot is not None])
        return len(gone)


class Admission:
    """Queries the tiers' policies on which blocks to admit.

    Each tier's policy decides for its tier alone. Storage is written from memory, so a block that
    only storage admits passes through memory as a transient block.
    """

    def __init__(
        self,
        topology: Topology,
        index: BlockIndex,
        transient_blocks: TransientBlocks,
        write_queues: WriteQueues,
    ) -> None:
        self._topology = topology
        self._transient_blocks = transient_blocks
        self._index = index
        self._write_queues = write_queues

    def admit(self, blocks: Sequence[BlockId], tier: str) -> Sequence[BlockId]:
        """Return those of ``blocks`` that ``tier`` admits. The tier has none of them yet."""
        if tier in self._topology.storages:
            return self._worth_a_write(blocks, tier, self._index.admit)
        admitted = self._let_in(blocks, tier, self._index.admit, self._lacking)
        if tier == self._topology.staging:
            self._transient_blocks.note(*admitted)
        return admitted.items

    def admit_read(self, blocks: Sequence[BlockId], memory: str) -> None:
        """Note that requested blocks are about to be read from storage into ``memory``.

        All are read. Blocks that the policy does not admit are transient.
        """
        num_free = self._topology.allocators[memory].num_free
        if len(blocks) <= num_free:
            self._transient_blocks.note(blocks, ())
            return
        stay = set(self._index.admit(blocks, memory, num_free))
        self._transient_blocks.note(blocks, [block for block in blocks if block not in stay])

    def admit_keys(self, index: KeyIndex, keys: Sequence[bytes], tier: str) -> Admitted[bytes]:
        """Like ``admit``, for blocks that the index may not know yet. The caller notes transients.

        Returns the keys admitted, and those among them that are transient.
        """

        def lacking(rest: Sequence[bytes], storage: str) -> Sequence[bytes]:
            its = index.find_all(rest).states[index.tiers.index(storage) :: len(index.tiers)]
            return [key for key, state in zip(rest, its, strict=True) if state <= State.ABSENT]

        return self._let_in(keys, tier, index.admit_keys, lacking)

    def _lacking(self, blocks: Sequence[BlockId], storage: str) -> Sequence[BlockId]:
        states = self._index.states_of(blocks, storage)
        return [block for block, at in zip(blocks, states, strict=True) if at is State.ABSENT]

    def _let_in(
        self,
        items: Sequence[Item],
        memory: str,
        ask: Ask[Item],
        lacking: Callable[[Sequence[Item], str], Sequence[Item]],
    ) -> Admitted[Item]:
        num_free = self._topology.allocators[memory].num_free
        stay = items if len(items) <= num_free else ask(items, memory, num_free, 0.0)
        is_passage = memory == self._topology.staging and self._write_queues.is_open
        if len(stay) == len(items) or not is_passage:
            return Admitted(stay)
        staying, passing = set(stay), set[Item]()
        rest = [item for item in items if item not in staying]
        for storage in self._topology.writable:
            passing.update(self._worth_a_write(lacking(rest, storage), storage, ask))
        return Admitted([item for item in items if item in staying or item in passing], passing)

    def _worth_a_write(self, items: Sequence[Item], storage: str, ask: Ask[Item]) -> Sequence[Item]:
        num_free = self._topology.allocators[storage].num_free
        least_chance = self._write_queues.least_chance(storage, len(items) > num_free)
        if len(items) <= num_free and not least_chance:
            return items
        return ask(items, storage, num_free, least_chance)
