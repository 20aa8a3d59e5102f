"""A policy that works on runs of blocks: the twin of ``native/policy/run_policy.hpp``.

What a run is, and what leaves, is said there. With the same seed both choose the same blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier._reference.reuse_model import ReuseModel, Waiting

LESSON_EVERY = 100
MOST_WAITING = 4096
SIZE_POWER = 0.3
ENTER = 0.9
CLEARLY = 0.7
LOOKS = 32
HISTORY = 2
KEYS_OF_GHOST = 4
GAP = 64
MOST_USES = 0xFFFF

FREE_SHARE = 0.0005
MOST_DEBT = 0.05
MOST_CREDIT = 4.0
FIRST_REST = 40.0
UNIT_SHARE = 0.01

WORD = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class _Run:
    """Places lo .. mid - 1 of a path are resident, mid .. hi - 1 have left. place: among runs with
    resident blocks, -1 where it has none. ghost: the keys that are kept of what has left."""

    number: int
    last_use: float
    start: int
    lo: int
    mid: int
    hi: int
    cls: int
    num_uses: int
    stride: int
    tail: _Block | None
    slot: int = -1
    place: int = -1
    ghost: dict[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.hi - self.lo

    @property
    def is_leaf(self) -> bool:
        return self.tail is not None and self.mid > self.lo and self.tail.num_children == 0

    def keeps_key(self, at: int) -> bool:
        return at == self.hi - 1 or (at - self.start) % self.stride == 0


@dataclass(slots=True, eq=False)
class _Block:
    key: int
    parent: _Block | None
    run: _Run | None = None
    num_children: int = 0


@dataclass(slots=True)
class _Part:
    lo: int
    hi: int
    num_uses: int
    gap: int
    is_last: bool = False
    cls: int = 0


@dataclass(slots=True)
class _Guard:
    """When to stop learning: where least recently used first has more hits."""

    capacity: float
    patience: float
    is_lru: bool = False
    unit: float = 1.0
    debt: float = 0.0
    rest: float = 0.0

    def judge(self, num: float, lost: float, usual: float) -> None:
        self.unit += UNIT_SHARE * (usual - self.unit)
        most_credit = MOST_CREDIT * self.capacity * self.unit
        self.debt = max(-most_credit, self.debt + lost - FREE_SHARE * num * usual)
        if self.is_lru:
            self.rest -= num
            if self.rest > 0.0:
                return
            self.is_lru = False
            self.debt = min(self.debt, 0.0)
        elif self.debt > MOST_DEBT * self.capacity * self.unit:
            self.is_lru = True
            self.rest = self.patience
            self.patience *= 2.0
        elif self.debt <= -most_credit:
            self.patience = FIRST_REST * self.capacity


class _Random:
    """splitmix64."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, end: int) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & WORD
        bits = self._state
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & WORD
        return ((bits ^ (bits >> 31)) >> 32) * end >> 32


def _weight(num_blocks: int) -> float:
    return float(num_blocks**SIZE_POWER)


def _gap_after(age: float) -> int:
    return 1 + int(min(6.0, math.log2(max(1.0, age)) / 2.0))


