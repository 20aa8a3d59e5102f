"""A codec and keys around a storage tier of a third party, which handles neither."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.config import CodingConfig
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.types import BlockKey
from kvtier.layout import opaque
from kvtier.testing import MemoryStorage, StorageSuite, StoredBlocks
from kvtier.testing.storage_user import TIMEOUT_S, Scattered, cuts
from kvtier.tiers import Outcome, StorageFacts, StorageSite, StorageTier
from kvtier.tiers.wrappers import CodedTier
from kvtier.tiers.wrappers.coded import open_coded
from tests.tiers.remote.store_tests import BLOCK_BYTES, KEYS, NAMES, NUM, content, filled

EXAMPLE = Path(__file__).parents[2] / "examples/file_store/kvtier_file_store.py"
CODINGS = {
    "lossless": CodingConfig("lossless"),
    "encrypted": CodingConfig("none", "env:FIRST"),
    "both": CodingConfig("lossless", "env:FIRST"),
}
THERE, ABSENT, DAMAGED, FAILED = Outcome


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zstandard")
    pytest.importorskip("cryptography")
    monkeypatch.setenv("FIRST", "01" * 32)
    monkeypatch.setenv("SECOND", "02" * 32)


def file_store() -> Any:
    spec = importlib.util.spec_from_file_location("kvtier_file_store", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FileStore


def opened(folder: Path, coding: CodingConfig) -> StorageTier:
    site = StorageSite("files", str(folder), opaque(BLOCK_BYTES), NUM << 16, coding=coding)
    made = open_coded(file_store(), site)
    assert isinstance(made, StorageTier)
    return made


def files(folder: Path) -> list[bytes]:
    """Return the stored bytes of each block."""
    return [next(folder.glob(f"*/*/{key.hex()}.kv")).read_bytes() for key in KEYS]


@pytest.mark.parametrize("name", list(CODINGS))
def test_blocks_of_a_plug_in_are_smaller_unreadable_and_come_back_bit_for_bit(
    tmp_path: Path, name: str
) -> None:
    memory, tier = filled(), opened(tmp_path, CODINGS[name])
    assert tier.put(NAMES, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    tier.close()
    stored = files(tmp_path)
    assert not any(content(at)[:64] in stored[at] for at in range(NUM - 1))
    if "lossless" in CODINGS[name].codec:
        assert max(map(len, stored[:-1])) < 0.9 * BLOCK_BYTES
    assert len(stored[-1]) > BLOCK_BYTES, "random bytes do not shrink"
    if CODINGS[name].encryption_key:
        assert content(NUM - 1)[:64] not in stored[-1]
    tier = opened(tmp_path, CODINGS[name])
    assert tier.find(KEYS, TIMEOUT_S) == [THERE] * NUM
    memory.clear()
    assert tier.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    assert [memory.read(at) for at in range(NUM)] == [content(at) for at in range(NUM)]
    memory.check_around()
    tier.close()


@pytest.mark.parametrize("reader", ["second key", "no key"])
def test_another_key_is_a_miss_and_the_block_is_stored_again(tmp_path: Path, reader: str) -> None:
    first = opened(tmp_path, CODINGS["both"])
    first.put(NAMES, filled().pieces, TIMEOUT_S)
    first.close()
    coding = CodingConfig("lossless", "env:SECOND" if reader == "second key" else "none")
    second, memory = opened(tmp_path, coding), Scattered(NUM, cuts(BLOCK_BYTES)["unequal pieces"])
    assert second.get(KEYS, memory.pieces, TIMEOUT_S) == [ABSENT] * NUM
    assert all(memory.is_untouched(at) for at in range(NUM))
    assert second.find(KEYS, TIMEOUT_S) == [ABSENT] * NUM
    assert second.put(NAMES, filled().pieces, TIMEOUT_S) == [THERE] * NUM
    assert second.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    assert [memory.read(at) for at in range(NUM)] == [content(at) for at in range(NUM)]
    second.close()


@pytest.mark.parametrize("name", list(CODINGS))
def test_value_that_was_changed_in_the_store_is_damaged_and_dropped(
    tmp_path: Path, name: str
) -> None:
    """The store's own checksum is right: only the frame shows the change."""
    tier, memory = opened(tmp_path, CODINGS[name]), filled()
    tier.put(NAMES, memory.pieces, TIMEOUT_S)
    assert isinstance(tier, CodedTier)
    inner = tier.inner
    for at in range(NUM):
        frame = bytearray(files(tmp_path)[at][52:])
        frame[-5] ^= 1
        inner.drop([KEYS[at]])
        changed = Scattered(1, [len(frame)])
        changed.write(0, bytes(frame))
        assert inner.put([NAMES[at]], changed.pieces, TIMEOUT_S) == [THERE]
    memory.clear()
    assert tier.get(KEYS, memory.pieces, TIMEOUT_S) == [DAMAGED] * NUM
    assert tier.find(KEYS, TIMEOUT_S) == [ABSENT] * NUM
    assert not list(tmp_path.glob("*/*/*.kv"))
    tier.close()


