"""Policies that keep blocks in queues, in a tier of a running cache: the twin of
``native/policy/live_queues.hpp``, which says what is parked, and when it comes back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtier._reference.live_runs import EXPECTED_SHARE, FEWEST_EXPECTED, Place
from kvtier._reference.queues import Entry, Queues
from kvtier._reference.run_policy import MayLeave
from kvtier._reference.runs import Block
from kvtier.hints import Said


class _Expected(NamedTuple):
    before: int
    at: int


class LiveQueues:
    """find: the resident block of a name, if there is one."""

    def __init__(
        self,
        queues: Queues,
        capacity: int,
        may_leave: MayLeave,
        find: Callable[[int], Block | None],
    ) -> None:
        self._queues = queues
        self._keeper_may_leave = may_leave
        self._find = find
        self._entries: dict[Block, Entry] = {}
        self._expected: OrderedDict[int, _Expected] = OrderedDict()
        self._most_expected = max(FEWEST_EXPECTED, capacity // EXPECTED_SHARE)

    @property
    def num_blocks(self) -> int:
        return len(self._entries)

    @property
    def num_history(self) -> int:
        return self._queues.num_history

    def set_capacity(self, capacity: int) -> None:
        self._queues.set_capacity(capacity)

    # -- requests ---------------------------------------------------------------------------------

    def asked(self, path: Sequence[int], found: Sequence[Block], now: float) -> None:
        self.use(path, found)
        for at in range(len(found), len(path)):
            self._expect(path[at], _Expected(path[at - 1] if at else 0, at))

    def use(self, path: Sequence[int], found: Sequence[Block]) -> None:
        """The same, where the places of all blocks that come will be known."""
        self._settle(found)
        for at in reversed(range(len(path))):
            in_tier = at < len(found)
            entry = self._entries[found[at]] if in_tier else self._queues.find(path[at])
            if entry is None:
                continue
            if entry.is_resident:
                self._queues.hit(entry)
            else:
                self._queues.missed(entry)

    def _expect(self, name: int, it: _Expected) -> None:
        self._expected.pop(name, None)
        if len(self._expected) == self._most_expected:
            self._expected.popitem(last=False)
        self._expected[name] = it

    def _settle(self, found: Sequence[Block]) -> None:
        before: Block | None = None
        for block in found:
            parent = block.parent
            block.hang_below(before)
            if parent is not None and parent is not before:
                self.let_go(parent)
            before = block

    # -- what comes -------------------------------------------------------------------------------

    def continues(self, names: Sequence[int], before: int) -> None:
        at = 0
        block, known = self._find(before), self._expected.get(before)
        if block is not None:
            at = self._place_behind(block)
        elif known is not None:
            at = known.at + 1
        for name in names:
            if name not in self._expected and self._find(name) is None:
                self._expect(name, _Expected(before, at))
            before, at = name, at + 1

    def retain(self, path: Sequence[int], found: Sequence[Block], said: Said, now: float) -> None:
        """Queues go by what is asked for."""

    def set_doubling(self, doubles_at_blocks: float) -> None:
        """All blocks are worth the same."""

    def admit(self, names: Sequence[int], num_free: int, least_chance: float = 0.0) -> list[int]:
        end = num_new = 0
        for name in names:
            entry = self._queues.find(name)
            num_new += entry is None or entry.is_resident
            if num_new - num_free > self._queues.most_new():
                break
            end += 1
        for name in reversed(names[end:]):
            self._queues.turn_away(name)
        return list(range(end))

    def entered(
        self, name: int, item: int, place: Place | None, behind: Block | None = None
    ) -> Block:
        parent, at = place or self._place_of(name, behind)
        self._expected.pop(name, None)
        block = Block(name, None, item)
        block.hang_below(parent)
        self._entries[block] = self._queues.enter(name, block, at)
        return block

    def _place_of(self, name: int, behind: Block | None) -> Place:
        known = self._expected.get(name)
        if known is not None:
            return Place(self._find(known.before) if known.at else None, known.at)
        return Place(behind, 0 if behind is None else self._place_behind(behind))

    def _place_behind(self, block: Block) -> int:
        return self._entries[block].at + 1

    # -- what leaves ------------------------------------------------------------------------------

    def _may_leave(self, block: Block) -> bool:
        return block.num_children == 0 and self._keeper_may_leave(block, 0)

    def let_go(self, block: Block) -> None:
        entry = self._entries.get(block)
        if entry is not None and block.num_children == 0:
            self._queues.come_back(entry)

    def begin_evicting(self) -> None:
        self._queues.begin_evicting()

    def next_victim(self) -> Block | None:
        block = self._queues.leave(self._may_leave)
        if block is not None:
            self._drop(block)
        return block

    def left(self, block: Block) -> None:
        self._queues.remove(self._entries[block])
        self._drop(block)
        block.item = -1

    def _drop(self, block: Block) -> None:
        del self._entries[block]
        parent = block.parent
        block.hang_below(None)
        if parent is not None:
            self.let_go(parent)

    def check_invariants(self) -> None:
        """Raise AssertionError where queues and blocks disagree."""
        self._queues.check_invariants()
        assert self._queues.num_blocks == len(self._entries), "a block is lost"
        num_children: dict[Block, int] = {}
        for block in self._entries:
            if block.parent is not None:
                num_children[block.parent] = num_children.get(block.parent, 0) + 1
        for block, entry in self._entries.items():
            assert block.num_children == num_children.get(block, 0), "children are miscounted"
            assert entry.is_resident, "a block has left"
            assert entry.block is block, "a block is another's"
            assert not entry.is_parked or not self._may_leave(block), "a block waits in vain"
