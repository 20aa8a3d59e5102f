"""Buckets of other services: Azure by its emulator, Google's by a server of its XML interface."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from itertools import pairwise

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.system.plugins import load_plugin
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import User
from kvtier.tiers import Outcome, StorageSite, StorageTier
from kvtier.tiers.remote.migration import StoreAccess, migrate
from kvtier.tiers.remote.pruning import make_keeper, prune
from tests.kit.servers import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    AZURITE,
    BUCKET,
    StoreHttpServer,
    azurite,
    make_container,
)
from tests.tiers.remote import test_s3_suite
from tests.tiers.remote.bucket import NO_ACCOUNT, AzureContainer, Bucket, GoogleBucket
from tests.tiers.remote.scripted_bucket import Answer, Question, ScriptedBucket, unaltered

pytest.importorskip("obstore")


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreHttpServer]:
    if not AZURITE.exists():
        pytest.skip("no emulator of Azure: make peers-azurite")
    server = azurite(tmp_path_factory.mktemp("azurite") / "blobs")
    server.start()
    make_container(server.url)
    yield server
    server.kill()


@pytest.fixture
def container(azure_server: StoreHttpServer, monkeypatch: pytest.MonkeyPatch) -> AzureContainer:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
    return AzureContainer(azure_server.url, uuid.uuid4().hex)


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleBucket]:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", NO_ACCOUNT)
    server = ScriptedBucket()
    yield GoogleBucket(server.url, uuid.uuid4().hex)
    server.close()


@pytest.fixture(params=["container", "google"])
def place(request: pytest.FixtureRequest) -> Bucket:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Bucket)
    return found


class TestAzureTier(test_s3_suite.TestS3Tier):
    place = "container"


@pytest.mark.nightly
class TestGoogleTier(test_s3_suite.TestS3Tier):
    place = "google"


def site(bucket: Bucket, container: str = BUCKET) -> StorageSite:
    location = bucket.location().replace(BUCKET, container, 1)
    return StorageSite("far", location, GROUP, 4 * GROUP.bytes_per_block)


def test_replicas_share_a_bucket(place: Bucket) -> None:
    first, second = place.tier(), place.tier()
    assert User(first).put(0, 1, 2) == [Outcome.THERE] * 3
    first.exchange(10)
    second.exchange(10)
    assert User(second).get(0, 1, 2) == [Outcome.THERE] * 3


def test_missing_objects_are_deleted_without_an_error(place: Bucket) -> None:
    objects = place.objects()
    for path in ("first", "last"):
        place.write(path, b"1")
    asyncio.run(objects.delete(["first", "missing", "last"]))
    assert place.paths() == []


def test_blocks_are_pruned_by_their_keeper(place: Bucket) -> None:
    tier = place.tier()
    User(tier).put(0, 1)
    tier.exchange(10)
    keeper = make_keeper(f"{place.scheme}:{place.location()}")
    assert "ms a request" in keeper.test()
    assert prune(keeper, older_than_s=0).num_entries > 0
    assert not place.paths("packs")


def test_blocks_move_from_and_to_s3(place: Bucket, bucket: Bucket) -> None:
    tier = place.tier()
    User(tier).put(0, 1)
    tier.exchange(10)
    there, back = place.location(), place.location().replace(place.prefix, "back")
    route = (f"{place.scheme}:{there}", f"s3:{bucket.location()}", f"{place.scheme}:{back}")
    for source, target in pairwise(route):
        migrate(StoreAccess(source), StoreAccess(target), lambda done, num: None)
    place.prefix = "back"
    assert User(place.tier()).get(0, 1) == [Outcome.THERE] * 2


def test_container_that_is_missing_is_named(container: AzureContainer) -> None:
    with pytest.raises(ConfigError, match="there is no bucket 'nothing-here'; make it"):
        load_plugin("tiers", "az")(site(container, "nothing-here"))


def test_wrong_key_is_said_to_be_wrong(
    container: AzureContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    with pytest.raises(ConfigError, match=r"access was refused \(Auth\w+\)") as caught:
        load_plugin("tiers", "az")(site(container))
    assert "d3Jvbmc" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "named"),
    [("az", "AZURE_STORAGE_ACCOUNT_NAME"), ("gs", "GOOGLE_APPLICATION_CREDENTIALS")],
)
def test_credentials_in_a_url_are_refused_by_the_services_own_variables(
    scheme: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=f"credentials do not belong here; set {named}"):
        load_plugin("tiers", scheme)(StorageSite("far", "//user:word@bucket/x", GROUP, 4096))


def test_google_that_writes_over_objects_is_refused(google: GoogleBucket) -> None:
    def ignore(question: Question, answer: Answer) -> bytes:
        return unaltered(question, Answer(200, {"etag": '"1"'}) if answer.status == 412 else answer)

    server = ScriptedBucket(ignore)
    with pytest.raises(ConfigError, match="this store can't be used: it writes over an object"):
        load_plugin("tiers", "gs")(site(GoogleBucket(server.url, google.prefix)))
    server.close()


def test_tier_is_a_storage_tier(place: Bucket) -> None:
    assert isinstance(place.tier(), StorageTier)
