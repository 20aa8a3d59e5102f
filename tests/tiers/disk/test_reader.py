"""A reader beside a slab's owner never takes one block for another."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockName
from kvtier.layout import opaque
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.disk import DiskOptions, DiskReader, DiskTier
from tests.tiers.disk.harness import (
    ALIGNED,
    NAMESPACE,
    SLOT_BYTES,
    UNTOUCHED,
    Arena,
    block,
    key,
    spoil,
)

THERE, ABSENT, DAMAGED = Outcome.THERE, Outcome.ABSENT, Outcome.DAMAGED
NUM_BYTES = ALIGNED.bytes_per_block
NUM_SLOTS = 4


class Pair:
    """An owner and a reader of one slab. shift: offset of the memory from alignment, in bytes."""

    def __init__(self, folder: Path, shift: int = 0) -> None:
        self.options = DiskOptions(folder, NUM_SLOTS * SLOT_BYTES)
        self.arena = Arena(shift=shift)
        self.reader = DiskReader(self.options, ALIGNED)
        self.owner: DiskTier | None = None

    def open(self) -> DiskTier:
        self.owner = DiskTier(self.options, ALIGNED)
        return self.owner

    def pieces(self, num: int) -> Pieces:
        return Pieces.whole([self.arena.address(place) for place in range(num)], NUM_BYTES)

    def put(self, *numbers: int) -> None:
        for place, number in enumerate(numbers):
            self.arena.view(place, NUM_BYTES)[:] = np.frombuffer(
                block(key(number), NUM_BYTES), np.uint8
            )
        names = [BlockName(NAMESPACE, at, key(number)) for at, number in enumerate(numbers)]
        assert self.owner is not None
        assert self.owner.put(names, self.pieces(len(numbers))) == [THERE] * len(numbers)

    def get(self, *numbers: int) -> list[Outcome]:
        """Return the reader's outcomes; compare the bytes of blocks that are reported as loaded."""
        for place in range(len(numbers)):
            self.arena.view(place, NUM_BYTES)[:] = UNTOUCHED
        found = self.reader.get([key(number) for number in numbers], self.pieces(len(numbers)))
        for place, (number, outcome) in enumerate(zip(numbers, found, strict=True)):
            if outcome is THERE:
                content = self.arena.view(place, NUM_BYTES).tobytes()
                assert content == block(key(number), NUM_BYTES), "another block's bytes"
        return found

    def find(self, *numbers: int) -> Sequence[Outcome]:
        return self.reader.find([key(number) for number in numbers])

    def drop(self, *numbers: int, for_good: bool = False) -> None:
        assert self.owner is not None
        self.owner.drop([key(number) for number in numbers], for_good)

    def close(self) -> None:
        self.reader.close()
        if self.owner is not None:
            self.owner.close()
            self.owner = None


