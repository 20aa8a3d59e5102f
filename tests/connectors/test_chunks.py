"""The flat index of chunks: a model of it, step by step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.connectors.vllm.chunks import ChunkIndex, ChunkState, HostIndex

KEYS = [bytes([number]) for number in range(12)]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)


def test_oldest_chunk_that_nobody_holds_leaves_first() -> None:
    index = ChunkIndex(3)
    for key in KEYS[:3]:
        assert index.reserve([key]) is not None
        index.commit([key])
    index.hold([KEYS[0]])
    index.touch([KEYS[1]])
    reserved = index.reserve([KEYS[3]])
    assert reserved is not None
    assert reserved.evicted == [KEYS[2]]
    assert index.state(KEYS[3]) is ChunkState.WRITING


def test_beginning_of_a_prompt_leaves_last() -> None:
    index = ChunkIndex(3)
    assert index.reserve(KEYS[:3]) is not None
    index.commit(KEYS[:3])
    index.touch(KEYS[:3])
    reserved = index.reserve(KEYS[3:5])
    assert reserved is not None
    assert reserved.evicted == [KEYS[2], KEYS[1]]


def test_beginning_of_a_prompt_leaves_last_if_nothing_is_told_but_the_store() -> None:
    index = ChunkIndex(3)
    assert index.reserve(KEYS[:3]) is not None
    index.commit(set(KEYS[:3]))
    reserved = index.reserve(KEYS[3:5])
    assert reserved is not None
    assert reserved.evicted == [KEYS[2], KEYS[1]]


def test_late_end_of_a_copy_makes_nothing_newer() -> None:
    index = ChunkIndex(4)
    assert index.reserve(KEYS[:2]) is not None
    assert index.reserve(KEYS[2:4]) is not None
    index.commit(KEYS[2:4])
    index.commit(KEYS[:2])
    index.hold(KEYS[:2])
    index.touch(KEYS[2:4])
    index.release(KEYS[:2])
    reserved = index.reserve(KEYS[4:7])
    assert reserved is not None
    assert reserved.evicted == [KEYS[1], KEYS[0], KEYS[3]]


def test_no_room_is_refused_and_nothing_leaves() -> None:
    index = ChunkIndex(2)
    assert index.reserve(KEYS[:2]) is not None
    index.commit(KEYS[:1])
    assert index.reserve(KEYS[2:4]) is None, "one of two is still being written"
    assert index.state(KEYS[0]) is ChunkState.READY


def test_chunk_that_is_wanted_does_not_leave_for_its_neighbours() -> None:
    index = ChunkIndex(2)
    assert index.reserve(KEYS[:2]) is not None
    index.commit(KEYS[:2])
    assert index.reserve(KEYS[:3]) is None or index.state(KEYS[0]) is ChunkState.READY


def test_chunk_that_is_being_written_cant_be_read() -> None:
    index = ChunkIndex(2)
    index.reserve([KEYS[0]])
    with pytest.raises(AssertionError, match="still being written"):
        index.hold([KEYS[0]])


def test_emptied_index_waits_for_nobody() -> None:
    """What was being written would else be pending for ever: its end is never told."""
    index = ChunkIndex(2)
    index.reserve(KEYS[:2])
    index.commit(KEYS[:1])
    index.hold(KEYS[:1])
    index.clear()
    assert [index.state(key) for key in KEYS[:2]] == [ChunkState.ABSENT] * 2
    assert index.reserve(KEYS[2:4]) is not None


def test_lost_chunk_is_absent_and_keeps_its_room_while_it_is_read() -> None:
    index = ChunkIndex(1)
    index.reserve(KEYS[:1])
    index.commit(KEYS[:1])
    index.hold(KEYS[:1])
    index.lose(KEYS[:1])
    assert index.state(KEYS[0]) is ChunkState.ABSENT
    assert index.reserve(KEYS[1:2]) is None
    index.release(KEYS[:1])
    assert index.reserve(KEYS[1:2]) is not None


def test_chunk_that_is_lost_while_it_is_written_never_gets_ready() -> None:
    index = ChunkIndex(1)
    index.reserve(KEYS[:1])
    index.lose(KEYS[:1])
    index.commit(KEYS[:1])
    assert index.state(KEYS[0]) is ChunkState.ABSENT
    assert len(index) == 0


def test_emptied_index_keeps_the_room_of_what_is_moving() -> None:
    index = ChunkIndex(3)
    index.reserve(KEYS[:3])
    index.commit(KEYS[:2])
    index.hold(KEYS[:1])
    index.clear(moving=[KEYS[0], KEYS[2]])
    assert [index.state(key) for key in KEYS[:3]] == [ChunkState.ABSENT] * 3
    assert len(index) == 2
    index.release(KEYS[:1])
    index.abort(KEYS[2:3])
    assert len(index) == 0


def test_slots_open_as_the_ranks_have_them() -> None:
    index = HostIndex(4)
    assert index.reserve(KEYS[:1]) is None
    index.open(2)
    assert index.reserve(KEYS[:2]) is not None
    assert sorted(index.slots(KEYS[:2])) == [0, 1]
    index.open(1)
    assert index.capacity == 2, "what is open stays open"
    index.open(4)
    assert index.reserve(KEYS[2:4]) is not None
    assert index.keys_in([index.slots(KEYS[2:3])[0]]) == [KEYS[2]]


class ChunkMachine(RuleBasedStateMachine):
    """Against a dictionary: what is ready, what is being written, and who holds what."""

    @initialize(num_slots=st.integers(1, 8))
    def make(self, num_slots: int) -> None:
        self.index = HostIndex(num_slots)
        self.index.open(num_slots)
        self.ready: dict[bytes, int] = {}  # key -> slot
        self.writing: dict[bytes, int] = {}
        self.held: list[bytes] = []

    @rule(keys=some_keys)
    def reserve(self, keys: list[bytes]) -> None:
        new = [key for key in keys if key not in self.ready and key not in self.writing]
        found = self.index.reserve(keys)
        free = self.index.capacity - len(self.ready) - len(self.writing)
        may_leave = [key for key in self.ready if key not in self.held and key not in keys]
        assert (found is None) == (len(new) > free + len(may_leave))
        if found is None:
            return
        assert found.keys == new
        assert set(found.evicted) <= set(may_leave)
        assert len(found.evicted) == max(0, len(new) - free), "no more leave than have to"
        for key in found.evicted:
            del self.ready[key]
        self.writing.update(zip(found.keys, self.index.slots(found.keys), strict=True))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), success=st.booleans())
    def finish(self, data: st.DataObject, success: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.writing)))
        slot = self.writing.pop(key)
        if success:
            self.index.commit([key])
            self.ready[key] = slot
        else:
            self.index.abort([key])

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.ready)))
        self.index.hold([key])
        assert self.index.slots([key]) == [self.ready[key]]
        self.held.append(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove(key)
        self.index.release([key])

    @rule(keys=some_keys)
    def touch(self, keys: list[bytes]) -> None:
        self.index.touch(keys)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.ready, self.writing, self.held = {}, {}, []

    @invariant()
    def is_what_the_model_says(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_invariants()
        for key in KEYS:
            expected = ChunkState.ABSENT
            if key in self.ready:
                expected = ChunkState.READY
            elif key in self.writing:
                expected = ChunkState.WRITING
            assert self.index.state(key) is expected


def test_index_is_what_the_model_says() -> None:
    run_state_machine_as_test(ChunkMachine, settings=settings(stateful_step_count=40))
