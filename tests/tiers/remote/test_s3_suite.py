"""The tier of a bucket as any storage tier, over a real S3 server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.core.config import CodingConfig
from kvtier.core.types import BlockKey
from kvtier.testing import StorageSuite
from kvtier.tiers import StorageTier
from kvtier.tiers.remote.bucket.packs import pack_path
from kvtier.tiers.remote.bucket.tier import BucketTier
from kvtier.tiers.remote.envelope import as_keys
from tests.kit.proxy import Proxy
from tests.kit.servers import port_of
from tests.tiers.remote.bucket import Bucket


class TestS3Tier(StorageSuite):
    options: dict[str, Any] = {}  # noqa: RUF012
    place = "bucket"
    """Fixture that returns the bucket."""

    @pytest.fixture(autouse=True)
    def _place(self, request: pytest.FixtureRequest) -> Iterator[None]:
        self.bucket: Bucket = request.getfixturevalue(self.place)
        self.proxy = Proxy(port_of(self.bucket.url))
        yield
        self.proxy.close()

    def make_storage(self, num_blocks: int) -> StorageTier:
        self.bucket = type(self.bucket)(self.bucket.url, uuid.uuid4().hex)
        return self.over(num_blocks)

    def over(self, num_blocks: int) -> StorageTier:
        return self.bucket.tier(num_blocks, url=self.proxy.url, **self.options)

    def reopen(self, storage: StorageTier) -> StorageTier:
        return self.over(storage.num_blocks)

    def spoil(self, storage: StorageTier, key: BlockKey) -> bool:
        """Change the last byte."""
        assert isinstance(storage, BucketTier)
        (place,) = storage._catalogue.places(as_keys([key]))
        (at,) = place.at.tolist()
        path = pack_path(place.pack)
        content = bytearray(self.bucket.read(path))
        content[storage._shape.offsets(place.num_blocks, place.coding)[at + 1] - 1] ^= 1
        self.bucket.write(path, bytes(content))
        return True

    @contextmanager
    def stall(self, storage: StorageTier, num_blocks: int) -> Iterator[None]:
        with self.proxy.stalled(num_blocks * storage.bytes_per_block):
            yield

    def abandon(self, storage: StorageTier) -> bool:
        assert isinstance(storage, BucketTier)
        storage.abandon()
        return True

    def check(self, storage: StorageTier) -> None:
        assert isinstance(storage, BucketTier)
        storage.check_invariants()

    @pytest.mark.slow
    def test_agrees_with_a_dictionary(self) -> None:
        super().test_agrees_with_a_dictionary()


@pytest.mark.slow
class TestS3TierWithSmallPacks(TestS3Tier):
    """Packs of two blocks each; and tagged."""

    options = {"pack_bytes": 512}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVTIER_STORE_SECRET", "a secret of the tests")


class TestEncrypted(TestS3Tier):
    """Coded packs: frames of one size each."""

    @pytest.fixture(autouse=True)
    def _key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("cryptography")
        monkeypatch.setenv("KVTIER_ENCRYPTION_KEY", "06" * 32)


class TestLossless(TestS3Tier):
    """Coded packs: blocks of several sizes, or blocks that do not shrink."""

    options = {"coding": CodingConfig("lossless")}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("zstandard")
