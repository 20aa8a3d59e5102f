"""Two processes over one bucket: each reads the blocks of the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.core.errors import TierError
from kvtier.layout import DType, full_attention
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.remote.bucket.packs import pack_path
from kvtier.tiers.remote.bucket.tier import BucketTier
from kvtier.tiers.remote.envelope import as_keys
from tests.kit.waiting import wait_until
from tests.tiers.remote.bucket import Bucket

THERE, ABSENT, DAMAGED, FAILED = Outcome
TIMEOUT_S = 30.0


@contextmanager
def two(bucket: Bucket, **options: Any) -> Iterator[tuple[BucketTier, BucketTier]]:
    one, other = bucket.tier(**options), bucket.tier(**options)
    try:
        yield one, other
        one.check_invariants()
        other.check_invariants()
    finally:
        one.close()
        other.close()


def test_block_is_found_by_another_process_after_its_poll(bucket: Bucket) -> None:
    with two(bucket) as (one, other):
        assert User(one).put(*range(10)) == [THERE] * 10
        assert User(other).find(3) == [ABSENT]
        one.exchange(TIMEOUT_S)
        assert User(other).find(3) == [ABSENT]
        other.exchange(TIMEOUT_S)
        assert User(other).find(*range(11)) == [THERE] * 10 + [ABSENT]
        assert User(other).get(*range(10)) == [THERE] * 10


def test_processes_learn_from_each_other_by_themselves(bucket: Bucket) -> None:
    with two(bucket, poll_s=0.05, publish_s=0.05) as (one, other):
        User(one).put(0, 1)
        User(other).put(2)
        wait_until(lambda: User(other).found(0, 1) == [0, 1] and User(one).found(2) == [2])
        assert User(other).get(0, 1, 2) == User(one).get(0, 1, 2) == [THERE] * 3


def test_look_up_asks_nobody(bucket: Bucket) -> None:
    tier = bucket.tier()
    User(tier).put(0)
    tier.abandon()  # it can send no more requests
    assert User(tier).find(0, 1) == [THERE, ABSENT]


def test_blocks_of_one_call_are_few_objects(bucket: Bucket) -> None:
    tier = bucket.tier(pack_bytes=8 * 256)
    User(tier).put(*range(20))
    assert len(bucket.paths("packs")) == 3
    assert User(tier).put(*range(20)) == [THERE] * 20
    assert len(bucket.paths("packs")) == 3, "what is there is not written again"


def test_writers_of_the_same_blocks_leave_one_pack(bucket: Bucket) -> None:
    with two(bucket) as (one, other):
        assert User(one).put(0, 1) == User(other).put(0, 1) == [THERE] * 2
        assert len(bucket.paths("packs")) == 1
        one.exchange(TIMEOUT_S)
        other.exchange(TIMEOUT_S)
        one.exchange(TIMEOUT_S)
        assert User(one).get(0, 1) == User(other).get(1, 0) == [THERE] * 2


def test_pack_with_the_same_end_does_not_take_the_place_of_another(bucket: Bucket) -> None:
    with two(bucket) as (one, other):
        User(one).put(0, 1, 2)
        User(other).put(2)
        assert len(bucket.paths("packs")) == 2
        assert User(one).get(0, 1, 2) == [THERE] * 3


def test_stale_yes_is_a_miss(bucket: Bucket) -> None:
    tier = bucket.tier(pack_bytes=2 * 256)
    user = User(tier)
    user.put(0, 1, 2, 3)
    (place,) = tier._catalogue.places(as_keys([stored_key(0)]))
    bucket.delete(pack_path(place.pack))
    assert user.get(0, 2, 3) == [ABSENT, THERE, THERE]
    assert user.find(0, 1) == [ABSENT] * 2, "the whole pack is forgotten"
    assert user.put(0, 1) == user.get(0, 1) == [THERE] * 2
    tier.check_invariants()
    tier.close()


def test_process_that_starts_later_knows_all(bucket: Bucket) -> None:
    for number in range(5):
        tier = bucket.tier()
        assert User(tier).put(number) == [THERE]
        tier.close()
    tier = bucket.tier()
    assert User(tier).found(*range(6)) == list(range(5))
    assert User(tier).get(*range(5)) == [THERE] * 5


def test_block_dropped_for_good_is_gone_for_others_and_its_pack_deleted(bucket: Bucket) -> None:
    with two(bucket) as (one, other):
        User(one).put(0, 1)
        one.exchange(TIMEOUT_S)
        other.exchange(TIMEOUT_S)
        User(one).drop(0, for_good=True)
        assert len(bucket.paths("packs")) == 1, "it has another block"
        other.exchange(TIMEOUT_S)
        assert User(other).find(0, 1) == [ABSENT, THERE]
        # Dropped by one process: a second one's deletion could hit the pack written below.
        User(one).drop(1, for_good=True)
        other.exchange(TIMEOUT_S)
        assert User(other).find(0, 1) == [ABSENT] * 2
        assert not bucket.paths("packs")
        assert User(other).put(0, 1) == [THERE] * 2, "younger than the tombstone"
        other.exchange(TIMEOUT_S)
        one.exchange(TIMEOUT_S)
        assert User(one).get(0, 1) == [THERE] * 2


def test_block_written_anew_is_not_hit_by_its_own_slow_deletion(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same blocks make a pack of the same name."""
    tier = bucket.tier()
    delete = tier._objects.delete

    async def slowly(paths: Sequence[str]) -> None:
        await asyncio.sleep(0.3)
        await delete(paths)

    monkeypatch.setattr(tier._objects, "delete", slowly)
    User(tier).put(0)
    User(tier).drop(0, for_good=True)
    assert User(tier).put(0) == [THERE]
    time.sleep(0.6)
    assert User(tier).get(0) == [THERE]
    tier.close()


