"""The native index and its Python twin against a dictionary.

The steps are random paths, leases, writes that succeed and fail, and evictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.core import hot
from kvtier.core.keys import next_key, next_keys
from kvtier.core.types import DEVICE, DISK, HOST, BlockId, BlockName, Label, Match, Slot
from kvtier.index import State
from tests.index.indexes import Both, make

TIERS = (DEVICE, HOST, DISK)
NAMESPACES = (b"one", b"two")
LABELS = (b"a", b"b")

Path = tuple[bytes, ...]
"""Namespace, then labels: the name of a block."""

paths = st.tuples(
    st.sampled_from(NAMESPACES), st.lists(st.sampled_from(LABELS), min_size=1, max_size=5)
).map(lambda made: (made[0], *made[1]))

tiers_of_the_index = st.sampled_from(TIERS)


@dataclass
class Place:
    """State of one block in one tier, in the model."""

    state: State = State.ABSENT
    slot: int = -1
    leases: int = 0
    last_use: int = -1


@dataclass
class Known:
    """State of one block in the model."""

    block: BlockId
    tiers: dict[str, Place]
    num_uses: int = 0

    @property
    def is_cached(self) -> bool:
        return any(place.state is not State.ABSENT for place in self.tiers.values())


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = self.make_index()
        self.model: dict[Path, Known] = {}
        self.now = 0
        self.next_slot = 0

    def make_index(self) -> Any:
        """Return the native index with its twin. Both have to return the same."""
        return Both(TIERS)

    # -- the model ---------------------------------------------------------------------------------

    def _new(self, block: BlockId) -> Known:
        return Known(block, {tier: Place() for tier in TIERS})

    def _places(self, *states: State, leases: int | None = None) -> list[tuple[Path, str]]:
        """Return the blocks and tiers in one of ``states``, in a fixed order."""
        return sorted(
            (path, tier)
            for path, known in self.model.items()
            for tier, place in known.tiers.items()
            if place.state in states and (leases is None or place.leases == leases)
        )

    def _draw(
        self, data: st.DataObject, places: list[tuple[Path, str]]
    ) -> tuple[Known, Place, str]:
        path, tier = data.draw(st.sampled_from(places))
        return self.model[path], self.model[path].tiers[tier], tier

    def _candidates(self, tier: str) -> set[Path]:
        """Return the evictable blocks: ready, not leased, without a child in the tier."""
        stay = {path for path, _ in self._places(State.READY, State.WRITING) if _ == tier}
        parents = {path[:-1] for path in stay}
        return {
            path
            for path, at in self._places(State.READY, leases=0)
            if at == tier and path not in parents
        }

    def _prune(self) -> None:
        """Forget blocks that no tier holds and no longer prefix needs."""
        for path in sorted(self.model, key=len, reverse=True):
            has_child = any(other[:-1] == path for other in self.model)
            if not has_child and not self.model[path].is_cached:
                del self.model[path]

    # -- writing -----------------------------------------------------------------------------------

    @rule(path=paths, tier=tiers_of_the_index, data=st.data())
    def begin_write(self, path: Path, tier: str, data: st.DataObject) -> None:
        """Begin to write those blocks of a path's tail that are absent from the tier."""
        blocks = self._extend(path, data)
        for length, block in enumerate(blocks, start=2):
            known = self.model.setdefault(path[:length], self._new(block))
            assert known.block == block, "a block changed its number"
        first = data.draw(st.integers(0, len(blocks) - 1))
        for length in range(first + 2, len(path) + 1):
            place = self.model[path[:length]].tiers[tier]
            if place.state is State.ABSENT:
                place.state, place.slot, place.last_use = State.WRITING, self.next_slot, -1
                self.index.begin_write(
                    [self.model[path[:length]].block], tier, [Slot(self.next_slot)]
                )
                self.next_slot += 1

    def _extend(self, path: Path, data: st.DataObject) -> list[BlockId]:
        """Extend from the root or from a known block. Both return the same blocks."""
        known = [n for n in range(2, len(path)) if path[:n] in self.model]
        cut = data.draw(st.sampled_from([1, *known]))
        if cut == 1:
            return self.index.extend(path[0], path[1:])
        above = [self.model[path[:length]].block for length in range(2, cut + 1)]
        return [*above, *self.index.extend(path[0], path[cut:], above[-1])]

    @precondition(lambda self: self._places(State.WRITING))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        known, _, tier = self._draw(data, self._places(State.WRITING))
        self._commit(known, tier)

    def _commit(self, known: Known, tier: str) -> None:
        self.now += 1
        self.index.commit([known.block], tier, float(self.now))
        place = known.tiers[tier]
        place.state = State.READY
        if place.last_use < 0:  # blocks that were used before their commit keep that time
            place.last_use = self.now

    @precondition(lambda self: len(self._places(State.WRITING)) > 1)
    @rule(data=st.data())
    def commit_all(self, data: st.DataObject) -> None:
        """Commit blocks of one tier, in any order."""
        tier = data.draw(st.sampled_from(sorted({at for _, at in self._places(State.WRITING)})))
        paths = [path for path, at in self._places(State.WRITING) if at == tier]
        some = data.draw(st.permutations(paths))
        self.now += 1
        self.index.commit([self.model[path].block for path in some], tier, float(self.now))
        for path in some:
            place = self.model[path].tiers[tier]
            place.state = State.READY
            if place.last_use < 0:
                place.last_use = self.now

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        """Names of any blocks in any order. Some keys may have been computed before."""
        paths = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=6))
        blocks = [self.model[path].block for path in paths]
        names = [
            BlockName(path[0], len(path) - 2, next_keys(path[0], path[1:])[-1]) for path in paths
        ]
        if data.draw(st.booleans(), label="known"):
            self.index.set_keys(blocks, [name.key for name in names])
        assert self.index.names(blocks) == names
        assert self.index.num_uses(blocks) == [self.model[path].num_uses for path in paths]

    @rule(path=paths, tier=tiers_of_the_index, data=st.data())
    def write_and_commit(self, path: Path, tier: str, data: st.DataObject) -> None:
        self.begin_write(path, tier, data)
        for length in range(2, len(path) + 1):
            if self.model[path[:length]].tiers[tier].state is State.WRITING:
                self._commit(self.model[path[:length]], tier)

    @rule(
        path=paths,
        tier=tiers_of_the_index,
        hold=st.booleans(),
        tick=st.integers(0, 1),
        data=st.data(),
    )
    def insert(self, path: Path, tier: str, hold: bool, tick: int, data: st.DataObject) -> None:
        """Insert the whole path at once, from the root or from a known block.

        Without a tick it is as old as the last used block. Both indexes still have to choose the
        same victim.
        """
        known = [n for n in range(2, len(path)) if path[:n] in self.model]
        cut = data.draw(st.sampled_from([1, *known]))
        above = self.model[path[:cut]].block if cut > 1 else None
        slots = [Slot(self.next_slot + n) for n in range(len(path) - cut)]
        self.next_slot += len(slots)
        self.now += tick
        made = self.index.insert(
            path[0], path[cut:], tier, slots, float(self.now), above, hold=hold
        )
        num_new = 0
        for at, slot in enumerate(slots):
            name = path[: cut + at + 1]
            place = self.model[name].tiers[tier] if name in self.model else Place()
            if place.state not in (State.ABSENT, State.READY):
                assert len(made.blocks) == at, "a block on its way was taken for a ready one"
                break
            block = made.blocks[at]
            place = self.model.setdefault(name, self._new(block)).tiers[tier]
            assert self.model[name].block == block
            if place.state is State.ABSENT:
                place.state, place.slot, place.last_use = State.READY, slot, self.now
                num_new += 1
            place.leases += hold
            assert made.slots[at] == place.slot
        else:
            assert len(made.blocks) == len(slots)
        assert made.num_new == num_new

    @precondition(lambda self: self._places(State.WRITING, leases=0))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        known, place, tier = self._draw(data, self._places(State.WRITING, leases=0))
        assert self.index.abort([known.block], tier) == [place.slot]
        place.state, place.slot = State.ABSENT, -1
        self._prune()

    @precondition(lambda self: self._places(State.READY))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Lose any ready block, leaf or not. A leased block stays."""
        known, place, tier = self._draw(data, self._places(State.READY))
        slot = self.index.lose(known.block, tier)
        if place.leases:
            assert slot is None
            return
        assert slot == place.slot
        place.state, place.slot = State.ABSENT, -1
        self._prune()

    # -- use ---------------------------------------------------------------------------------------

    @precondition(lambda self: self._places(State.READY, State.WRITING))
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        known, place, tier = self._draw(data, self._places(State.READY, State.WRITING))
        self.index.lease([known.block], tier)
        place.leases += 1

    @precondition(lambda self: any(self._leased()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        known, place, tier = self._draw(data, self._leased())
        self.index.release([known.block], tier)
        place.leases -= 1

    def _leased(self) -> list[tuple[Path, str]]:
        return [
            (path, tier)
            for path, tier in self._places(State.READY, State.WRITING)
            if self.model[path].tiers[tier].leases
        ]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """Touch the end of a known path."""
        path = data.draw(st.sampled_from(sorted(self.model)))
        first = data.draw(st.integers(2, len(path)))
        used = [self.model[path[:length]] for length in range(first, len(path) + 1)]
        self.now += 1
        self.index.touch([known.block for known in used], float(self.now))
        for known in used:
            known.num_uses += 1
            assert self.index.num_uses([known.block]) == [known.num_uses]
        for tier in TIERS:
            for known in used:
                known.tiers[tier].last_use = self.now

    # -- eviction ----------------------------------------------------------------------------------

    @rule(tier=tiers_of_the_index, num_blocks=st.integers(-1, 6), data=st.data())
    def evict(self, tier: str, num_blocks: int, data: st.DataObject) -> None:
        upper_bound = self.index.num_evictable(tier)
        chosen = self.index.evict(tier, num_blocks)
        assert len(chosen) <= min(max(num_blocks, 0), upper_bound)
        names = {known.block: path for path, known in self.model.items()}
        for block in chosen:
            candidates = self._candidates(tier)
            path = names[block]
            assert path in candidates, "a block left that had to stay"
            self._check_order(path, candidates, tier)
            self.model[path].tiers[tier].state = State.EVICTING
            assert self.index.state(block, tier) is State.EVICTING
        assert len(chosen) == max(num_blocks, 0) or not self._candidates(tier)
        self.index.check_invariants()
        for block in chosen:
            place = self.model[names[block]].tiers[tier]
            if data.draw(st.booleans(), label="stays"):
                self.index.keep([block], tier)
                place.state = State.READY
            else:
                assert self.index.forget([block], tier) == [place.slot]
                place.state, place.slot = State.ABSENT, -1
        self._prune()

    def _check_order(self, path: Path, candidates: set[Path], tier: str) -> None:
        """Check that an evicted block is one of the least recently used candidates."""
        oldest = min(self.model[other].tiers[tier].last_use for other in candidates)
        assert self.model[path].tiers[tier].last_use == oldest, "a younger block left first"

    # -- after every step --------------------------------------------------------------------------

    @rule(path=paths)
    def match(self, path: Path) -> None:
        self._check_match(path)

    def _check_match(self, path: Path) -> None:
        match = self.index.match(path[0], path[1:])
        assert match == self._expected(path)

    def _expected(self, path: Path) -> Match:
        rows: list[tuple[BlockId, str, bool]] = []
        for length in range(2, len(path) + 1):
            known = self.model.get(path[:length])
            ready = [t for t in TIERS if known and known.tiers[t].state is State.READY]
            if known is None or not ready:
                break
            arriving = known.tiers[TIERS[0]].state is State.WRITING
            rows.append((known.block, ready[0], arriving))
        blocks, tiers, in_flight = zip(*rows, strict=True) if rows else ((), (), ())
        return Match(blocks, tiers, in_flight, len(path) - 1)

    @invariant()
    def every_known_prefix_is_matched_as_the_model_says(self) -> None:
        for path in self.model:
            self._check_match(path)

    @invariant()
    def counts_agree(self) -> None:
        self.index.check_invariants()
        assert len(self.index) == len(self.model)
        assert self.index.num_namespaces == len({path[0] for path in self.model})
        for tier in TIERS:
            held = [p for p, t in self._places(State.WRITING, State.READY) if t == tier]
            assert self.index.num_held(tier) == len(held)
            slots = self.index.slots([self.model[path].block for path in held], tier)
            assert slots == [self.model[path].tiers[tier].slot for path in held]

    @invariant()
    def slots_are_those_of_the_prefix(self) -> None:
        for path in self.model:
            places = [self.model[path[:n]].tiers[TIERS[0]] for n in range(2, len(path) + 1)]
            ready = [place.state is State.READY for place in places]
            num_ready = (*ready, False).index(False)
            expected = [place.slot for place in places[:num_ready]]
            assert self.index.match_slots(path[0], path[1:], DEVICE).tolist() == expected

    @invariant()
    def keys_are_chained(self) -> None:
        for path, known in self.model.items():
            key: bytes = path[0]
            for label in path[1:]:
                key = next_key(key, Label(label))
            assert self.index.key(known.block) == key
            assert self.index.names([known.block]) == [(path[0], len(path) - 2, key)]

    @invariant()
    def states_follow_the_path(self) -> None:
        tier = TIERS[-1]
        for path in self.model:
            expected = [
                self.model[path[:length]].tiers[tier].state for length in range(2, len(path) + 1)
            ]
            assert self.index.states(path[0], path[1:], tier) == expected
            first = self.model[path[:2]].block
            assert self.index.states(path[0], path[2:], tier, first) == expected[1:]

    @rule(path=paths, tier=tiers_of_the_index, fewest=st.integers(2, 6))
    def prefixes(self, path: Path, tier: str, fewest: int) -> None:
        """Check the prefixes of known blocks along a path, from length ``fewest`` on."""
        known = [path[:n] for n in range(2, len(path) + 1) if path[:n] in self.model]
        above = [p for p in known[: fewest - 2] if (p, tier) in self._places(State.READY)]
        below = [self.model[p].block for p in known[fewest - 2 :]]
        expected = [self.model[above[-1]].block] if above and below else []
        assert self.index.prefixes(below, tier) == expected


class TwinMachine(IndexMachine):
    """The Python twin alone, for machines without the native core."""

    def make_index(self) -> Any:
        return make("python", TIERS)


STEPS = settings(stateful_step_count=50, max_examples=2 * settings.default.max_examples)


@pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")
def test_native_index_twin_and_model_agree() -> None:
    run_state_machine_as_test(IndexMachine, settings=STEPS)


@pytest.mark.skipif(hot.NATIVE, reason="runs beside the native index")
def test_twin_and_model_agree() -> None:
    run_state_machine_as_test(TwinMachine, settings=STEPS)
