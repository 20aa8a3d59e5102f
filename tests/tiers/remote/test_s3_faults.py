"""Faults of a bucket, or on the way to it: no wrong bytes, and no late call."""

from __future__ import annotations

import logging
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.core.errors import Closed
from kvtier.layout import DType, full_attention
from kvtier.testing.storage_user import User
from kvtier.tiers import Outcome
from kvtier.tiers.remote.bucket import pack_reader
from tests.kit.effort import effort
from tests.kit.proxy import Proxy
from tests.kit.servers import find_binary, make_bucket, port_of, seaweed
from tests.kit.waiting import wait_until
from tests.tiers.remote.bucket import SECRET_KEY, Bucket

THERE, ABSENT, DAMAGED, FAILED = Outcome
LARGE = full_attention(8, 8, 64, DType.FLOAT16, 64)
"""1 MiB a block."""


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[Proxy]:
    made = Proxy(port_of(bucket.url))
    yield made
    made.close()


@pytest.mark.slow
def test_flipped_bits_never_become_wrong_bytes(bucket: Bucket) -> None:
    """Flip a bit anywhere in a pack: header, entries, zeros, blocks."""
    writer = bucket.tier()
    numbers = range(6)
    User(writer).put(*numbers)
    writer.close()
    (path,) = bucket.paths("packs")
    content = bucket.read(path)
    place = random.Random(7)
    tier = bucket.tier()
    seen = set()
    positions = [
        0,
        8,
        12,
        16,
        24,
        40,
        4095,
        *(place.randrange(len(content)) for _ in range(effort(1000))),
    ]
    for position in positions:
        spoiled = bytearray(content)
        spoiled[position] ^= 1 << place.randrange(8)
        bucket.write(path, bytes(spoiled))
        outcomes = User(tier).get(*numbers)  # looks at every byte of what is called there
        assert set(outcomes) <= {THERE, DAMAGED}
        seen.update(outcomes)
        if position >= 4096:
            assert outcomes.count(DAMAGED) == 1, "the others are right"
        if DAMAGED in outcomes:
            assert User(tier).find(*numbers).count(ABSENT) == outcomes.count(DAMAGED)
            tier._exchange.read.clear()
            tier.exchange(30)
    assert seen == {THERE, DAMAGED}
    bucket.write(path, content[:-100])
    assert set(User(tier).get(*numbers)) <= {DAMAGED, ABSENT, THERE}
    tier.check_invariants()


def test_block_under_a_false_name_is_damaged(bucket: Bucket) -> None:
    """A whole, valid pack of other blocks takes the place of one."""
    tier = bucket.tier()
    user = User(tier)
    user.put(0, 1)
    (first,) = bucket.paths("packs")
    user.put(2, 3)
    (second,) = set(bucket.paths("packs")) - {first}
    bucket.write(second, bucket.read(first))
    assert user.get(2, 3) == [DAMAGED] * 2
    assert user.get(0, 1) == [THERE] * 2
    tier.close()