def test_drop_for_good_that_nobody_heard_of_raises(bucket: Bucket) -> None:
    tier = bucket.tier()
    User(tier).put(0)
    tier._exchange._objects = Bucket("http://127.0.0.1:1", "nowhere").objects()
    with pytest.raises(TierError):
        User(tier).drop(0, for_good=True)
    assert User(tier).find(0) == [ABSENT]
    tier.abandon()


def test_packs_that_are_too_old_are_not_used(bucket: Bucket) -> None:
    first = bucket.tier()
    User(first).put(0, 1)
    first.close()
    tier = bucket.tier(max_age_s=3600)
    assert User(tier).find(0, 1) == [THERE] * 2
    now = time.time_ns()
    tier._exchange._now_ns = lambda: now + 3601 * 10**9
    assert User(tier).find(0) == User(tier).get(0) == [ABSENT]
    assert User(tier).put(0) == User(tier).find(0) == [THERE]
    assert User(tier).get(0) == [THERE]
    tier.check_invariants()


def test_process_knows_of_no_more_than_its_share(bucket: Bucket) -> None:
    """A process knows only as many blocks as its share; the bucket may keep more."""
    tier = bucket.tier(num_blocks=4)
    assert User(tier).put(*range(10)) == [THERE] * 10
    assert len(User(tier).found(*range(10))) == 4
    tier.check_invariants()


def test_blocks_of_another_size_are_others(bucket: Bucket) -> None:
    larger = full_attention(2, 2, 16, DType.FLOAT16, 2)
    first = bucket.tier(group=larger)
    User(first).put(0)
    first.close()
    tier = bucket.tier()
    assert User(tier).find(0) == [ABSENT]
    assert any("manifest" in finding.note for finding in tier.findings())


def test_manifests_that_are_none_are_passed_over(bucket: Bucket) -> None:
    first = bucket.tier()
    User(first).put(0, 1)
    first.close()
    (path,) = bucket.paths("manifests")
    content = bucket.read(path)
    bucket.write("manifests/somebody/00000000", content[:-1])
    bucket.write("manifests/somebody/00000001", b"")
    bucket.write("manifests/somebody/else", b"kvtierM1" + bytes(100))
    tier = bucket.tier()
    assert User(tier).get(0, 1) == [THERE] * 2
    assert "3 manifests" in tier.findings()[0].note


MINUTE_NS = 60 * 10**9


@pytest.mark.parametrize("ahead_ns", [23 * 60 * MINUTE_NS, 16 * MINUTE_NS, 2**63 - 1])
def test_stamps_far_ahead_are_not_adopted(bucket: Bucket, ahead_ns: int) -> None:
    wrong, right = bucket.tier(), bucket.tier()
    stamp = min(time.time_ns() + ahead_ns, 2**64 - 1)
    wrong._exchange._now_ns = lambda: stamp
    User(wrong).put(0)
    wrong.exchange(TIMEOUT_S)
    right.exchange(TIMEOUT_S)
    assert right._exchange.num_unread == 1
    assert User(right).find(0) == [ABSENT]
    now = time.time_ns()
    assert right._catalogue.next_stamp(now) < now + MINUTE_NS, "its own stamps stay as they are"
    wrong.close()
    right.close()


def test_what_was_refused_for_its_stamp_is_read_when_its_time_has_come(bucket: Bucket) -> None:
    ahead, behind = bucket.tier(), bucket.tier()
    now = time.time_ns()
    ahead._exchange._now_ns = lambda: now + 15 * MINUTE_NS
    behind._exchange._now_ns = lambda: now - 10**9
    User(ahead).put(0)
    ahead.exchange(TIMEOUT_S)
    for _ in range(2):
        behind.exchange(TIMEOUT_S)
        assert User(behind).find(0) == [ABSENT]
        assert behind._exchange.num_unread == 1
    behind._exchange._now_ns = lambda: now
    behind.exchange(TIMEOUT_S)
    assert User(behind).get(0) == [THERE]
    assert behind._exchange.num_unread == 0
    ahead.close()
    behind.close()
