"""A policy that works on runs of blocks: the twin of ``native/policy/run_policy.hpp``.

What a run is, and what leaves, is said there. With the same seed both choose the same blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier._reference.chance import Random
from kvtier._reference.guard import Guard
from kvtier._reference.retention import NOTHING, Retention
from kvtier._reference.reuse_model import ReuseModel, Waiting
from kvtier._reference.runs import Block, Run, Runs

LESSON_EVERY = 100
LESSON_SHARE = 256
MOST_WAITING = 4096
MOST_SEARCHED = 1 << 16
SIZE_POWER = 0.3
ENTER = 0.9
CLEARLY = 0.7
LOOKS = 32
HISTORY = 2
KEYS_OF_GHOST = 4
GAP = 64
MOST_USES = 0xFFFF


MayLeave = Callable[[Block, int], bool]


@dataclass(slots=True)
class Part:
    """Places lo .. hi - 1 of the path that is asked for; about to be a run."""

    lo: int
    hi: int
    num_uses: int
    gap: int
    is_last: bool = False
    cls: int = 0
    words: Retention = NOTHING


def _weight(num_blocks: int) -> float:
    return float(num_blocks**SIZE_POWER)


def _gap_after(age: float) -> int:
    return 1 + int(min(6.0, math.log2(max(1.0, age)) / 2.0))


class RunPolicy:
    """may_leave: whether a block could leave now, were so many of its children gone."""

    def __init__(
        self,
        capacity: int,
        seed: int,
        doubles_at_blocks: float,
        may_leave: MayLeave = lambda block, num_gone: True,
    ) -> None:
        self._capacity = capacity
        self._guard = Guard(capacity)
        self.set_doubling(doubles_at_blocks)
        self._may_leave = may_leave
        self._random = Random(seed)
        self._model = ReuseModel()
        self.num_blocks = 0
        self._runs = Runs(capacity, seed)
        self._ghosts: dict[int, tuple[Run, int]] = {}
        self._ghost_order: OrderedDict[Run, None] = OrderedDict()
        self._now = 0.0
        self._num_requests = 0
        self._next_lesson = LESSON_EVERY // 2
        self._victim: Run | None = None
        self._passed_over: list[Run] = []
        self._exposed: list[Block | None] = []
        self.parts: list[Part] = []
        self._num_known = 0

    def set_capacity(self, capacity: int) -> None:
        self._capacity = capacity
        self._guard.set_capacity(capacity)
        self._runs.set_capacity(capacity)

    def set_doubling(self, doubles_at_blocks: float) -> None:
        self._per_block = 1.0 / doubles_at_blocks if doubles_at_blocks > 0.0 else 0.0
        self._guard.is_uneven = self._per_block > 0.0

    @property
    def num_history(self) -> int:
        return len(self._ghosts) + len(self._ghost_order)

    def begin(self, path: Sequence[int], found: Sequence[Block], now: float) -> None:
        self._now = now
        self._runs.expire(now)
        if self._num_requests >= self._next_lesson:
            self._model.learn(self._waiting())
            is_new = self._num_requests < 4 * LESSON_EVERY
            most = max(LESSON_EVERY, len(self._runs) // LESSON_SHARE)
            self._next_lesson += LESSON_EVERY // 2 if is_new else most
        self._num_requests += 1
        self._compare(path, found)
        self._cut(path, found)
        self._name_parts(len(path))
        self._victim = None

    # -- what is asked for, compared with what is known --------------------------------------------

    def _lru_hits(self, path: Sequence[int], found: Sequence[Block]) -> int:
        for at, block in enumerate(found):
            if block.run is not None and not self._runs.would_be_kept(block.run, at):
                return at
        known = len(found)
        run: Run | None = None
        for at in range(len(found), len(path)):
            ghost = self._ghost_at(path, at)
            if ghost is None:
                if at - known > (GAP if run is None else 2 * run.stride):
                    break
            elif not self._runs.would_be_kept(ghost, at):
                break
            else:
                run = ghost
                known = at + 1
        return known

    def _compare(self, path: Sequence[int], found: Sequence[Block]) -> None:
        def worth_of(num: int) -> float:
            return num + float(num) * num / 2.0 * self._per_block

        lost = worth_of(self._lru_hits(path, found)) - worth_of(len(found))
        self._guard.judge(float(len(path)), lost, self._worth(0, len(path)))

    def _reach(self, path: Sequence[int], run: Run, start: int) -> int:
        known = start
        for at in range(start, min(len(path), run.hi)):
            if at - known > run.stride:
                break
            if run.keeps_key(at) and self._ghost_at(path, at) is run:
                known = at + 1
        return known

    def _ghost_at(self, path: Sequence[int], place: int) -> Run | None:
        run, at = self._ghosts.get(path[place], (None, 0))
        return run if at == place else None

    def _take(self, run: Run, start: int, end: int) -> None:
        age = self._age(run)
        self._model.used(run.cls, age, _weight(end - start))
        num_uses, words = min(MOST_USES, run.num_uses + 1), run.words.after_use(self._now)
        self.parts.append(Part(start, end, num_uses, _gap_after(age), words=words))
        self._runs.take_front(run, end)
        self._settle_ghost(run, end)
        self._num_known = end

    def _settle_ghost(self, run: Run, end: int) -> None:
        """The places before ``end`` are not the run's any more."""
        self._drop_keys(run, end)
        if run not in self._ghost_order:
            self._runs.forget_ghost(run)
        if run.size == 0:
            self._runs.remove(run)

    def _cut(self, path: Sequence[int], found: Sequence[Block]) -> None:
        self.parts = []
        self._num_known = 0
        hits = len(found)
        while self._num_known < hits:
            start = self._num_known
            run = found[start].run
            end = start + 1
            while end < hits and found[end].run is run:
                end += 1
            if run is None:
                self.parts.append(Part(start, end, 1, self.parts[-1].gap if self.parts else 0))
                self._num_known = end
                continue
            if end == hits and end == run.mid:
                end = self._reach(path, run, end)
            self._take(run, start, end)
        while self._num_known < len(path):
            start = self._num_known
            for at in range(start, min(len(path), start + GAP + 1)):
                ghost = self._ghost_at(path, at)
                if ghost is not None:
                    break
            if ghost is None or ghost.lo > start or ghost.is_resident:
                break
            self._take(ghost, start, self._reach(path, ghost, at + 1))

    def _name_parts(self, num: int) -> None:
        num_new = num - self._num_known
        parts = self.parts
        if num_new > 0:
            parts.append(Part(self._num_known, num, 1, parts[-1].gap if parts else 0))
        end = parts[-1]
        if end.hi - end.lo > 1:
            parts.append(Part(end.hi - 1, end.hi, end.num_uses, end.gap, words=end.words))
            end.hi -= 1
        parts[-1].is_last = True
        brought = min(6, (num_new - 1).bit_length() if num_new > 0 else 0)
        length = min(5, ((num + 1).bit_length() - 1) // 2)
        merged: list[Part] = []
        for part in parts:
            uses = min(4, (part.num_uses - 1).bit_length())
            part.cls = self._model.class_of((uses, int(part.is_last), brought, part.gap, length))
            if merged and (merged[-1].cls, merged[-1].words) == (part.cls, part.words):
                merged[-1].hi = part.hi
                merged[-1].num_uses = max(merged[-1].num_uses, part.num_uses)
            else:
                merged.append(part)
        self.parts = merged

    # -- what stays --------------------------------------------------------------------------------

    def _age(self, run: Run) -> float:
        return self._now - run.last_use

    def _worth(self, lo: int, hi: int) -> float:
        return 1.0 + (lo + hi) / 2.0 * self._per_block

    def _value(self, run: Run) -> float:
        return self._model.value(run.cls, self._age(run)) * self._worth(run.lo, run.mid)

    def gain(self, part: Part) -> float:
        """Of a new block."""
        return self._model.value_of_new(part.cls) * self._worth(part.lo, part.hi)

    def _decides_as_lru(self) -> bool:
        return self._guard.is_lru or not self._model.has_learned

    def add(self, key: int, parent: Block | None, item: int = -1) -> Block:
        block = Block(key, None, item)
        block.hang_below(parent)
        self.num_blocks += 1
        return block

    def _remove(self, block: Block) -> None:
        block.hang_below(None)
        block.run = None
        self.num_blocks -= 1

    def lose_one(self, gain: float) -> Block | None:
        if self._victim is not None and not self._may_shrink(self._victim):
            self._victim = None
        if self._victim is None:
            self._victim = self._choose()
        if self._victim is None:
            return None
        if not self._decides_as_lru() and self._value(self._victim) > ENTER * gain:
            return None
        return self._drop_tail(self._victim)

    def _may_shrink(self, run: Run) -> bool:
        return self._ends_a_path(run) and self._is_let_go(run)

    def _num_gone_behind(self, run: Run) -> int:
        return sum(block is run.tail for block in self._exposed)

    def _ends_a_path(self, run: Run) -> bool:
        if not run.is_resident or run.tail is None:
            return False
        return run.tail.num_children == self._num_gone_behind(run)

    def _is_let_go(self, run: Run) -> bool:
        return run.tail is not None and self._may_leave(run.tail, self._num_gone_behind(run))

    def _choose(self) -> Run | None:
        found = (self._choose_among(each) for each in self._runs.residents if each)
        return next((run for run in found if run is not None), None)

    def _choose_among(self, residents: list[Run]) -> Run | None:
        num = len(residents)
        leaves: list[Run] = []
        if num <= 4 * LOOKS:
            return self._best(self._leaves(residents))
        num_wanted = 4 * LOOKS if self._decides_as_lru() else LOOKS
        for _ in range(4):
            if len(leaves) < num_wanted:
                first = self._random.below(num)
                some = [residents[at % num] for at in range(first, first + LOOKS)]
                leaves += self._leaves(some)
        best = self._best(leaves[:num_wanted])
        if best is not None:
            return best
        leaves = self._leaves(residents[:MOST_SEARCHED])
        return next(filter(self._is_let_go, leaves), None)

    def _leaves(self, runs: Sequence[Run]) -> list[Run]:
        return [run for run in runs if self._ends_a_path(run) and run not in self._passed_over]

    def _best(self, leaves: Sequence[Run]) -> Run | None:
        free = [run for run in leaves if self._is_let_go(run)]
        if not free:
            return None
        oldest = min(free, key=lambda run: run.number)
        if self._decides_as_lru():
            return oldest
        values = {run: self._value(run) for run in free}
        cheapest = min(free, key=lambda run: (values[run], run.number))
        return cheapest if values[cheapest] < CLEARLY * values[oldest] else oldest

    def _drop_tail(self, run: Run) -> Block:
        block = run.tail
        assert block is not None
        at = run.mid - 1
        if run.keeps_key(at):
            self._keep_key(run, block.key, at)
        self._runs.shorten(run, block.parent)
        self._remove(block)
        return block

    def keep_runs(
        self, path: Sequence[int], resident: Sequence[Block], tries_all: bool
    ) -> list[Run]:
        """The parts are runs. Returns those that are known still."""
        made = []
        for part in self.parts:
            mid = min(max(len(resident), part.lo), part.hi)
            run = Run(
                last_use=self._now,
                start=part.lo,
                lo=part.lo,
                mid=mid,
                hi=part.hi,
                tried=part.hi if tries_all else mid,
                cls=part.cls,
                num_uses=part.num_uses,
                stride=max(1, (part.hi - part.lo) // KEYS_OF_GHOST),
                tail=resident[mid - 1] if mid > part.lo else None,
            )
            self._runs.add(run)
            self._runs.retain(run, part.words, self._now)
            made.append(run)
            for block in resident[part.lo : mid]:
                block.run = run
            for at in range(mid, part.hi):
                if run.keeps_key(at):
                    self._keep_key(run, path[at], at)
        self._forget_most()
        return [run for run in made if run in self._runs]

    # -- what has left -----------------------------------------------------------------------------

    def _keep_key(self, run: Run, key: int, at: int) -> None:
        self._ghost_order.setdefault(run)
        if key in self._ghosts:
            del self._ghosts[key][0].ghost[key]
        self._ghosts[key] = (run, at)
        run.ghost[key] = at

    def _drop_keys(self, run: Run, end: int) -> None:
        for key in [key for key, at in run.ghost.items() if at < end]:
            del run.ghost[key]
            del self._ghosts[key]
        if not run.ghost:
            self._ghost_order.pop(run, None)

    def _forget(self, run: Run) -> None:
        share = (run.hi - run.mid) / run.size
        self._model.forgotten(run.cls, self._age(run), _weight(run.size) * share)
        self._settle_ghost(run, run.hi)

    def _forget_most(self) -> None:
        while self.num_history > HISTORY * self._capacity:
            self._forget(next(iter(self._ghost_order)))

    def _waiting(self) -> list[Waiting]:
        num, slots = len(self._runs), self._runs.by_slot
        if num > MOST_WAITING:
            slots = [slots[self._random.below(len(slots))] for _ in range(MOST_WAITING)]
        runs = [run for run in slots if run is not None]
        each = num / len(runs) if num > MOST_WAITING else 1.0
        return [(run.cls, self._age(run), _weight(run.size) * each) for run in runs]

    def check_invariants(self) -> None:
        """Raise AssertionError where runs, blocks and ghosts disagree."""
        assert self.num_history <= HISTORY * self._capacity, "more is remembered than allowed"
        self._runs.check_invariants()
        num_children: dict[Block, int] = {}
        blocks: list[Block] = []
        for run in self._runs.by_slot:
            if run is None:
                continue
            assert (run in self._ghost_order) == (run.hi > run.mid), "a ghost is lost"
            for block in run.blocks():
                assert block.run is run, "a block belongs to another"
                blocks.append(block)
                if block.parent is not None:
                    num_children[block.parent] = num_children.get(block.parent, 0) + 1
        assert len(blocks) == self.num_blocks, "a block belongs to none"
        for block in blocks:
            assert block.num_children == num_children.get(block, 0), "children are miscounted"