class RunPolicy:
    """See ``kvtier.index.policies.replayed``."""

    def __init__(self, capacity: int, seed: int, doubles_at_blocks: float) -> None:
        self._capacity = capacity
        self._per_block = 1.0 / doubles_at_blocks if doubles_at_blocks > 0.0 else 0.0
        self._random = _Random(seed)
        self._model = ReuseModel()
        self._guard = _Guard(float(capacity), FIRST_REST * capacity)
        self._blocks: dict[int, _Block] = {}
        self._runs: list[_Run | None] = []
        self._free: list[int] = []
        self._residents: list[_Run] = []
        self._num_made = 0
        # What LRU would hold: the latest runs; without the first of them, less than the capacity.
        self._window: OrderedDict[int, _Run] = OrderedDict()
        self._num_in_window = 0
        self._ghosts: dict[int, tuple[_Run, int]] = {}
        self._ghost_order: OrderedDict[_Run, None] = OrderedDict()
        self._now = 0.0
        self._num_requests = 0
        self._next_lesson = LESSON_EVERY // 2
        self._victim: _Run | None = None
        self._parts: list[_Part] = []
        self._num_known = 0
        self.num_stored = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_history(self) -> int:
        return len(self._ghosts) + len(self._ghost_order)

    def request(self, path: Sequence[int], now: float) -> int:
        self._now = now
        if not path:
            return 0
        if self._num_requests >= self._next_lesson:
            self._model.learn(self._waiting())
            is_new = self._num_requests < 4 * LESSON_EVERY
            self._next_lesson += LESSON_EVERY // 2 if is_new else LESSON_EVERY
        self._num_requests += 1
        found: list[_Block] = []
        for key in path:
            if key not in self._blocks:
                break
            found.append(self._blocks[key])
        num_hits = len(found)
        self._compare(path, found)
        self._cut(path, found)
        self._name_parts(len(path))
        self._store(path, found)
        self._keep_runs(path, found)
        while self.num_history > HISTORY * self._capacity:
            self._forget(next(iter(self._ghost_order)))
        return num_hits

    # -- what is asked for, compared with what is known --------------------------------------------

    def _lru_hits(self, path: Sequence[int], found: Sequence[_Block]) -> int:
        for at, block in enumerate(found):
            assert block.run is not None
            if not self._would_be_kept(block.run, at):
                return at
        known = len(found)
        run: _Run | None = None
        for at in range(len(found), len(path)):
            ghost = self._ghosts.get(path[at])
            if ghost is None:
                if at - known > (GAP if run is None else 2 * run.stride):
                    break
            elif not self._would_be_kept(ghost[0], at):
                break
            else:
                run = ghost[0]
                known = at + 1
        return known

    def _would_be_kept(self, run: _Run, at: int) -> bool:
        if run.number not in self._window:
            return False
        is_first = next(iter(self._window)) == run.number
        return not is_first or at - run.lo < self._capacity - (self._num_in_window - run.size)

    def _compare(self, path: Sequence[int], found: Sequence[_Block]) -> None:
        def worth_of(num: int) -> float:
            return num + float(num) * num / 2.0 * self._per_block

        lost = worth_of(self._lru_hits(path, found)) - worth_of(len(found))
        self._guard.judge(float(len(path)), lost, self._worth(len(path) // 2))

    def _reach(self, path: Sequence[int], run: _Run, start: int) -> int:
        known = start
        for at in range(start, min(len(path), run.hi)):
            if at - known > run.stride:
                break
            if run.keeps_key(at) and self._ghost_run(path[at]) is run:
                known = at + 1
        return known

    def _ghost_run(self, key: int) -> _Run | None:
        found = self._ghosts.get(key)
        return found[0] if found else None

    def _take(self, run: _Run, start: int, end: int) -> None:
        age = self._now - run.last_use
        self._model.used(run.cls, age, _weight(end - start))
        self._parts.append(_Part(start, end, min(MOST_USES, run.num_uses + 1), _gap_after(age)))
        if run.number in self._window:
            self._num_in_window -= end - run.lo
        run.lo = end
        run.mid = max(run.mid, end)
        self._unlist_if_gone(run)
        self._drop_keys(run, end)
        if run not in self._ghost_order:
            self._forget_ghost(run)
        if run.size == 0:
            self._remove(run)
        self._num_known = end

    def _cut(self, path: Sequence[int], found: Sequence[_Block]) -> None:
        self._parts.clear()
        self._num_known = 0
        hits = len(found)
        while self._num_known < hits:
            start = self._num_known
            run = found[start].run
            assert run is not None
            end = start + 1
            while end < hits and found[end].run is run:
                end += 1
            if end == hits and end == run.mid:
                end = self._reach(path, run, end)
            self._take(run, start, end)
        while self._num_known < len(path):
            start = self._num_known
            for at in range(start, min(len(path), start + GAP + 1)):
                ghost = self._ghost_run(path[at])
                if ghost is not None:
                    break
            if ghost is None or ghost.lo > start:
                break
            self._take(ghost, start, self._reach(path, ghost, at + 1))

    def _name_parts(self, num: int) -> None:
        num_new = num - self._num_known
        parts = self._parts
        if num_new > 0:
            parts.append(_Part(self._num_known, num, 1, parts[-1].gap if parts else 0))
        end = parts[-1]
        if end.hi - end.lo > 1:
            parts.append(_Part(end.hi - 1, end.hi, end.num_uses, end.gap))
            end.hi -= 1
        parts[-1].is_last = True
        brought = min(6, (num_new - 1).bit_length() if num_new > 0 else 0)
        length = min(5, ((num + 1).bit_length() - 1) // 2)
        merged: list[_Part] = []
        for part in parts:
            uses = min(4, (part.num_uses - 1).bit_length())
            part.cls = self._model.class_of((uses, int(part.is_last), brought, part.gap, length))
            if merged and merged[-1].cls == part.cls:
                merged[-1].hi = part.hi
                merged[-1].num_uses = max(merged[-1].num_uses, part.num_uses)
            else:
                merged.append(part)
        self._parts = merged

    # -- what stays --------------------------------------------------------------------------------

    def _worth(self, at: int) -> float:
        return 1.0 + (at + 0.5) * self._per_block

    def _value(self, run: _Run) -> float:
        return self._model.value(run.cls, self._now - run.last_use) * self._worth(run.mid - 1)

    def _decides_as_lru(self) -> bool:
        return self._guard.is_lru or not self._model.has_learned

    def _store(self, path: Sequence[int], found: list[_Block]) -> None:
        self._victim = None
        for part in self._parts:
            if part.hi <= len(found):
                continue
            gain = self._model.value_of_new(part.cls) * self._worth(part.hi - 1)
            while len(found) < part.hi:
                if not self._make_room(gain):
                    return
                above = found[-1] if found else None
                block = _Block(path[len(found)], above)
                if above is not None:
                    above.num_children += 1
                self._blocks[block.key] = block
                found.append(block)
                self.num_stored += 1

    def _make_room(self, worth: float) -> bool:
        if len(self._blocks) < self._capacity:
            return True
        if self._victim is None or not self._victim.is_leaf:
            self._victim = self._choose()
        if self._victim is None:
            return False
        if not self._decides_as_lru() and self._value(self._victim) > ENTER * worth:
            return False
        self._drop_tail(self._victim)
        return True

    def _look(self, num_wanted: int) -> list[_Run]:
        num = len(self._residents)
        if num <= 4 * LOOKS:
            return [run for run in self._residents if run.is_leaf]
        leaves: list[_Run] = []
        for _ in range(4):
            if len(leaves) < num_wanted:
                some = [self._residents[self._random.below(num)] for _ in range(LOOKS)]
                leaves += [run for run in some if run.is_leaf]
        if not leaves:
            return [run for run in self._residents if run.is_leaf][:1]
        return leaves[:num_wanted]

    def _choose(self) -> _Run | None:
        leaves = self._look(4 * LOOKS if self._decides_as_lru() else LOOKS)
        if not leaves:
            return None
        oldest = min(leaves, key=lambda run: run.number)
        if self._decides_as_lru():
            return oldest
        values = {run: self._value(run) for run in leaves}
        cheapest = min(leaves, key=lambda run: (values[run], run.number))
        return cheapest if values[cheapest] < CLEARLY * values[oldest] else oldest

    def _drop_tail(self, run: _Run) -> None:
        block = run.tail
        assert block is not None
        at = run.mid - 1
        if run.keeps_key(at):
            self._keep_key(run, block.key, at)
        del self._blocks[block.key]
        if block.parent is not None:
            block.parent.num_children -= 1
        run.tail = block.parent
        run.mid = at
        self._unlist_if_gone(run)

    def _keep_runs(self, path: Sequence[int], found: Sequence[_Block]) -> None:
        for part in self._parts:
            self._num_made += 1
            mid = min(max(len(found), part.lo), part.hi)
            run = _Run(
                number=self._num_made,
                last_use=self._now,
                start=part.lo,
                lo=part.lo,
                mid=mid,
                hi=part.hi,
                cls=part.cls,
                num_uses=part.num_uses,
                stride=max(1, (part.hi - part.lo) // KEYS_OF_GHOST),
                tail=found[mid - 1] if mid > part.lo else None,
            )
            self._add(run)
            for block in found[part.lo : mid]:
                block.run = run
            for at in range(mid, part.hi):
                if run.keeps_key(at):
                    self._keep_key(run, path[at], at)

    def _add(self, run: _Run) -> None:
        if self._free:
            run.slot = self._free.pop()
            self._runs[run.slot] = run
        else:
            run.slot = len(self._runs)
            self._runs.append(run)
        if run.mid > run.lo:
            run.place = len(self._residents)
            self._residents.append(run)
        self._window[run.number] = run
        self._num_in_window += run.size
        while len(self._window) > 1:
            first = next(iter(self._window.values()))
            if self._num_in_window - first.size < self._capacity:
                break
            self._num_in_window -= first.size
            del self._window[first.number]

    def _remove(self, run: _Run) -> None:
        self._window.pop(run.number, None)
        self._runs[run.slot] = None
        self._free.append(run.slot)

    def _unlist_if_gone(self, run: _Run) -> None:
        if run.mid > run.lo or run.place < 0:
            return
        moved = self._residents[-1]
        self._residents[run.place] = moved
        moved.place = run.place
        self._residents.pop()
        run.place = -1

    # -- what has left -----------------------------------------------------------------------------

    def _keep_key(self, run: _Run, key: int, at: int) -> None:
        self._ghost_order.setdefault(run)
        if key in self._ghosts:
            del self._ghosts[key][0].ghost[key]
        self._ghosts[key] = (run, at)
        run.ghost[key] = at

    def _drop_keys(self, run: _Run, end: int) -> None:
        for key in [key for key, at in run.ghost.items() if at < end]:
            del run.ghost[key]
            del self._ghosts[key]
        if not run.ghost:
            self._ghost_order.pop(run, None)

    def _forget_ghost(self, run: _Run) -> None:
        if run.number in self._window:
            self._num_in_window -= run.hi - run.mid
        run.hi = run.mid

    def _forget(self, run: _Run) -> None:
        share = (run.hi - run.mid) / run.size
        self._model.forgotten(run.cls, self._now - run.last_use, _weight(run.size) * share)
        self._drop_keys(run, run.hi)
        self._forget_ghost(run)
        if run.size == 0:
            self._remove(run)

    def _waiting(self) -> list[Waiting]:
        num = len(self._runs) - len(self._free)
        if num <= MOST_WAITING:
            looked_at = self._runs
        else:
            slots = [self._random.below(len(self._runs)) for _ in range(MOST_WAITING)]
            looked_at = [self._runs[slot] for slot in slots]
        runs = [run for run in looked_at if run is not None]
        each = num / len(runs) if num > MOST_WAITING else 1.0
        return [(run.cls, self._now - run.last_use, _weight(run.size) * each) for run in runs]

    def check_invariants(self) -> None:
        """Raise AssertionError where runs, blocks and ghosts disagree."""
        assert self.num_blocks <= self._capacity, "more blocks than there is room for"
        assert self.num_history <= HISTORY * self._capacity, "more is remembered than allowed"
        runs = [run for run in self._runs if run is not None]
        assert sum(run.mid - run.lo for run in runs) == self.num_blocks, "a block belongs to none"
        for run in runs:
            assert run.start <= run.lo <= run.mid <= run.hi, "a run is out of order"
            assert run.lo < run.hi, "a run without blocks"
            assert (run.place >= 0) == (run.mid > run.lo), "a resident run is not listed"
            assert (run in self._ghost_order) == (run.hi > run.mid), "a ghost is lost"
