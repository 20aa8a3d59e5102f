"""Policies that others have: the twins of ``native/policy/list_policies.hpp``, which names their
sources; ``live_queues.hpp`` says what each call means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import floor, inf

from kvtier._reference.runs import Block

NOWHERE = -1


@dataclass(slots=True, eq=False)
class Entry:
    """A block that is resident, or one that has left and is remembered. at: blocks in front of it.
    list: one of the policy's. num_uses: as far as they count. worth, number: LFU's."""

    key: int
    block: Block
    at: int
    list: int = NOWHERE
    num_uses: int = 0
    worth: int = 0
    number: int = 0
    is_resident: bool = True
    is_parked: bool = False


MayLeave = Callable[[Block], bool]


class Queues(ABC):
    num_history = 0

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Resident ones."""

    def set_capacity(self, capacity: int) -> None:
        self._capacity = capacity

    def find(self, key: int) -> Entry | None:
        """Where nothing is remembered, nothing is found."""
        return None

    def begin_evicting(self) -> None:
        """The victims that follow leave for blocks that are about to come."""
        return

    def most_new(self) -> float:
        return inf

    def turn_away(self, key: int) -> None:
        raise AssertionError("all may come")

    @abstractmethod
    def hit(self, entry: Entry) -> None: ...
    @abstractmethod
    def missed(self, entry: Entry) -> None: ...
    @abstractmethod
    def enter(self, key: int, block: Block, at: int) -> Entry: ...
    @abstractmethod
    def leave(self, may_leave: MayLeave) -> Block | None: ...
    @abstractmethod
    def come_back(self, entry: Entry) -> None: ...
    @abstractmethod
    def remove(self, entry: Entry) -> None: ...

    def check_invariants(self) -> None:
        assert self.num_history <= 2 * self._capacity, "too much is remembered"


class _Lists(Queues):
    """The first two lists are those of resident blocks. Entries that are parked count in theirs."""

    def __init__(self, capacity: int, num_lists: int) -> None:
        super().__init__(capacity)
        self._lists = [OrderedDict[Entry, None]() for _ in range(num_lists)]
        self._num_parked = [0] * num_lists
        self._by_key: dict[int, Entry] = {}

    @property
    def num_blocks(self) -> int:
        return self._size(0) + self._size(1)

    @property
    def num_history(self) -> int:  # type: ignore[override]
        return sum(map(len, self._lists[2:]))

    def find(self, key: int) -> Entry | None:
        return self._by_key.get(key)

    def missed(self, entry: Entry) -> None:
        self._lists[entry.list].move_to_end(entry)

    def come_back(self, entry: Entry) -> None:
        if entry.is_parked:
            where = entry.list
            self._take(entry)
            self._put(entry, where)
            self._lists[where].move_to_end(entry, last=False)

    def remove(self, entry: Entry) -> None:
        self._take(entry)
        entry.is_resident = False
        del self._by_key[entry.key]

    def _size(self, where: int) -> int:
        return len(self._lists[where]) + self._num_parked[where]

    def _oldest(self, where: int) -> Entry | None:
        return next(iter(self._lists[where]), None)

    def _enter(self, key: int, block: Block, at: int) -> tuple[Entry, bool]:
        """In no list, and whether it was remembered."""
        entry = self._by_key.get(key)
        if entry is None:
            self._by_key[key] = entry = Entry(key, block, at)
            return entry, False
        self._take(entry)
        entry.block, entry.is_resident, entry.num_uses = block, True, 0
        return entry, True

    def _put(self, entry: Entry, where: int) -> None:
        entry.list = where
        self._lists[where][entry] = None

    def _take(self, entry: Entry) -> None:
        if entry.is_parked:
            entry.is_parked = False
            self._num_parked[entry.list] -= 1
        else:
            del self._lists[entry.list][entry]
        entry.list = NOWHERE

    def _move(self, entry: Entry, where: int) -> None:
        self._take(entry)
        self._put(entry, where)

    def _park(self, entry: Entry) -> None:
        del self._lists[entry.list][entry]
        self._num_parked[entry.list] += 1
        entry.is_parked = True

    def _remember(self, entry: Entry, where: int) -> None:
        entry.is_resident = False
        self._move(entry, where)


