"""Runs of blocks: the twin of ``native/policy/runs.hpp``, which says what they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from kvtier._reference.chance import Random
from kvtier._reference.retention import NOTHING, NUM_LEVELS, USUAL, Retention


@dataclass(slots=True, eq=False)
class Block:
    """A resident block. key: the name of its prefix. item: its owner's number. is_fork: prompts
    were seen to go on from here in more than one way."""

    key: int
    parent: Block | None
    item: int = -1
    run: Run | None = None
    num_children: int = 0
    is_fork: bool = False

    def hang_below(self, parent: Block | None) -> None:
        if self.parent is not None:
            self.parent.num_children -= 1
        if parent is not None:
            parent.num_children += 1
        self.parent = parent


@dataclass(slots=True, eq=False)
class Run:
    """Places lo .. mid - 1 of a path are resident, mid .. hi - 1 are not. tried: LRU had what lies
    before it. place: among runs with resident blocks, -1 where it has none. ghost: the keys that
    are kept of what is not resident. words: what was said of it; level: that it is listed by; end:
    when a word is over next, as the queue has it."""

    last_use: float
    start: int
    lo: int
    mid: int
    hi: int
    tried: int
    cls: int
    num_uses: int
    stride: int
    tail: Block | None
    number: int = 0
    slot: int = -1
    place: int = -1
    ghost: dict[int, int] = field(default_factory=dict)
    words: Retention = NOTHING
    level: int = USUAL
    end: float = inf

    @property
    def size(self) -> int:
        return self.hi - self.lo

    @property
    def is_resident(self) -> bool:
        return self.mid > self.lo

    def keeps_key(self, at: int) -> bool:
        return at == self.hi - 1 or (at - self.start) % self.stride == 0

    def blocks(self) -> Iterator[Block]:
        """The resident ones, the last first."""
        block = self.tail
        for _ in range(self.mid - self.lo):
            assert block is not None
            yield block
            block = block.parent


class Runs:
    """All runs, in the order of their use."""

    def __init__(self, capacity: int, seed: int) -> None:
        self._capacity = capacity
        self._random = Random(seed)
        self.by_slot: list[Run | None] = []
        self._free: list[int] = []
        self.residents: list[list[Run]] = [[] for _ in range(NUM_LEVELS)]
        self._said: dict[int, Run] = {}  # by number: of which something was said
        self._ends: list[tuple[float, int]] = []  # of words, and the number of the run
        self.num_retained = 0
        self._num_made = 0
        # What LRU would hold: the latest runs; without the first of them, less than the capacity.
        self._window: OrderedDict[int, Run] = OrderedDict()
        self._num_in_window = 0

    def __len__(self) -> int:
        return len(self.by_slot) - len(self._free)

    def __contains__(self, run: Run) -> bool:
        return self.by_slot[run.slot] is run

    def set_capacity(self, capacity: int) -> None:
        self._capacity = capacity
        self._narrow()

    def add(self, run: Run) -> None:
        self._num_made += 1
        run.number = self._num_made
        if self._free:
            run.slot = self._free.pop()
            self.by_slot[run.slot] = run
        else:
            run.slot = len(self.by_slot)
            self.by_slot.append(run)
        if run.is_resident:
            self._list(run)
        self._window[run.number] = run
        self._num_in_window += run.size
        self._narrow()

    def _narrow(self) -> None:
        while len(self._window) > 1:
            first = next(iter(self._window.values()))
            if self._num_in_window - first.size < self._capacity:
                break
            self._num_in_window -= first.size
            del self._window[first.number]

    def remove(self, run: Run) -> None:
        self._unlist(run)
        if self._window.pop(run.number, None):
            self._num_in_window -= run.size
        self._said.pop(run.number, None)
        self.num_retained -= run.level != USUAL
        self.by_slot[run.slot] = None
        self._free.append(run.slot)

    def take_front(self, run: Run, end: int) -> None:
        if run.number in self._window:
            self._num_in_window -= end - run.lo
        run.lo = end
        run.mid = max(run.mid, end)
        run.tried = max(run.tried, run.mid)
        if not run.is_resident:
            self._unlist(run)

    def forget_ghost(self, run: Run) -> None:
        if run.number in self._window:
            self._num_in_window -= run.hi - run.mid
        run.hi = run.mid

    def shorten(self, run: Run, tail: Block | None) -> None:
        run.tail = tail
        run.mid -= 1
        if not run.is_resident:
            self._unlist(run)

    def grow(self, run: Run, tail: Block) -> None:
        run.tail = tail
        run.mid += 1
        run.tried = max(run.tried, run.mid)
        if run.place < 0:
            self._list(run)
        if run.mid > run.hi:
            run.hi = run.mid
            if run.number in self._window:
                self._num_in_window += 1
                self._narrow()

    def cut_off(self, run: Run, end: int, tail: Block | None) -> None:
        if run.number in self._window:
            self._num_in_window -= run.hi - end
        run.hi = run.mid = end
        run.tail = tail

    def would_be_kept(self, run: Run, at: int) -> bool:
        if run.number not in self._window or at >= run.tried:
            return False
        is_first = next(iter(self._window)) == run.number
        return not is_first or at - run.lo < self._capacity - (self._num_in_window - run.size)

    # -- what was said of runs --------------------------------------------------------------------

    def retain(self, run: Run, words: Retention, now: float) -> None:
        words = words.at(now)
        if words == NOTHING and run.words == NOTHING:
            return
        run.words = words
        if words == NOTHING:
            self._said.pop(run.number, None)
        else:
            self._said[run.number] = run
        if words.level != run.level:
            is_listed = run.place >= 0
            self._unlist(run)
            self.num_retained += (words.level != USUAL) - (run.level != USUAL)
            run.level = words.level
            if is_listed:
                self._list(run)
        self._await_end(run)

    def _await_end(self, run: Run) -> None:
        end = run.words.ends
        if end == run.end:
            return
        run.end = end
        if end < inf:
            if len(self._ends) > 64 + 2 * len(self._said):
                self._ends = [each for each in self._ends if self._awaited(*each)]
                heapify(self._ends)
            heappush(self._ends, (end, run.number))

    def _awaited(self, end: float, number: int) -> Run | None:
        run = self._said.get(number)
        return run if run is not None and run.end == end else None

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            run = self._awaited(*heappop(self._ends))
            if run is not None:
                self.retain(run, run.words, now)

    # -- those with resident blocks ---------------------------------------------------------------

    def _list(self, run: Run) -> None:
        residents = self.residents[run.level]
        residents.append(run)
        end = len(residents) - 1
        run.place = self._random.below(end + 1)
        residents[run.place], residents[end] = run, residents[run.place]
        residents[end].place = end
        residents[run.place].place = run.place

    def _unlist(self, run: Run) -> None:
        if run.place < 0:
            return
        residents = self.residents[run.level]
        moved = residents[-1]
        residents[run.place] = moved
        moved.place = run.place
        residents.pop()
        run.place = -1

    def check_invariants(self) -> None:
        runs = [run for run in self.by_slot if run is not None]
        for run in runs:
            assert run.start <= run.lo <= run.mid <= run.hi, "a run is out of order"
            assert run.lo < run.hi, "a run without blocks"
            assert run.mid <= run.tried, "a block came in unseen"
            assert (run.place >= 0) == run.is_resident, "a resident run is not listed"
            assert run.level == run.words.level, "a run is not at the level that was said"
        said = [run for run in runs if run.words != NOTHING]
        assert said == sorted(self._said.values(), key=lambda run: run.slot), "words are lost"
        assert self.num_retained == sum(run.level != USUAL for run in runs), "words miscounted"
        assert self._num_in_window == sum(run.size for run in self._window.values()), (
            "the window is miscounted"
        )
