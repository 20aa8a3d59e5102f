"""Reports of a rank about a store, and the names of its blocks there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.cache.transfer.ranks import Done, RankOrder, Verb
from kvtier.core.types import DISK, BlockKey
from kvtier.testing import MemoryStorage, StoredBlocks, host_memory, memory_bytes
from kvtier.tiers import Outcome, Pieces, StorageFacts
from kvtier.tiers.wrappers import Shards, ShardTier
from tests.cache.transfer.test_ranks import GROUP, KEYS, SIZE, Rank, named, storage_of

PATIENCE_S = 0.1
ASKED = StorageFacts(is_shared=True)


@pytest.fixture
def rank() -> Iterator[Rank]:
    """Return a rank whose store has two blocks."""
    shelf = StoredBlocks()
    shelf.blocks.update({key: bytes([at]) * SIZE for at, key in enumerate(KEYS[:2])})
    made = Rank(lambda host: MemoryStorage(GROUP, 6, shelf, facts=ASKED))
    yield made
    storage_of(made).open_finds.set()
    made.close()


def find(rank: Rank, *keys: BlockKey) -> int:
    rank.num_orders += 1
    content = b"".join(keys)
    rank.executor.carry_out(
        RankOrder(rank.num_orders, Verb.FIND, DISK, keys=content, patience_s=PATIENCE_S)
    )
    return rank.num_orders


def test_rank_says_which_blocks_its_store_has(rank: Rank) -> None:
    done = rank.ended(find(rank, KEYS[0], KEYS[5], KEYS[1]))
    assert (done.failed, done.gone, done.num_ranks) == ({1}, {1}, 1)
    assert 0 < done.seconds < 60


def test_rank_says_once_that_a_look_up_is_late_and_later_what_it_found(rank: Rank) -> None:
    storage_of(rank).open_finds.clear()
    order = find(rank, KEYS[0])
    rank.now = PATIENCE_S
    assert rank.executor.take_done() == {}
    rank.now = 2 * PATIENCE_S
    assert rank.executor.take_done() == {order: Done(num_ranks=0, is_late=True)}
    assert rank.executor.take_done() == {}, "said once"
    storage_of(rank).open_finds.set()
    assert rank.ended(order).failed == frozenset()


def test_look_up_that_stands_in_line_is_late_all_the_same(rank: Rank) -> None:
    """A queued look-up times out, although other look-ups end meanwhile."""
    storage_of(rank).open_finds.clear()
    first, second = find(rank, KEYS[0]), find(rank, KEYS[1])
    rank.now = 2 * PATIENCE_S
    assert rank.executor.take_done().keys() == {first, second}


def test_store_that_says_nothing_has_failed_and_has_nothing_less(rank: Rank) -> None:
    storage_of(rank).open_finds.clear()
    done = rank.ended(find(rank, KEYS[0]))  # ends by its time-out
    assert (done.failed, done.gone) == ({0}, frozenset())


def test_ranks_have_blocks_of_their_own_under_one_key() -> None:
    shelf = StoredBlocks()
    store = MemoryStorage(GROUP, 8, shelf, facts=ASKED)
    shards = [
        ShardTier(store, Shards.whole(f"{number}/2", store.bytes_per_block)) for number in range(2)
    ]
    memory = host_memory(SIZE)
    block = Pieces.whole([memory.address], SIZE)
    for number, shard in enumerate(shards):
        memory_bytes(memory)[:] = number + 1
        assert shard.put(named(KEYS[:1]), block, 1.0) == [Outcome.THERE]
    for number, shard in enumerate(shards):
        assert shard.get(KEYS[:1], block, 1.0) == [Outcome.THERE]
        assert (memory_bytes(memory) == number + 1).all()
    assert len(shelf.blocks) == 2
    assert store.find(KEYS[:1], 1.0) == [Outcome.ABSENT]
    shards[0].drop(KEYS[:1], for_good=True)
    assert [shard.find(KEYS[:1], 1.0) for shard in shards] == [[Outcome.ABSENT], [Outcome.THERE]]
