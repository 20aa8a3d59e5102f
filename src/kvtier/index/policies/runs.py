"""The policy that learns which prompts are used again, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier._reference.live import LIVE
from kvtier._reference.live_runs import Place
from kvtier._reference.runs import Block
from kvtier.hints import Said
from kvtier.index.policies.base import EvictionPolicy
from kvtier.index.residency import Residency, State
from kvtier.types import BlockId

USUAL_ROOM = 1 << 16
"""Blocks, until it is known."""
SEED = 7


class PromptPolicy(EvictionPolicy):
    """A policy that is told of requests, over a column of the trie: the twin of the native core's
    of the same name."""

    knows_prompts = True

    def __init__(self) -> None:
        self._blocks: dict[BlockId, Block] = {}
        self._candidates: set[BlockId] = set()
        self._residency_of: Callable[[BlockId], Residency] = lambda block: Residency()
        make = LIVE[self.native_name]
        self._live = make(USUAL_ROOM, SEED, self._may_leave, lambda name: None)

    def see(self, residency_of: Callable[[BlockId], Residency]) -> None:
        self._residency_of = residency_of

    def _may_leave(self, block: Block, num_gone: int) -> bool:
        it = self._residency_of(BlockId(block.item))
        return it.state is State.READY and it.leases == 0 and it.num_children == num_gone

    def set_room(self, num_blocks: int) -> None:
        self._live.set_capacity(num_blocks)

    def asked(self, path: Sequence[int], found: Sequence[BlockId], now: float) -> None:
        self._live.asked(path, [self._blocks[block] for block in found], now)

    def retain(self, path: Sequence[int], found: Sequence[BlockId], said: Said, now: float) -> None:
        self._live.retain(path, [self._blocks[block] for block in found], said, now)

    def set_doubling(self, at_blocks: float) -> None:
        self._live.set_doubling(at_blocks)

    def admit(
        self, names: Sequence[int], num_free: int, least_chance: float = 0.0
    ) -> Sequence[int]:
        return self._live.admit(names, num_free, least_chance)

    def entered(self, block: BlockId, name: int, parent: BlockId | None, at: int) -> None:
        above = None if parent is None else self._blocks[parent]
        self._blocks[block] = self._live.entered(name, block, Place(above, at))

    def touch(self, block: BlockId, now: float) -> None:
        """Requests count, not blocks."""

    def add(self, block: BlockId) -> None:
        self._candidates.add(block)
        self._live.let_go(self._blocks[block])

    def discard(self, block: BlockId) -> None:
        self._candidates.discard(block)

    def forget(self, block: BlockId) -> None:
        self._candidates.discard(block)
        known = self._blocks.pop(block, None)
        if known is not None:
            self._live.left(known)

    def begin_evicting(self) -> None:
        self._live.begin_evicting()

    def victim(self) -> BlockId | None:
        left = self._live.next_victim()
        if left is None:
            return None
        block = BlockId(left.item)
        del self._blocks[block]
        return block

    def candidates(self) -> set[BlockId]:
        return set(self._candidates)

    def check_invariants(self) -> None:
        self._live.check_invariants()
        assert len(self._blocks) == self._live.num_blocks, "a block is lost"


class RunsPolicy(PromptPolicy):
    """The policy that works on runs."""

    native_name = "runs"