@pytest.fixture(params=[0, 8], ids=["aligned", "bounced"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(tmp_path / "slab", request.param)
    yield made
    made.close()


def test_reader_may_come_before_its_owner(pair: Pair) -> None:
    assert pair.find(1) == [ABSENT]
    assert pair.get(1) == [Outcome.FAILED]
    pair.open()
    pair.put(1, 2)
    assert pair.find(1, 2, 3) == [THERE, THERE, ABSENT]
    assert pair.get(2, 3, 1) == [THERE, ABSENT, THERE]


def test_reader_follows_what_the_owner_does(pair: Pair) -> None:
    pair.open()
    for number in range(20):
        pair.put(number)
        assert pair.get(number) == [THERE]
        pair.drop(number)
        assert pair.find(number) == [THERE]  # until its slot is used again
    assert pair.find(0) == [ABSENT]
    pair.drop(19, for_good=True)
    assert pair.find(19) == [ABSENT]


def test_reader_outlives_compactions_and_owners(pair: Pair) -> None:
    owner = pair.open()
    pair.put(1)
    assert pair.find(1) == [THERE]
    (part,) = owner.blocks.parts
    part.slab.compact()
    pair.put(2)
    assert pair.get(1, 2) == [THERE, THERE]
    owner.close()
    pair.open()
    pair.put(3)
    assert pair.get(1, 3) == [THERE, THERE]
    pair.owner.close()
    shutil.rmtree(pair.options.path)
    pair.open()
    pair.put(4)
    assert pair.find(1, 4) == [ABSENT, THERE]
    assert pair.get(4) == [THERE]


def test_reader_changes_nothing(pair: Pair) -> None:
    pair.open()
    pair.put(1)
    assert pair.reader.put([BlockName(NAMESPACE, 0, key(2))], pair.pieces(1)) == [Outcome.FAILED]
    pair.reader.drop([key(1)], for_good=True)
    assert pair.find(1, 2) == [THERE, ABSENT]


def test_flipped_bit_is_noticed_and_not_asked_for_again(pair: Pair) -> None:
    pair.open()
    pair.put(1, 2)
    spoil(pair.options.path, 0)
    assert pair.get(1, 2) == [DAMAGED, THERE]
    assert pair.find(1, 2) == [ABSENT, THERE]


def test_record_that_is_half_written_is_left_for_the_next_time(pair: Pair) -> None:
    pair.open()
    pair.put(1)
    assert pair.find(1) == [THERE]
    journal = pair.options.path / "journal"
    pair.put(2)
    whole = journal.read_bytes()
    os_size = len(whole)
    with journal.open("r+b") as file:
        file.truncate(os_size - 20)
        assert pair.find(1, 2) == [THERE, ABSENT]
        file.seek(0, 2)
        file.write(bytes(20))
        file.flush()
        assert pair.find(1, 2) == [THERE, ABSENT]
        file.seek(os_size - 20)
        file.write(whole[-20:])
    assert pair.find(1, 2) == [THERE, THERE]


def test_slot_that_is_written_anew_while_it_is_read_is_no_hit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.open()
    pair.put(*range(NUM_SLOTS))
    assert pair.find(0) == [THERE]
    port = type(pair.reader._port(pair.reader._slab))
    read: Callable[..., object] = port.read

    def read_late(*args: object) -> object:
        found = read(*args)
        pair.drop(0)
        pair.put(100)  # in its slot
        return found

    monkeypatch.setattr(port, "read", read_late)
    assert pair.get(0) == [ABSENT]


def test_slab_of_something_else_is_not_read(pair: Pair) -> None:
    pair.open()
    pair.put(1)
    other = DiskReader(DiskOptions(pair.options.path, 1 << 20), opaque(NUM_BYTES))
    assert other.find([key(1)]) == [ABSENT]
    other.close()


def test_capacity_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="below one block"):
        DiskReader(DiskOptions(tmp_path, 1), ALIGNED)


class ReaderMachine(RuleBasedStateMachine):
    """Whatever the owner does, the reader finds what it finds."""

    @initialize(shift=st.sampled_from([0, 8]))
    def begin(self, shift: int) -> None:
        self.folder = tempfile.mkdtemp()
        self.pair = Pair(Path(self.folder) / "slab", shift)
        self.pair.open()
        self.held: set[int] = set()

    @rule(number=st.integers(0, 9))
    def put(self, number: int) -> None:
        if number not in self.held and len(self.held) < NUM_SLOTS:
            self.pair.put(number)
            self.held.add(number)

    @rule(number=st.integers(0, 9), for_good=st.booleans())
    def drop(self, number: int, for_good: bool) -> None:
        self.pair.drop(number, for_good=for_good)
        self.held.discard(number)

    @rule()
    def compact(self) -> None:
        assert self.pair.owner is not None
        self.pair.owner.blocks.parts[0].slab.compact()

    @rule(is_clean=st.booleans())
    def restart(self, is_clean: bool) -> None:
        assert self.pair.owner is not None
        if is_clean:
            self.pair.owner.close()
        else:
            self.pair.owner.abandon()
        owner = self.pair.open()
        found = owner.find([key(number) for number in range(10)])
        self.held = {number for number, outcome in enumerate(found) if outcome is THERE}

    @invariant()
    def reader_has_what_the_owner_has(self) -> None:
        if hasattr(self, "pair"):
            found = self.pair.get(*range(10))
            assert all(found[number] is THERE for number in self.held)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.close()
            shutil.rmtree(self.folder)


TestReaderMachine = ReaderMachine.TestCase
