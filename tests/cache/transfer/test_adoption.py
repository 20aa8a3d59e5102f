"""Exactly the blocks that all ranks recovered are adopted, piece by piece."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from hashlib import shake_128

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.block_cache import BlockState
from kvtier.cache.transfer import Move
from kvtier.cache.transfer.ranks import (
    Hello,
    RankMover,
    RankOrder,
    Report,
    Verb,
    adoption,
    digests,
    recovery_reports,
)
from kvtier.cache.transfer.ranks.recovery_reports import Telling
from kvtier.core.types import DISK, HOST, BlockKey, BlockName, Slot
from kvtier.layout import opaque
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import KeptKeys
from kvtier.tiers.disk import DiskTier
from tests.cache.keyed_harness import Engine, name

ALL = [BlockKey(shake_128(b"%d" % number).digest(32)) for number in range(64)]
LIKE = [BlockKey(bytes(24) + number.to_bytes(8, "big")) for number in range(64)]
"""Keys that differ in their last byte only: all in one bucket."""


class Ranks:
    """Ranks that recovered ``kept`` keys. Reports are pickled as on the wire. told: all orders."""

    def __init__(self, kept: Sequence[Sequence[BlockKey]]) -> None:
        self.mover = RankMover({DISK: DiskTier.facts}, 64, len(kept), len(kept))
        self.kept = [dict.fromkeys(keys) for keys in kept]
        self.tellings = [
            Telling(DISK, rank, KeptKeys(keys), len(kept)) for rank, keys in enumerate(kept)
        ]
        self.num_bytes = 0
        self.most_keys = 0
        self.told: list[RankOrder] = []

    def hello(self, *ranks: int) -> None:
        hellos = {rank: Hello(8, {DISK: self.tellings[rank].hello()}) for rank in ranks}
        self.hear(Report(hellos=hellos))

    def hear(self, report: Report) -> None:
        content = pickle.dumps(report, 5)
        self.num_bytes += len(content)
        self.most_keys = max(self.most_keys, sum(len(piece.keys) // 32 for piece in report.pieces))
        self.mover.hear(pickle.loads(content))

    def step(self) -> None:
        """Run one step of an engine."""
        for order in self.mover.take_orders():
            self.told.append(order)
            for rank, telling in enumerate(self.tellings):
                if order.verb is Verb.ERASE:
                    for block in order.names:
                        self.kept[rank].pop(block.key, None)
                elif order.verb in (Verb.DIGEST, Verb.LIST, Verb.CLEAR):
                    telling.begin(order)
        pieces = [telling.take() for telling in self.tellings]
        self.hear(Report(pieces=tuple(piece for piece in pieces if piece is not None)))

    def finish(self) -> int:
        """Run steps until all is adopted and erased. Return their number."""
        for num_steps in range(10_000):
            if self.mover.is_complete and not (
                self.mover._orders or self.mover._adoptions[DISK].has_to_erase
            ):
                return num_steps
            self.step()
        raise AssertionError("it does not end")

    def found(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        return {keys[at] for at in self.mover.find(DISK, keys).places_there}


@pytest.fixture(params=[1, 3, 1024], ids="few={}".format)
def _few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, request.param)


def make_small(monkeypatch: pytest.MonkeyPatch, num_few: int) -> None:
    monkeypatch.setattr(recovery_reports, "FEW_KEYS", num_few)
    monkeypatch.setattr(recovery_reports, "PLACES_PER_PIECE", 7)
    monkeypatch.setattr(adoption, "KEYS_PER_REPORT", 5)
    monkeypatch.setattr(adoption, "ERASED_PER_STEP", 3)
    monkeypatch.setattr(digests, "KEYS_PER_BUCKET", 4)


contents = st.lists(st.sets(st.integers(0, 63)), min_size=1, max_size=4)


@given(
    contents=contents,
    common=st.sets(st.integers(0, 63)),
    num_few=st.sampled_from([0, 10, 1024]),
    are_alike=st.booleans(),
    touched=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 63), st.booleans())),
    seed=st.integers(0, 1000),
)
def test_what_is_found_is_the_intersection_and_the_rest_is_erased(
    contents: list[set[int]],
    common: set[int],
    num_few: int,
    are_alike: bool,
    touched: list[tuple[int, int, bool]],
    seed: int,
) -> None:
    """Compare with plain sets, while blocks are written and dropped."""
    rng = random.Random(seed)
    every = LIKE if are_alike else ALL
    kept = [[every[each] for each in sorted(content | common)] for content in contents]
    for keys in kept:
        rng.shuffle(keys)
    everywhere = set(kept[0]).intersection(*kept)
    somewhere = {key for keys in kept for key in keys}
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch, num_few)
        ranks = Ranks(kept)
        order = list(range(len(kept)))
        rng.shuffle(order)
        for rank in order:
            ranks.hello(rank)
        changed: set[BlockKey] = set()
        early: set[BlockKey] = set()
        for step in range(13):
            for when, number, is_written in touched:
                if when == step:
                    changed.add(every[number])
                    _touch(ranks.mover, every[number], is_written)
            probe = [key for key in rng.sample(every, 3) if key not in early]
            early |= (now := ranks.found(probe))
            assert now <= everywhere - changed, "found, and not on all ranks"
            ranks.step()
        ranks.finish()
        found = ranks.found(every)
        assert not found & early, "told twice"
        assert found | early == everywhere - (changed - early)
        assert not ranks.mover.has_unindexed(DISK)
        erased = {
            block.key for each in ranks.told if each.verb is Verb.ERASE for block in each.names
        }
        assert erased <= somewhere - everywhere
        assert erased >= somewhere - everywhere - changed
        written: set[BlockKey] = set()
        for each in ranks.told:
            named = {block.key for block in each.names}
            if each.verb is Verb.WRITE:
                written |= named
            assert each.verb is not Verb.ERASE or not named & written, "a new block was erased"


def _touch(mover: RankMover, key: BlockKey, is_written: bool) -> None:
    if is_written:
        mover.begin(Move(HOST, DISK, [Slot(0)], [Slot(0)], (BlockName(b"", 0, key),)))
    else:
        mover.drop(DISK, [key])


def test_key_is_found_as_soon_as_it_is_sure_that_all_ranks_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_small(monkeypatch, 0)
    ranks = Ranks([ALL, ALL])
    ranks.hello(0, 1)
    num_found = []
    while not ranks.mover.is_complete:
        ranks.step()
        num_found.append(ranks.mover._adoptions[DISK].num_unindexed)
    assert num_found[1:4] == [5, 10, 15]
    assert num_found[-1] == len(ALL)


def test_last_to_leave_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, 0)
    ranks = Ranks([ALL])
    ranks.hello(0)
    ranks.step()
    assert ranks.found(ALL) == set(ALL[-5:])


def test_reports_are_small_and_keys_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks recovered the same keys: 33 bytes per key on the wire, bounded steps."""
    num_keys = 200_000
    monkeypatch.setattr(adoption, "KEYS_PER_REPORT", 8192)
    content = np.random.default_rng(5).bytes(32 * num_keys)
    keys = [BlockKey(content[at : at + 32]) for at in range(0, len(content), 32)]
    ranks = Ranks([keys] * 8)
    ranks.hello(*range(8))
    assert ranks.finish() <= num_keys // 8192 + 3
    assert ranks.num_bytes <= 33 * num_keys
    assert ranks.most_keys <= 8192
    assert ranks.mover._adoptions[DISK].num_unindexed == num_keys
    assert len(ranks.found(keys[:1000])) == 1000