def test_block_of_another_secret_is_damaged(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write access to the bucket is not enough to change what a tier reads."""
    monkeypatch.setenv("KVTIER_STORE_SECRET", "of somebody else")
    stranger = bucket.tier()
    User(stranger).put(0, 1)
    stranger.close()
    monkeypatch.setenv("KVTIER_STORE_SECRET", "ours")
    tier = bucket.tier()
    user = User(tier)
    assert user.find(0, 1) == [THERE] * 2
    assert user.get(0, 1) == [DAMAGED] * 2
    assert user.put(0, 1) == user.get(0, 1) == [THERE] * 2


def test_blocks_may_come_in_several_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks in each but the last, of 256 bytes each behind 4096 of the header."""
    monkeypatch.setattr(pack_reader, "PART_BYTES", 3 * 256 + 100)
    tier = bucket.tier()
    user = User(tier)
    user.put(*range(10))
    assert user.get(*range(10)) == user.get(*range(10)) == [THERE] * 10
    (path,) = bucket.paths("packs")
    content = bytearray(bucket.read(path))
    content[4096 + 2 * 256 - 1] ^= 1
    bucket.write(path, bytes(content))
    assert user.get(*range(10)) == [THERE, DAMAGED, *[THERE] * 8]


@pytest.mark.parametrize("is_writing", [False, True])
def test_connection_cut_in_mid_transfer_fails_and_comes_back(
    bucket: Bucket, proxy: Proxy, is_writing: bool
) -> None:
    tier = bucket.tier(16, LARGE, url=proxy.url, pack_bytes="4MiB")
    user = User(tier)
    assert user.put(*range(4)) == [THERE] * 4
    hurried = User(tier, timeout_s=1.0)
    with proxy.stalled(1 << 20):
        cut = threading.Timer(0.3, proxy.cut)
        cut.start()
        outcomes = hurried.put(*range(4, 8)) if is_writing else hurried.get(*range(4))
        cut.join()
    assert outcomes == [FAILED] * 4
    proxy.cut()
    assert user.put(*range(4, 8)) == user.get(*range(4, 8)) == user.get(*range(4)) == [THERE] * 4
    tier.check_invariants()
    tier.close()


def test_black_hole_returns_in_time(bucket: Bucket) -> None:
    tier = bucket.tier()
    User(tier).put(0, 1)
    with socket.create_server(("127.0.0.1", 0)) as hole:
        tier._objects = tier._reader._objects = Bucket(
            f"http://127.0.0.1:{hole.getsockname()[1]}", "x"
        ).objects()
        for timeout_s in (0.05, 0.5):
            hurried = User(tier, timeout_s=timeout_s)
            began = time.monotonic()
            assert hurried.get(0, 1) == [FAILED] * 2
            assert hurried.put(2) == [FAILED]
            assert time.monotonic() - began < 2 * timeout_s + 0.5
    tier.close()


def test_store_that_can_not_be_reached_at_the_start_comes_later(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    writer = bucket.tier()
    User(writer).put(0)
    writer.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with caplog.at_level(logging.WARNING):
        tier = bucket.tier(url=f"http://127.0.0.1:{port}", poll_s=0.1)
    assert User(tier).find(0) == [ABSENT]
    assert User(tier).put(1) == [FAILED]
    assert "no answer" in tier.findings()[1].found
    later = Proxy(port_of(bucket.url), port=port)
    wait_until(lambda: User(tier).find(0) == [THERE])
    assert User(tier).put(1) == User(tier).get(1) == User(tier).get(0) == [THERE]
    wait_until(lambda: tier.findings()[1].found == "in use")
    tier.close()
    later.close()
    assert sum("does not answer" in line.message for line in caplog.records) == 1
    assert SECRET_KEY not in caplog.text


@pytest.mark.slow
@pytest.mark.nightly
def test_server_killed_in_mid_transfer_fails_and_comes_back(tmp_path: Path, bucket: Bucket) -> None:
    binary = find_binary("weed")
    assert binary is not None
    server = seaweed(binary, tmp_path / "s3")
    server.start()
    try:
        make_bucket(server.url)
        own = Bucket(server.url, "killed")
        tier = own.tier(64, LARGE, pack_bytes="4MiB")
        user = User(tier, timeout_s=5.0)
        assert user.put(*range(16)) == [THERE] * 16
        killer = threading.Timer(0.02, server.kill)
        killer.start()
        while FAILED not in (outcomes := user.get(*range(16))):
            assert outcomes == [THERE] * 16
        killer.join()
        began = time.monotonic()
        assert user.get(*range(16)) == [FAILED] * 16
        assert user.put(16, 17) == [FAILED] * 2
        assert time.monotonic() - began < 12
        server.start()
        wait_until(lambda: user.put(16) == [THERE])
        # What the kill lost of the server's own is absent, and nothing of it wrong.
        assert set(user.get(*range(17))) <= {THERE, ABSENT, DAMAGED}
        assert user.get(16) == [THERE]
        tier.check_invariants()
        tier.close()
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.nightly
def test_process_starts_and_ends_in_time_though_nobody_answers(bucket: Bucket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        began = time.monotonic()
        tier = bucket.tier(url=f"http://127.0.0.1:{hole.getsockname()[1]}")
        assert User(tier).find(0) == User(tier).get(0) == [ABSENT]
        assert User(tier).put(0) == [FAILED]
        tier.close()
        assert time.monotonic() - began < 10


@pytest.mark.slow
def test_process_may_end_without_a_close(bucket: Bucket) -> None:
    """Requests may be in flight, too."""
    script = f"""
from threading import Thread
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import User
from kvtier.tiers import StorageSite
from kvtier.tiers.remote.bucket.opening import make_s3
site = StorageSite("s3", {bucket.location(poll_s=0.01, publish_s=0.01)!r}, GROUP, 1 << 20)
tier = make_s3(site)
assert [each.value for each in User(tier).put(*range(10))] == ["there"] * 10
Thread(target=lambda: [User(tier).get(*range(10)) for _ in range(10**6)], daemon=True).start()
"""
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, "")


def test_closed_tier_begins_nothing(bucket: Bucket) -> None:
    tier = bucket.tier()
    User(tier).put(0)
    tier.close()
    tier.close()
    with pytest.raises(Closed):
        User(tier).get(0)
