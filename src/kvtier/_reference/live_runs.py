"""The policy that works on runs, in a tier of a running cache: the twin of
``native/policy/live_runs.hpp``, which says what each call means."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from kvtier._reference.retention import USUAL
from kvtier._reference.run_policy import ENTER, MayLeave, RunPolicy
from kvtier._reference.runs import Block, Run
from kvtier.hints import Said, Word

FEWEST_EXPECTED = 1 << 16
EXPECTED_SHARE = 16
MOST_PASSED = 64
UNASKED = (0, 1, 0, 0, 0)


class Place(NamedTuple):
    """parent: the block in front, None where that is not resident. at: blocks in front."""

    parent: Block | None
    at: int


class _Expected(NamedTuple):
    before: int
    run: Run | None
    at: int


class LiveRuns(RunPolicy):
    """find: the resident block of a name, if there is one."""

    def __init__(
        self,
        capacity: int,
        seed: int,
        doubles_at_blocks: float,
        may_leave: MayLeave,
        find: Callable[[int], Block | None],
    ) -> None:
        super().__init__(capacity, seed, doubles_at_blocks, may_leave)
        self._find = find
        self._expected: OrderedDict[int, _Expected] = OrderedDict()
        self._planned: list[Run] = []  # what was to leave for those that were admitted
        self._most_expected = max(FEWEST_EXPECTED, capacity // EXPECTED_SHARE)

    # -- requests ---------------------------------------------------------------------------------

    def asked(self, path: Sequence[int], found: Sequence[Block], now: float) -> None:
        if not path:
            return
        self._settle(found)
        run = found[-1].run if found else None
        has_left = run is not None and run.hi > run.mid
        self.begin(path, found, now)
        if found:
            is_left = has_left and self._num_known == len(found)
            found[-1].is_fork |= found[-1].num_children > 0 or len(found) == len(path) or is_left
        for run in reversed(self.keep_runs(path, found, tries_all=False)):
            for at in range(run.mid, run.hi):
                self._expect(path[at], _Expected(path[at - 1] if at else 0, run, at))

    def _expect(self, name: int, it: _Expected) -> None:
        self._expected.pop(name, None)
        if len(self._expected) == self._most_expected:
            self._expected.popitem(last=False)
        self._expected[name] = it

    def _settle(self, found: Sequence[Block]) -> None:
        before: Block | None = None
        run: Run | None = None
        for at, block in enumerate(found):
            begins_run = run is None or block.run is not run
            run = block.run
            is_elsewhere = begins_run and run is not None and run.lo != at
            if block.parent is not before or is_elsewhere:
                self._leave_run(block)
                block.hang_below(before)
                run = None
            before = block

    # -- what is said of prompts ------------------------------------------------------------------

    def _run_at(self, path: Sequence[int], found: Sequence[Block], at: int) -> Run | None:
        if at < len(found):
            return found[at].run
        entry = self._entry_of(path[at])
        return entry[0] if entry is not None and entry[1] == at else None

    def _end_of_shared(self, found: Sequence[Block]) -> int:
        end, num_own = len(found), 0
        while end > 0:
            block = found[end - 1]
            if block.is_fork or block.num_children > num_own:
                break
            end, num_own = end - 1, 1
        return end

    def retain(self, path: Sequence[int], found: Sequence[Block], said: Said, now: float) -> None:
        self._now = max(self._now, now)
        self._runs.expire(self._now)
        self._victim, self._planned = None, []
        first, end = said.first, min(said.end, len(path))
        if said.word == Word.ENDED:
            first = max(first, self._end_of_shared(found))
        before: Block | None = None
        stop = 0
        while stop < end:
            at = stop
            run = self._run_at(path, found, at)
            is_known = run is not None and run.lo == at
            while stop < end and self._run_at(path, found, stop) is run:
                if stop < len(found):
                    is_known &= found[stop].parent is before
                    before = found[stop]
                stop += 1
            if run is None or not is_known or stop <= first:
                continue
            words = run.words
            said_now = words.with_word(said, self._now)
            if said_now == words:
                continue
            start = max(at, first)
            if start > at:
                self._split(path, found, run, start)
                if run not in self._runs:
                    continue
            if stop < run.hi and stop != run.mid:
                run = self._split(path, found, run, stop)
            self._runs.retain(run, said_now, self._now)
        self._forget_most()

    def _split(self, path: Sequence[int], found: Sequence[Block], run: Run, at: int) -> Run:
        mid = min(run.mid, at)
        front = Run(
            last_use=run.last_use,
            start=run.start,
            lo=run.lo,
            mid=mid,
            hi=at,
            tried=min(max(run.tried, mid), at),
            cls=run.cls,
            num_uses=run.num_uses,
            stride=run.stride,
            tail=found[mid - 1] if mid > run.lo else None,
        )
        words = run.words
        self._runs.take_front(run, at)
        self._settle_ghost(run, at)
        self._runs.add(front)
        self._runs.retain(front, words, self._now)
        for block in found[front.lo : mid]:
            block.run = front
        for each in range(mid, at):
            if front.keeps_key(each):
                self._keep_key(front, path[each], each)
            self._expect(path[each], _Expected(path[each - 1] if each else 0, front, each))
        return front

    # -- what comes -------------------------------------------------------------------------------

    def _entry_of(self, name: int) -> tuple[Run, int] | None:
        """What the run of a block is, and its place."""
        entry = self._expected.get(name)
        if entry is None or entry.run is None or entry.run not in self._runs:
            return None
        return (entry.run, entry.at) if entry.at < entry.run.hi else None

    def continues(self, names: Sequence[int], before: int) -> None:
        at = 0
        block, entry = self._find(before), self._expected.get(before)
        if block is not None:
            at = self._place_of(block) + 1
        elif entry is not None:
            at = entry.at + 1
        for name in names:
            if name not in self._expected and self._find(name) is None:
                self._expect(name, _Expected(before, None, at))
            before, at = name, at + 1

    def _run_in_front_of(self, names: Sequence[int]) -> Run | None:
        entry = self._expected.get(names[0]) if names else None
        block = self._find(entry.before) if entry is not None and entry.at > 0 else None
        return None if block is None else block.run

    def _pass_over_next(self) -> Run | None:
        run = self._choose()
        if run is not None:
            *_, first = run.blocks()
            if len(self._passed_over) == MOST_PASSED:
                del self._passed_over[1], self._exposed[1]
            self._passed_over.append(run)
            self._exposed.append(first.parent)
            self._planned.append(run)
        return run

    def admit(self, names: Sequence[int], num_free: int, least_chance: float = 0.0) -> list[int]:
        self._planned = []
        is_lru = self._decides_as_lru()
        is_dear = least_chance > 0.0 and not is_lru
        has_room = len(names) <= num_free
        if (has_room or not self._runs.num_retained) if is_lru else (has_room and not is_dear):
            return list(range(len(names)))
        which: list[int] = []
        cls, level = 0, USUAL
        gain, its_worth = self._model.value_of_new(cls), 1.0
        chance: float | None = None
        run: Run | None = None
        victim: Run | None = None
        at = 0
        its_value = 0.0
        may_leave = True
        was_left_out = lacks_worth = False
        front = self._run_in_front_of(names) if self._per_block > 0.0 else None
        if front is not None:
            self._passed_over.append(front)
            self._exposed.append(None)
        for i, name in enumerate(names):
            entry = self._entry_of(name)
            if entry is not None and entry[0] is not run:
                run, _ = entry
                cls, its_worth = run.cls, self._worth(run.lo, run.hi)
                gain = self._model.value(cls, self._age(run)) * its_worth
                level = run.level
                chance = None
            is_behind = i > 0 and (entry is None or self._expected[name].before == names[i - 1])
            if not (was_left_out and is_behind):
                if not num_free and may_leave and (victim is None or at == victim.lo):
                    victim = self._pass_over_next()
                    may_leave = victim is not None
                    chance = None
                    if victim is not None:
                        at = victim.mid
                        its_value = self._model.value(victim.cls, self._age(victim))
                price = 0.0 if victim is None else its_value * self._worth(victim.lo, at)
                if not num_free and not may_leave and front is not None:
                    was_left_out, lacks_worth = True, False
                elif victim is not None and victim.level != level:
                    was_left_out = lacks_worth = victim.level > level
                else:
                    if is_dear and chance is None:
                        chance = self._model.chance(cls, price / its_worth)
                    lacks_worth = not is_lru and price > ENTER * gain
                    is_rare = chance is not None and chance < least_chance
                    was_left_out = lacks_worth or (is_rare and level <= USUAL)
                if not was_left_out and num_free:
                    num_free -= 1
                elif not was_left_out and may_leave:
                    at -= 1
            if not was_left_out:
                which.append(i)
            elif entry is not None and lacks_worth:
                entry[0].tried = max(entry[0].tried, entry[1] + 1)
        self._passed_over, self._exposed = [], []
        self._planned.reverse()
        return which

    def _place_of(self, block: Block) -> int:
        assert block.run is not None
        behind = next(at for at, each in enumerate(block.run.blocks()) if each is block)
        return block.run.mid - 1 - behind

    def entered(
        self, name: int, item: int, place: Place | None, behind: Block | None = None
    ) -> Block:
        entry, known = self._entry_of(name), self._expected.get(name)
        joined: Run | None = None
        parent, at = place or (None, 0)
        if entry is not None and known is not None:
            run, at = entry
            if place is None and at > 0:
                is_next = at == run.mid and at > run.lo
                parent = run.tail if is_next else self._find(known.before)
            if at == run.mid and (at == run.lo or run.tail is parent):
                joined = run
        elif place is None and known is not None and known.run is None:
            at = known.at
            parent = self._find(known.before) if at > 0 else None
        elif place is None and behind is not None:
            parent, at = behind, self._place_of(behind) + 1
        self._expected.pop(name, None)
        if joined is None and parent is not None:
            above = parent.run
            assert above is not None
            if above.tail is parent and above.mid == above.hi == at:
                joined = above
        block = self.add(name, parent, item)
        if joined is None:
            self._begin_run(block, at)
        else:
            self._grow(joined, block)
        return block

    def _grow(self, run: Run, block: Block) -> None:
        at = run.mid
        is_kept = at < run.hi and run.keeps_key(at)
        self._runs.grow(run, block)
        block.run = run
        if is_kept:
            self._settle_ghost(run, at + 1)

    def _begin_run(self, block: Block, at: int) -> None:
        run = Run(
            last_use=self._now,
            start=at,
            lo=at,
            mid=at + 1,
            hi=at + 1,
            tried=at + 1,
            cls=self._model.class_of(UNASKED),
            num_uses=1,
            stride=1,
            tail=block,
        )
        self._runs.add(run)
        block.run = run

    # -- what leaves ------------------------------------------------------------------------------

    def let_go(self, block: Block) -> None:
        """Whether a run may lose blocks is looked at when it is about to."""

    def begin_evicting(self) -> None:
        self._victim = None

    def _follow_plan(self) -> None:
        if self._victim is not None and self._may_shrink(self._victim):
            return
        self._victim = None
        while self._victim is None and self._planned:
            run = self._planned.pop()
            if run in self._runs and self._may_shrink(run):
                self._victim = run

    def next_victim(self) -> Block | None:
        self._follow_plan()
        left = self.lose_one(inf)
        self._forget_most()
        return left

    def evict(self, num_blocks: int) -> list[Block]:
        self.begin_evicting()
        left: list[Block] = []
        while len(left) < num_blocks and (block := self.next_victim()) is not None:
            left.append(block)
        return left

    def left(self, block: Block) -> None:
        self._leave_run(block)
        self._remove(block)
        block.item = -1

    def _leave_run(self, block: Block) -> None:
        run = block.run
        if run is None:
            return
        parent = block.parent
        if parent is None or parent.run is not run:
            self._runs.take_front(run, run.lo + 1)
            self._settle_ghost(run, run.lo)
        else:
            behind: list[Block] = []
            for each in run.blocks():
                if each is block:
                    break
                behind.append(each)
            at, mid, tail = run.mid - 1 - len(behind), run.mid, run.tail
            self._drop_keys(run, run.hi)
            self._runs.cut_off(run, at, parent)
            if behind:
                rest = Run(
                    last_use=run.last_use,
                    start=run.start,
                    lo=at + 1,
                    mid=mid,
                    hi=mid,
                    tried=run.tried,
                    cls=run.cls,
                    num_uses=run.num_uses,
                    stride=run.stride,
                    tail=tail,
                )
                self._runs.add(rest)
                self._runs.retain(rest, run.words, self._now)
                for each in behind:
                    each.run = rest
        block.run = None