def test_ranks_that_differ_in_some_keys_send_these_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_keys = 20_000
    content = np.random.default_rng(6).bytes(32 * num_keys)
    keys = [BlockKey(content[at : at + 32]) for at in range(0, len(content), 32)]
    ranks = Ranks([keys[rank : num_keys - rank] for rank in range(4)])
    ranks.hello(*range(4))
    ranks.finish()
    assert ranks.num_bytes <= 40 * num_keys
    assert ranks.found(keys) == set(keys[3:-3])
    assert [set(kept) for kept in ranks.kept] == [set(keys[3:-3])] * 4


@pytest.mark.parametrize("when", [0, 1, 2, 3, 30])
def test_nothing_is_found_any_more_once_nothing_is_wanted(
    when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch, 0)
    ranks = Ranks([ALL, ALL])
    ranks.hello(0)
    if when:
        ranks.hello(1)
    for _ in range(when):
        ranks.step()
    ranks.mover.drop_unindexed(DISK)
    ranks.hello(0, 1)
    ranks.finish()
    assert ranks.found(ALL) == set()
    assert [each.verb for each in ranks.told][-1] is Verb.CLEAR
    assert all(telling.is_clearing for telling in ranks.tellings)
    cleared = ranks.tellings[0].take_cleared()
    assert cleared == ALL
    assert not ranks.tellings[0].is_clearing


def test_request_may_wait_while_it_is_not_known_what_storage_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_small(monkeypatch, 0)
    engine = Engine(num_ranks=1, says_hello=False)
    labels = [bytes([number]) * 3 for number in range(20)]
    kept = Telling(DISK, 0, KeptKeys([name(label) for label in labels]), 1)
    assert engine.find(labels[0]) is BlockState.UNKNOWN
    engine.hear(Report(hellos={0: Hello(4, {DISK: kept.hello()})}))
    assert engine.find(labels[0]) is BlockState.UNKNOWN
    (order,) = engine.mover.take_orders()
    kept.begin(order)
    places = []
    while (piece := kept.take()) is not None:
        engine.hear(Report(pieces=(piece,)))
        places.append(engine.find(labels[8]))
    assert places == [
        BlockState.UNKNOWN,
        BlockState.UNKNOWN,
        BlockState.STORAGE,
        BlockState.STORAGE,
    ]
    assert engine.find(b"never") is BlockState.NOWHERE


def test_read_of_a_block_that_was_found_need_not_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_small(monkeypatch, 0)
    engine = Engine(num_ranks=1, says_hello=False)
    labels = [bytes([number]) * 3 for number in range(20)]
    kept = Telling(DISK, 0, KeptKeys([name(label) for label in labels]), 1)
    engine.hear(Report(hellos={0: Hello(4, {DISK: kept.hello()})}))
    (order,) = engine.mover.take_orders()
    kept.begin(order)
    piece = kept.take()
    assert piece is not None
    engine.hear(Report(pieces=(piece,)))
    assert engine.find(labels[-1]) is BlockState.STORAGE
    assert engine.cache.promote(labels[-1:]) == 1
    assert [order.verb for order in engine.mover.take_orders()] == [Verb.READ]


def test_keys_of_storage_that_lists_them_itself_are_told() -> None:
    shelf = StoredBlocks()
    shelf.blocks.update(dict.fromkeys(ALL[:5], bytes(64)))
    kept = MemoryStorage(opaque(64), 8, shelf).kept_keys()
    assert kept.num_keys == kept.num_places == 5
    assert kept.in_order(1, 3).tobytes() == b"".join(ALL[1:3])
