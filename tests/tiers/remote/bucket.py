"""A prefix in a bucket: tiers over it, and its objects."""

from __future__ import annotations

from urllib.parse import quote

from kvtier.core.config import DEFAULT_CODING, CodingConfig
from kvtier.layout import KVGroup
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import Scattered, cuts, stored_bytes, stored_key
from kvtier.tiers import StorageSite
from kvtier.tiers.remote.envelope import Envelope
from kvtier.tiers.remote.location import read_location
from kvtier.tiers.remote.s3.objects import Objects
from kvtier.tiers.remote.s3.opening import S3Options, make_s3
from kvtier.tiers.remote.s3.pack_reader import PackReader
from kvtier.tiers.remote.s3.packs import PackShape
from kvtier.tiers.remote.s3.tier import S3Tier
from tests.kit.servers import BUCKET
from tests.tiers.remote.store_tests import closed_later

KEY_ID = "AKIDKVTIERTEST"
SECRET_KEY = "not-to-be-seen-anywhere"


class Bucket:
    """A prefix in a bucket of a server.

    url: URL of the server, or of a proxy before it. prefix: path of the test's objects.
    """

    def __init__(self, url: str, prefix: str) -> None:
        import obstore
        from obstore.store import S3Store

        self.url, self.prefix = url, prefix
        self._obstore = obstore
        self._store = S3Store(
            BUCKET,
            prefix=prefix,
            endpoint=url,
            access_key_id=KEY_ID,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def location(self, url: str = "", **options: object) -> str:
        """Return the part of the URL behind "s3:"."""
        given = {"endpoint": url or self.url, **options}
        query = "&".join(f"{name}={quote(str(value))}" for name, value in given.items())
        return f"//{BUCKET}/{self.prefix}?{query}"

    def tier(
        self,
        num_blocks: int = 64,
        group: KVGroup = GROUP,
        coding: CodingConfig = DEFAULT_CODING,
        url: str = "",
        **options: object,
    ) -> S3Tier:
        """Open one process's tier. It reads the manifests of other writers only on request."""
        location = self.location(url, **{"poll_s": 0, "publish_s": 3600, **options})
        capacity_bytes = num_blocks * group.bytes_per_block
        tier = make_s3(StorageSite("s3", location, group, capacity_bytes, coding=coding))
        assert isinstance(tier, S3Tier)
        return closed_later(tier)

    def objects(self) -> Objects:
        """Return a client of this prefix, as a tier makes it."""
        return Objects(
            read_location("s3", f"//{BUCKET}/{self.prefix}"), S3Options(endpoint=self.url)
        )

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
