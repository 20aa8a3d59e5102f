"""Storage tiers for tests, and wrappers of others: the suite of storage tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtier.core.config import CodingConfig
from kvtier.core.types import BlockKey
from kvtier.layout import opaque
from kvtier.testing import MemoryStorage, StorageSuite, StoredBlocks
from kvtier.tiers import StorageFacts, StorageTier
from kvtier.tiers.codecs import make_coder
from kvtier.tiers.wrappers import CodedTier, ThrottledTier
from kvtier.tiers.wrappers.wrapper import StorageWrapper


class TestMemoryStorage(StorageSuite):
    def make_storage(self, num_blocks: int) -> StorageTier:
        self.shelf = StoredBlocks()
        return self.over(self.shelf, num_blocks)

    def over(self, shelf: StoredBlocks, num_blocks: int) -> StorageTier:
        return MemoryStorage(self.group, num_blocks, shelf)

    def reopen(self, storage: StorageTier) -> StorageTier:
        return self.over(self.shelf, storage.num_blocks)

    def spoil(self, storage: StorageTier, key: BlockKey) -> bool:
        self.shelf.spoiled.add(key)
        return True

    @contextmanager
    def hang(self, storage: StorageTier) -> Iterator[None]:
        inner = storage.inner if isinstance(storage, StorageWrapper) else storage
        assert isinstance(inner, MemoryStorage)
        inner.open_reads.clear()
        inner.open_writes.clear()
        yield
        inner.open_reads.set()
        inner.open_writes.set()

    def abandon(self, storage: StorageTier) -> bool:
        return True


class TestMemoryStorageWithSeveral(TestMemoryStorage):
    """Several readers and writers at a time."""

    def over(self, shelf: StoredBlocks, num_blocks: int) -> StorageTier:
        facts = StorageFacts(num_readers=4, num_writers=3)
        return MemoryStorage(self.group, num_blocks, shelf, facts=facts)


class TestThrottledTier(TestMemoryStorage):
    """The pace is so fast that it has no effect."""

    def over(self, shelf: StoredBlocks, num_blocks: int) -> StorageTier:
        return ThrottledTier(super().over(shelf, num_blocks), 1 << 40)


class TestCodedTier(TestMemoryStorage):
    """Compressed and encrypted, in a tier whose blocks all have one size."""

    @pytest.fixture(autouse=True)
    def _keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("zstandard")
        pytest.importorskip("cryptography")
        monkeypatch.setenv("OUR_KEY", "01" * 32)

    def over(self, shelf: StoredBlocks, num_blocks: int) -> StorageTier:
        coder = make_coder(CodingConfig("lossless", "env:OUR_KEY"), self.group, is_framing=True)
        return CodedTier(MemoryStorage(opaque(coder.most_bytes), num_blocks, shelf), coder)