def test_block_that_was_stored_without_a_codec_never_becomes_wrong_bytes(tmp_path: Path) -> None:
    """In both directions: a plain block read as a frame, and a frame read as a plain block."""
    plain = CodingConfig()
    for writer, reader in ((plain, CODINGS["lossless"]), (CODINGS["lossless"], plain)):
        folder = tmp_path / (writer.codec or "plain")
        tier = opened(folder, writer)
        assert tier.put(NAMES, filled().pieces, TIMEOUT_S) == [THERE] * NUM
        tier.close()
        tier, memory = opened(folder, reader), Scattered(NUM, [BLOCK_BYTES])
        assert tier.get(KEYS, memory.pieces, TIMEOUT_S) == [DAMAGED] * NUM
        tier.close()


def test_foreign_block_of_a_shared_store_stays_until_it_is_replaced() -> None:
    """Another process, with the right key, may still use it."""
    shelf = StoredBlocks()

    class SharedStore(MemoryStorage):
        refuses = False

        def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
            if self.refuses:
                raise TierError(self.name, "drop", "no answer")
            super().drop(keys, for_good)

    def shared(site: StorageSite) -> StorageTier:
        facts = StorageFacts(is_shared=True)
        return SharedStore(site.group, NUM, shelf, facts=facts)

    def again(source: str) -> CodedTier:
        site = StorageSite("shared", "", opaque(BLOCK_BYTES), 0)
        made = open_coded(shared, replace(site, coding=CodingConfig("none", source)))
        assert isinstance(made, CodedTier)
        return made

    memory = filled()
    assert again("env:FIRST").put(NAMES, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    second = again("env:SECOND")
    assert second.find(KEYS, TIMEOUT_S) == [THERE] * NUM
    assert second.get(KEYS, memory.pieces, TIMEOUT_S) == [ABSENT] * NUM
    assert second.find(KEYS, TIMEOUT_S) == [ABSENT] * NUM
    first = again("env:FIRST")
    assert first.find(KEYS, TIMEOUT_S) == [THERE] * NUM
    assert first.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    second.inner.refuses = True  # type: ignore[attr-defined]
    assert second.put(NAMES, memory.pieces, TIMEOUT_S) == [FAILED] * NUM
    second.inner.refuses = False  # type: ignore[attr-defined]
    assert second.put(NAMES, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    assert second.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM


def test_codec_is_refused_where_all_blocks_have_one_size() -> None:
    def make(site: StorageSite) -> StorageTier:
        return MemoryStorage(site.group, NUM, StoredBlocks())

    site = StorageSite("mine", "", opaque(BLOCK_BYTES), 0, coding=CodingConfig("lossless"))
    with pytest.raises(ConfigError, match="codec: lossless would save nothing in the storage mine"):
        open_coded(make, site)


class TestFileStoreWithCodecAndKey(StorageSuite):
    """The suite of storage tiers, for a plug-in of a third party whose blocks have any size."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.tmp_path, self.num_made = tmp_path, 0

    def make_storage(self, num_blocks: int) -> StorageTier:
        self.num_made += 1
        self.folder = self.tmp_path / str(self.num_made)
        return self.again(num_blocks)

    def again(self, num_blocks: int) -> StorageTier:
        site = StorageSite("files", str(self.folder), self.group, 0, coding=CODINGS["both"])

        def make(site: StorageSite) -> StorageTier:
            capacity_bytes = num_blocks * site.group.bytes_per_block
            made = file_store()(replace(site, capacity_bytes=capacity_bytes))
            assert isinstance(made, StorageTier)
            return made

        made = open_coded(make, site)
        assert isinstance(made, StorageTier)
        return made

    def reopen(self, storage: StorageTier) -> StorageTier:
        return self.again(storage.num_blocks)

    def spoil(self, storage: StorageTier, key: BlockKey) -> bool:
        [path] = self.folder.glob(f"*/*/{key.hex()}.kv")
        value = bytearray(path.read_bytes())
        value[-3] ^= 1
        path.write_bytes(value)
        return True

    def abandon(self, storage: StorageTier) -> bool:
        storage.close()  # an end of the process does no more
        return True