class Arc(_Lists):
    ONCE, OFTEN, ONCE_GONE, OFTEN_GONE = range(4)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 4)
        self._target = 0.0
        self._was_often = False
        self._num_out = 0

    def set_capacity(self, capacity: int) -> None:
        super().set_capacity(capacity)
        self._target = min(self._target, float(capacity))
        self._forget(2 * capacity)

    def hit(self, entry: Entry) -> None:
        self._move(entry, self.OFTEN)

    def missed(self, entry: Entry) -> None:
        self._was_often = entry.list == self.OFTEN_GONE
        once, often = self._size(self.ONCE_GONE), self._size(self.OFTEN_GONE)
        if self._was_often:
            self._target = max(0.0, self._target - max(1.0, once / often))
        else:
            self._target = min(float(self._capacity), self._target + max(1.0, often / once))
        super().missed(entry)

    def enter(self, key: int, block: Block, at: int) -> Entry:
        self._was_often = False
        entry, was_here = self._enter(key, block, at)
        if was_here:
            self._put(entry, self.OFTEN)
            return entry
        self._forget_once(self._capacity - 1)
        self._forget(2 * self._capacity - 1)
        self._put(entry, self.ONCE)
        return entry

    def leave(self, may_leave: MayLeave) -> Block | None:
        while True:
            once, often = self._oldest(self.ONCE), self._oldest(self.OFTEN)
            num = self._size(self.ONCE) + self._num_out
            is_once = num > self._target or (self._was_often and num == floor(self._target))
            from_once = once is not None and (is_once or often is None)
            entry = once if from_once else often
            if entry is None:
                return None
            if may_leave(entry.block):
                self._remember(entry, self.ONCE_GONE if from_once else self.OFTEN_GONE)
                self._forget(2 * self._capacity)
                self._num_out += 1
                return entry.block
            self._park(entry)

    def begin_evicting(self) -> None:
        self._num_out = 0

    def most_new(self) -> float:
        return max(self._size(self.ONCE), int(self._target) + 1)

    def turn_away(self, key: int) -> None:
        entry = self._by_key.get(key)
        if entry is None:
            self._by_key[key] = entry = Entry(key, Block(key, None), 0, is_resident=False)
            self._put(entry, self.ONCE_GONE)
        elif not entry.is_resident:
            _Lists.missed(self, entry)
        self._forget_once(self._capacity)
        self._forget(2 * self._capacity)

    def _forget_once(self, most: int) -> None:
        while self._size(self.ONCE_GONE) and (
            self._size(self.ONCE) + self._size(self.ONCE_GONE) > most
        ):
            self._forget_oldest(self.ONCE_GONE)

    def _forget(self, most: int) -> None:
        while self.num_history and self.num_blocks + self.num_history > most:
            often = self._size(self.OFTEN_GONE)
            self._forget_oldest(self.OFTEN_GONE if often else self.ONCE_GONE)

    def _forget_oldest(self, where: int) -> None:
        self.remove(next(iter(self._lists[where])))


class S3Fifo(_Lists):
    SMALL, MAIN, GONE = range(3)
    MOST_USES = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 3)

    @property
    def _num_main(self) -> int:
        return self._capacity - max(1, self._capacity // 10)

    def set_capacity(self, capacity: int) -> None:
        super().set_capacity(capacity)
        self._forget()

    def hit(self, entry: Entry) -> None:
        entry.num_uses = min(self.MOST_USES, entry.num_uses + 1)

    def enter(self, key: int, block: Block, at: int) -> Entry:
        entry, was_here = self._enter(key, block, at)
        self._put(entry, self.MAIN if was_here else self.SMALL)
        return entry

    def leave(self, may_leave: MayLeave) -> Block | None:
        while True:
            small, main = self._oldest(self.SMALL), self._oldest(self.MAIN)
            is_over = self._size(self.MAIN) > self._num_main
            from_main = main is not None and (is_over or small is None)
            entry = main if from_main else small
            if entry is None:
                return None
            if entry.num_uses > (0 if from_main else 1):
                entry.num_uses = entry.num_uses - 1 if from_main else 0
                self._move(entry, self.MAIN)
            elif not may_leave(entry.block):
                self._park(entry)
            elif from_main:
                self.remove(entry)
                return entry.block
            else:
                self._remember(entry, self.GONE)
                self._forget()
                return entry.block

    def _forget(self) -> None:
        while self._size(self.GONE) > self._num_main:
            self.remove(next(iter(self._lists[self.GONE])))


class Sieve(Queues):
    """The hand goes from the oldest block to the newest."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: list[Entry] = []
        self._by_key: dict[int, Entry] = {}
        self._hand = 0

    @property
    def num_blocks(self) -> int:
        return len(self._by_key)

    def find(self, key: int) -> Entry | None:
        return self._by_key.get(key)

    def hit(self, entry: Entry) -> None:
        entry.num_uses = 1

    def missed(self, entry: Entry) -> None:
        raise AssertionError("nothing is remembered")

    def enter(self, key: int, block: Block, at: int) -> Entry:
        self._by_key[key] = entry = Entry(key, block, at)
        self._order.append(entry)
        return entry

    def leave(self, may_leave: MayLeave) -> Block | None:
        while self._order:
            entry = self._order[self._hand]
            if entry.num_uses:
                entry.num_uses = 0
                self._hand = (self._hand + 1) % len(self._order)
            elif may_leave(entry.block):
                self.remove(entry)
                return entry.block
            else:
                self._take(entry)
                entry.is_parked = True
        return None

    def come_back(self, entry: Entry) -> None:
        """The hand meets it next."""
        if entry.is_parked:
            entry.is_parked = False
            self._order.insert(self._hand, entry)

    def remove(self, entry: Entry) -> None:
        if not entry.is_parked:
            self._take(entry)
        entry.is_resident = False
        del self._by_key[entry.key]

    def _take(self, entry: Entry) -> None:
        at = self._order.index(entry)
        del self._order[at]
        self._hand -= at < self._hand
        if self._hand == len(self._order):
            self._hand = 0
