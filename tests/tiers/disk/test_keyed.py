"""The disk tier as any storage tier: over one slab, and over two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.system.plugins import load_plugin
from kvtier.core.types import BlockKey
from kvtier.testing import StorageSuite
from kvtier.tiers import StorageSite, StorageTier
from kvtier.tiers.disk import DiskOptions, DiskTier
from tests.tiers.disk.faulty_disk import FaultyDisk
from tests.tiers.disk.harness import SLOT_BYTES, spoil
from tests.tiers.disk.harness import SMALL as GROUP


class TestDiskTier(StorageSuite):
    num_parts = 1

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.num_made = 0

    def make_storage(self, num_blocks: int) -> StorageTier:
        self.num_made += 1
        first, *others = (
            self.folder / f"slab {self.num_made}.{part}" for part in range(self.num_parts)
        )
        capacity_bytes = num_blocks * SLOT_BYTES * self.num_parts
        options = DiskOptions(first, capacity_bytes, tuple(others))
        self.system = FaultyDisk()
        return DiskTier(options, self.group, system=self.system)

    @contextmanager
    def stall(self, storage: StorageTier, num_blocks: int) -> Iterator[None]:
        self.system.stall("read", "write", after=num_blocks)
        yield
        self.system.release("read", "write")

    def reopen(self, storage: StorageTier) -> StorageTier:
        assert isinstance(storage, DiskTier)
        return DiskTier(storage.blocks.options, self.group)

    def spoil(self, storage: StorageTier, key: BlockKey) -> bool:
        """Damage a block in the last slab, so that only a check of the whole block detects it."""
        assert isinstance(storage, DiskTier)
        part = storage.blocks.parts[-1]
        (slot,) = np.flatnonzero(part.slab.table["key"] == np.void(key))
        spoil(part.options.path, int(slot))
        return True

    def abandon(self, storage: StorageTier) -> bool:
        assert isinstance(storage, DiskTier)
        storage.abandon()
        return True

    def check(self, storage: StorageTier) -> None:
        assert isinstance(storage, DiskTier)
        storage.check_invariants()


class TestEncrypted(TestDiskTier):
    @pytest.fixture(autouse=True)
    def _key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("cryptography")
        monkeypatch.setenv("KVTIER_ENCRYPTION_KEY", "05" * 32)


class TestDiskTierOfTwoParts(TestDiskTier):
    num_parts = 2


def test_more_disks_are_made_by_their_plug_in(tmp_path: Path) -> None:
    site = StorageSite("fast", str(tmp_path / "slab"), GROUP, 4 * SLOT_BYTES)
    storage = load_plugin("tiers", "disk")(site)
    assert isinstance(storage, DiskTier)
    assert (storage.name, storage.num_blocks) == ("fast", 4)
    storage.close()
