"""Which block leaves next: by what its kind has taught so far, and no prefix before its end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvtier.connectors.vllm.pieces.reuse import FADE, Batch, ReuseModel

LEARN_EVERY = 100
"""Requests."""
CLEARLY = 0.7
"""The block that was used least recently leaves, unless another is worth less than this share."""
UNKNOWN = -1

WORTH_IT = 0.002
"""Where less than this share of what is found left too early, LRU is as good as anything."""

MayLeave = Callable[[bytes], bool]


@dataclass(slots=True, eq=False)
class _Entry:
    """What is remembered of a block, resident or not. born: the turn that it came with. turn: the
    latest that a prompt with it has grown to."""

    batch: Batch
    num_uses: int = 0
    born: int = UNKNOWN
    turn: int = 0

    def move(self, batch: Batch) -> None:
        self.batch.count -= 1
        self.batch = batch
        batch.count += 1


Home = OrderedDict[bytes, _Entry]
"""Blocks, the one that was used least recently first."""


class EvictionOrder:
    """``capacity`` blocks, and as many that left and are remembered. Owned by one thread.

    Blocks are *new* until their request is over: then it is known what comes after what. A new one
    that is worth less than whatever would have to leave for it is a *guest*: it leaves for the next
    one. So prompts that nobody repeats, or more of them than fit, leave the rest alone.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.model = ReuseModel()
        self.clear()

    def clear(self) -> None:
        """Forget everything, what was learned, too."""
        self.model.forget()
        self._now = 0
        self._kinds: list[Home] = [OrderedDict() for _ in range(self.model.num_kinds)]
        self._new: Home = OrderedDict()
        self._guests: Home = OrderedDict()
        self._gone: Home = OrderedDict()
        self._homes: dict[bytes, Home] = {}
        self._batches: list[Batch] = []
        self._fresh = self._batch(0)
        self._num_coming = self._num_guests = 0
        self._num_found = self._num_returned = 0.0

    def __len__(self) -> int:
        return len(self._homes)

    # -- what happens to blocks --------------------------------------------------------------------

    def insert(self, key: bytes) -> None:
        """It is resident now, and its request goes on."""
        if self._fresh.last != self._now:
            self._fresh = self._batch(0)
        entry = self._gone.pop(key, None)
        if entry is None:
            entry = _Entry(self._fresh)
            self._fresh.count += 1
        else:
            self._num_returned += 1
            self.model.used_again(entry.batch, self._now)
            entry.move(self._fresh)
        entry.num_uses += 1
        # Of those that come after an eviction, the last are guests.
        is_guest = 0 < self._num_coming <= self._num_guests
        self._num_coming = max(0, self._num_coming - 1)
        home = self._guests if is_guest else self._new
        home[key] = entry
        self._homes[key] = home

    def remove(self, key: bytes) -> None:
        """It was never written."""
        self._homes.pop(key).pop(key).batch.count -= 1

    def refresh(self, key: bytes) -> None:
        """A request that goes on has it in use: among its like it leaves last."""
        home = self._homes.get(key)
        if home is not None:
            home.move_to_end(key)

    def finish(
        self,
        chains: Sequence[Sequence[bytes]],
        reused: Collection[bytes],
        order: Sequence[bytes] | None = None,
    ) -> None:
        """A request is over that used these blocks: a chain per KV group, in the prompt's order.

        order: of all of them, where the chains grow side by side; without, one after the other.
        """
        self._now += 1
        turns = {}
        for chain in chains:
            here = [key for key in chain if key in self._homes]
            turns.update(dict.fromkeys(here, _count_turns([self._homes[key][key] for key in here])))
        batches: dict[int, Batch] = {}
        # From the end: the start of the prompt is used last.
        for key in reversed(list(turns) if order is None else order):
            if key in turns:
                self._use(key, turns[key], key in reused, batches)
        if self._now % LEARN_EVERY == 0:
            self._batches = [batch for batch in self._batches if batch.count]
            self.model.learn(self._batches, self._now)
            self._num_found *= FADE
            self._num_returned *= FADE

    def _use(self, key: bytes, turn: int, is_reused: bool, batches: dict[int, Batch]) -> None:
        entry = self._homes[key].pop(key)
        if is_reused:
            self._num_found += 1
            self.model.used_again(entry.batch, self._now)
            entry.num_uses += 1
        entry.turn = max(entry.turn, turn)
        kind = self.model.kind(entry.num_uses, entry.turn)
        batch = batches.get(kind)
        if batch is None:
            batch = batches[kind] = self._batch(kind)
        entry.move(batch)
        home = self._kinds[kind]
        home[key] = entry
        self._homes[key] = home

    def _batch(self, kind: int) -> Batch:
        batch = Batch(kind, self._now)
        self._batches.append(batch)
        return batch

    # -- what leaves -------------------------------------------------------------------------------

    def evict(self, num: int, may_leave: MayLeave) -> list[bytes] | None:
        """``num`` blocks that leave now; None, and nothing changes, where there are not so many.

        The blocks that come for them are inserted next.
        """
        kinds = [_Queue(home, may_leave) for home in self._kinds if home]
        guests, new = (_Queue(home, may_leave) for home in (self._guests, self._new))
        chosen: list[bytes] = []
        num_guests = 0
        cheapest, is_new_worth_less = self._cheapest(kinds)
        while len(chosen) < num:
            queue = cheapest
            if is_new_worth_less:
                num_guests += 1
                queue = guests if guests.head is not None else cheapest
            if queue is None:
                queue = new
            if queue.head is None:
                return None
            chosen.append(queue.head)
            if queue.advance() and queue is cheapest:  # else it is what it was before
                cheapest, is_new_worth_less = self._cheapest(kinds)
        for key in chosen:
            self._leave(key)
        self._num_coming, self._num_guests = num, num_guests
        return chosen

    def _cheapest(self, kinds: list[_Queue]) -> tuple[_Queue | None, bool]:
        """Where the block is that leaves next, and whether a new one is worth less still."""
        there = []
        for queue in kinds:
            if queue.batch is not None:
                queue.value = self.model.value(queue.batch, self._now)
                there.append(queue)
        if not there:
            return None, True
        oldest = min(there, key=_last)
        if self._num_returned < WORTH_IT * self._num_found:
            return oldest, False
        cheapest = min(there, key=_value)
        if cheapest.value >= CLEARLY * oldest.value:
            cheapest = oldest
        return cheapest, cheapest.value > self.model.value_of_new

    def _leave(self, key: bytes) -> None:
        self._gone[key] = self._homes.pop(key).pop(key)
        if len(self._gone) > self.capacity:
            _, forgotten = self._gone.popitem(last=False)
            forgotten.batch.count -= 1
            self.model.given_up(forgotten.batch, self._now)

    def check_invariants(self) -> None:
        """Raise AssertionError where homes, memory and batches don't add up."""
        homes = [*self._kinds, self._new, self._guests]
        assert sum(map(len, homes)) == len(self._homes), "a block has two homes, or none"
        assert all(key in home for key, home in self._homes.items()), "a block is not at home"
        assert len(self._gone) <= self.capacity, "more is remembered than allowed"
        assert not self._gone.keys() & self._homes.keys(), "a block is resident and gone"
        entries = [entry for home in (*homes, self._gone) for entry in home.values()]
        held = sum(batch.count for batch in {id(e.batch): e.batch for e in entries}.values())
        assert held == len(entries), "batches count other blocks than there are"


class _Queue:
    """The blocks of a home that may leave, one after the other. batch: of ``head``; None at the
    end."""

    __slots__ = ("_items", "_may_leave", "batch", "head", "value")

    def __init__(self, home: Home, may_leave: MayLeave) -> None:
        self._items = iter(home.items())
        self._may_leave = may_leave
        self.head: bytes | None = None
        self.batch: Batch | None = None
        self.value = 0.0
        self.advance()

    def advance(self) -> bool:
        """The next one. Whether it is of another batch, or there is none."""
        before = self.batch
        for key, entry in self._items:
            if self._may_leave(key):
                self.head, self.batch = key, entry.batch
                return self.batch is not before
        self.head = self.batch = None
        return True


def _last(queue: _Queue) -> int:
    assert queue.batch is not None
    return queue.batch.last


def _value(queue: _Queue) -> float:
    return queue.value


def _count_turns(entries: Sequence[_Entry]) -> int:
    """The turn that a prompt is in by its last block; blocks that came with it are told theirs."""
    turn, is_growing = UNKNOWN, False
    for entry in entries:
        if entry.born == UNKNOWN:
            entry.born = turn if is_growing else turn + 1
            is_growing = True
        else:
            is_growing = False
        turn = entry.born
    return turn
