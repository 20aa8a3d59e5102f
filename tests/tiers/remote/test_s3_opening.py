"""Stores that can be opened, and the messages for stores that cannot."""

from __future__ import annotations

import logging

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.system.plugins import load_plugin
from kvtier.layout import KVGroup
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import User
from kvtier.tiers import Outcome, StorageSite, StorageTier
from kvtier.tiers.remote.bucket.opening import make_s3
from kvtier.tiers.remote.pruning import make_keeper
from kvtier.tiers.wrappers import ThrottledTier
from tests.kit.servers import BUCKET, StoreHttpServer
from tests.tiers.remote.bucket import KEY_ID, SECRET_KEY, Bucket
from tests.tiers.remote.store_tests import closed_later


def site(location: str, num_blocks: int = 4, group: KVGroup = GROUP) -> StorageSite:
    return StorageSite("far", location, group, num_blocks * group.bytes_per_block)


def test_tier_is_made_by_its_plug_in(bucket: Bucket) -> None:
    tier = load_plugin("tiers", "s3")(site(bucket.location()))
    assert isinstance(tier, StorageTier)
    closed_later(tier)
    assert (tier.name, tier.num_blocks) == ("far", 4)
    assert tier.facts.request_s > 0, "it was measured"


def test_store_on_this_machine_is_asked_by_no_proxy(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    tier = make_s3(site(bucket.location()))
    assert User(tier).put(0) == User(tier).get(0) == [Outcome.THERE]
    tier.close()


def test_rate_is_limited(bucket: Bucket) -> None:
    tier = closed_later(make_s3(site(bucket.location(bytes_per_s="1GiB"))))
    assert isinstance(tier, ThrottledTier)
    assert User(tier).put(0) == User(tier).get(0) == [Outcome.THERE]


def test_store_that_overwrites_what_was_to_be_created_is_refused(
    bad_server: StoreHttpServer,
) -> None:
    pytest.importorskip("obstore")
    location = f"//{BUCKET}/x?endpoint={bad_server.url}"
    with pytest.raises(ConfigError, match="this store can't be used: it writes over an object"):
        make_s3(site(location))


def test_wrong_credentials_are_said_to_be_wrong(
    bad_server: StoreHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    with pytest.raises(ConfigError, match=r"access was refused \(InvalidAccessKeyId\)") as caught:
        make_s3(site(f"//{BUCKET}/x?endpoint={bad_server.url}"))
    assert "somebody" not in str(caught.value)


def test_missing_credentials_are_said_to_be_missing(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client then requests the machine's role; this machine has none."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="no credentials; set AWS_ACCESS_KEY_ID"):
        make_s3(site(bucket.location()))


def test_bucket_that_is_missing_is_named(bucket: Bucket) -> None:
    with pytest.raises(ConfigError, match="there is no bucket 'nothing-here'; make it"):
        make_s3(site(f"//nothing-here/x?endpoint={bucket.url}"))


def test_capacity_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="storage_capacity of 0 bytes is below one block"):
        make_s3(site("//bucket/x", num_blocks=0))


@pytest.mark.parametrize(
    "location",
    [
        f"//{KEY_ID}:{SECRET_KEY}@bucket/x",
        f"//bucket/x?endpoint=http://{KEY_ID}:{SECRET_KEY}@127.0.0.1:1",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(location: str) -> None:
    with pytest.raises(ConfigError, match="credentials do not belong") as caught:
        make_s3(site(location))
    assert KEY_ID not in str(caught.value)
    assert SECRET_KEY not in str(caught.value)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_endpoint_of_the_environment_works_as_the_option_does(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, bucket.url)
    place = f"//{BUCKET}/{bucket.prefix}"
    tier = make_s3(site(f"{place}?poll_s=0"))
    assert User(tier).put(0) == User(tier).get(0) == [Outcome.THERE]
    tier.close()
    keeper = make_keeper(f"s3:{place}")
    assert "ms a request" in keeper.test()
    monkeypatch.setenv(name, f"http://{KEY_ID}:{SECRET_KEY}@127.0.0.1:1")
    with pytest.raises(ConfigError, match=f"credentials do not belong into {name}") as caught:
        make_s3(site(place))
    assert KEY_ID not in str(caught.value)
    monkeypatch.setenv(name, "127.0.0.1:9000")
    with pytest.raises(ConfigError, match=f"{name} begins with http:// or https://"):
        make_keeper(f"s3:{place}")


def test_option_goes_before_the_environment(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    tier = bucket.tier()
    assert User(tier).put(0) == [Outcome.THERE]


@pytest.mark.parametrize("has_access", [True, False])
def test_credentials_are_never_shown(
    bad_server: StoreHttpServer,
    bucket: Bucket,
    has_access: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    if has_access:
        tier = bucket.tier()
        User(tier).put(0)
        shown += [repr(tier), repr(tier._objects), repr(tier.findings())]
        tier._objects = tier._reader._objects = Bucket("http://127.0.0.1:1", "nowhere").objects()
        User(tier).get(0)
        tier._upkeep._objects = tier._exchange._objects = tier._objects
        with pytest.raises(Exception, match="no answer") as caught:
            tier.exchange(10)
        shown += [repr(caught.value), repr(caught.value.__context__), repr(tier.findings())]
        tier.close()
    else:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY[::-1])
        with pytest.raises(ConfigError) as refused:
            make_s3(site(f"//{BUCKET}/x?endpoint={bad_server.url}"))
        shown += [str(refused.value), repr(refused.value.__context__)]
    for text in (*shown, caplog.text):
        assert SECRET_KEY not in text
        assert SECRET_KEY[::-1] not in text
        assert KEY_ID not in text
