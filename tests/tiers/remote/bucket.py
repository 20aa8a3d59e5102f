"""A prefix in a bucket of each service: tiers over it, and its objects."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from kvtier.core.config import DEFAULT_CODING, CodingConfig
from kvtier.core.system.plugins import load_plugin
from kvtier.layout import KVGroup
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import Scattered, cuts, stored_bytes, stored_key
from kvtier.tiers import StorageSite
from kvtier.tiers.remote.bucket.objects import Objects
from kvtier.tiers.remote.bucket.opening import SERVICES
from kvtier.tiers.remote.bucket.pack_reader import PackReader
from kvtier.tiers.remote.bucket.packs import PackShape
from kvtier.tiers.remote.bucket.tier import BucketTier
from kvtier.tiers.remote.envelope import Envelope
from kvtier.tiers.remote.location import read_location
from tests.kit.servers import AZURE_ACCOUNT, AZURE_KEY, BUCKET
from tests.tiers.remote.store_tests import closed_later

KEY_ID = "AKIDKVTIERTEST"
SECRET_KEY = "not-to-be-seen-anywhere"
NO_ACCOUNT = json.dumps(
    {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
)
"""Key of a service account of Google that signs nothing."""


class Bucket:
    """A prefix in a bucket of S3.

    url: URL of the server, or of a proxy before it. prefix: path of the test's objects.
    """

    scheme = "s3"
    below = ""
    """Path of the service on its server."""

    def __init__(self, url: str, prefix: str) -> None:
        import obstore

        self.url, self.prefix = url, prefix
        self._obstore = obstore
        self._store = self._open()

    def _open(self) -> Any:
        from obstore.store import S3Store

        return S3Store(
            BUCKET,
            prefix=self.prefix,
            endpoint=self.url,
            access_key_id=KEY_ID,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def location(self, url: str = "", **options: object) -> str:
        """Return the part of the URL behind the scheme."""
        given = {"endpoint": (url or self.url) + self.below, **options}
        query = "&".join(f"{name}={quote(str(value))}" for name, value in given.items())
        return f"//{BUCKET}/{self.prefix}?{query}"

    def tier(
        self,
        num_blocks: int = 64,
        group: KVGroup = GROUP,
        coding: CodingConfig = DEFAULT_CODING,
        url: str = "",
        **options: object,
    ) -> BucketTier:
        """Open one process's tier. It reads the manifests of other writers only on request."""
        location = self.location(url, **{"poll_s": 0, "publish_s": 3600, **options})
        capacity_bytes = num_blocks * group.bytes_per_block
        make = load_plugin("tiers", self.scheme)
        tier = make(StorageSite("s3", location, group, capacity_bytes, coding=coding))
        assert isinstance(tier, BucketTier)
        return closed_later(tier)

    def objects(self) -> Objects:
        """Return a client of this prefix, as a tier makes it."""
        place = read_location(self.scheme, f"//{BUCKET}/{self.prefix}")
        options = SERVICES[self.scheme].options
        return Objects(place, options(endpoint=self.url + self.below))

    def paths(self, below: str = "") -> list[str]:
        """Return the paths of all objects."""
        listed = self._obstore.list(self._store, below or None).collect()
        return sorted(each["path"] for each in listed)

    def read(self, path: str) -> bytes:
        return bytes(self._obstore.get(self._store, path).bytes())

    def write(self, path: str, content: bytes) -> None:
        self._obstore.put(self._store, path, content, use_multipart=False)

    def delete(self, *paths: str) -> None:
        self._obstore.delete(self._store, list(paths))


class GoogleBucket(Bucket):
    """A prefix in a bucket of Google Cloud Storage."""

    scheme = "gs"

    def _open(self) -> Any:
        from obstore.store import GCSStore

        return GCSStore(
            BUCKET,
            prefix=self.prefix,
            base_url=self.url,
            service_account_key=NO_ACCOUNT,
            client_options={"allow_http": True},
        )


class AzureContainer(Bucket):
    """A prefix in a container of Azure's emulator."""

    scheme = "az"
    below = f"/{AZURE_ACCOUNT}"

    def _open(self) -> Any:
        from obstore.store import AzureStore

        return AzureStore(
            BUCKET,
            prefix=self.prefix,
            endpoint=self.url + self.below,
            account_name=AZURE_ACCOUNT,
            account_key=AZURE_KEY,
            client_options={"allow_http": True},
        )


class OnePack:
    """Stand-in for a bucket that has one pack, of the blocks ``KEYS``.

    memory: of the blocks, in pieces.
    """

    KEYS = tuple(stored_key(number) for number in range(8))
    BLOCK_BYTES = 256

    def __init__(self, secret: bytes = b"") -> None:
        self.shape = PackShape(self.BLOCK_BYTES, 1 << 20)
        self.envelope = Envelope(self.BLOCK_BYTES, secret)
        self.memory = Scattered(len(self.KEYS), cuts(self.BLOCK_BYTES)["unequal pieces"])
        for number, key in enumerate(self.KEYS):
            self.memory.write(number, stored_bytes(key, self.BLOCK_BYTES))
        self.content = self.shape.build(self.KEYS, self.memory.pieces, self.envelope)[0].tobytes()
        self.memory.clear()

    def reader(self) -> PackReader:
        return PackReader(self, self.shape, self.envelope)  # type: ignore[arg-type]

    async def part(self, path: str, start: int, end: int) -> memoryview:
        del path
        return memoryview(self.content)[start:end]
