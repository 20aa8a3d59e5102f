"""Tests of compressed and encrypted blocks in every store: damage, other codecs and other keys."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

import numpy as np
import pytest

from kvtier.core.config import CodingConfig
from kvtier.core.types import BlockName
from kvtier.layout import opaque
from kvtier.testing.codec_suite import KINDS
from kvtier.testing.storage_user import NAMESPACE, TIMEOUT_S, Scattered, cuts, stored_key
from kvtier.tiers import Outcome, StorageTier
from kvtier.tiers.row import make_storage
from tests.kit.effort import effort

THERE, ABSENT, DAMAGED, FAILED = Outcome
BLOCK_BYTES = 16 << 10
NUM = 6
KEYS = [stored_key(number) for number in range(NUM)]
NAMES = [BlockName(NAMESPACE, at, key) for at, key in enumerate(KEYS)]
CONTENTS = np.concatenate((KINDS["bfloat16"][: (NUM - 1) * BLOCK_BYTES], KINDS["random"]))
"""The last block does not shrink."""
OPTIONS = {
    "none": CodingConfig(),
    "lossless": CodingConfig("lossless"),
    "first key": CodingConfig("none", "env:FIRST"),
    "both": CodingConfig("lossless", "env:FIRST"),
    "rotated": CodingConfig("lossless", "env:BOTH"),
    "second key": CodingConfig("none", "env:SECOND"),
}
READABLE = {
    "none": {"none", "lossless"},
    "lossless": {"none", "lossless"},
    "first key": {"first key", "both", "rotated"},
    "both": {"first key", "both", "rotated"},
    "rotated": {"rotated", "second key"},
    "second key": {"rotated", "second key"},
}


def content(at: int) -> bytes:
    return CONTENTS[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES].tobytes()


def filled() -> Scattered:
    memory = Scattered(NUM, cuts(BLOCK_BYTES)["unequal pieces"])
    for at in range(NUM):
        memory.write(at, content(at))
    return memory


class CodedStoreTests(ABC):
    """Tests of a store. Blocks are read and replaced past the tier, in their stored form."""

    scheme: str
    num_changes = 600

    @abstractmethod
    def place(self, prefix: str) -> str:
        """Return the rest of a URL, with a question mark, for a prefix without blocks."""

    @abstractmethod
    def stored(self, prefix: str, at: int) -> bytes:
        """Return the stored bytes of a block."""

    @abstractmethod
    def replace(self, prefix: str, at: int, value: bytes) -> None:
        """Replace the stored bytes of a block."""

    def learn(self, tier: StorageTier) -> None:
        """Have a tier learn what others have written, and what it took for damaged."""
        del tier

    @pytest.fixture(autouse=True)
    def _keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("zstandard", "cryptography"):
            pytest.importorskip(name)
        monkeypatch.setenv("FIRST", "01" * 32)
        monkeypatch.setenv("SECOND", "02" * 32)
        monkeypatch.setenv("BOTH", "02" * 32 + "\n" + "01" * 32)

    def open(self, prefix: str, name: str) -> StorageTier:
        location = f"{self.scheme}:{self.place(prefix)}"
        capacity_bytes = 64 * BLOCK_BYTES
        return make_storage(location, opaque(BLOCK_BYTES), capacity_bytes, None, OPTIONS[name])

    @pytest.mark.parametrize("writer", list(OPTIONS))
    def test_readers_find_what_they_can_read(self, writer: str) -> None:
        prefix = writer.replace(" ", "-")
        tier, memory = self.open(prefix, writer), filled()
        assert tier.put(NAMES, memory.pieces, TIMEOUT_S) == [THERE] * NUM
        tier.close()
        for name in OPTIONS:
            reader = self.open(prefix, name)
            memory.clear()
            if name in READABLE[writer]:
                assert reader.find(KEYS, TIMEOUT_S) == [THERE] * NUM
                assert reader.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
                assert [memory.read(at) for at in range(NUM)] == [content(at) for at in range(NUM)]
            else:
                assert reader.get(KEYS, memory.pieces, TIMEOUT_S) == [ABSENT] * NUM
                assert reader.find(KEYS, TIMEOUT_S) == [ABSENT] * NUM
            memory.check_around()
            reader.close()

    def test_blocks_of_all_kinds_lie_side_by_side(self) -> None:
        """A plain block, a compressed one, and one of each that a third process wrote."""
        for at, name in enumerate(["none", "lossless", "none", "lossless"]):
            tier = self.open("mixed", name)
            some = slice(at, NUM) if at == 3 else slice(at, at + 1)
            memory, names = filled(), NAMES[some]
            put = tier.put(names, memory.pieces.pick(some), TIMEOUT_S)
            assert put == [THERE] * len(names)
            tier.close()
        tier = self.open("mixed", "none")
        memory.clear()
        assert tier.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
        assert [memory.read(at) for at in range(NUM)] == [content(at) for at in range(NUM)]
        sizes = [len(self.stored("mixed", at)) for at in range(NUM)]
        assert max(sizes[1], sizes[3], sizes[4]) < 0.9 * min(sizes[0], sizes[2], sizes[5])
        tier.close()

    def test_block_of_another_key_is_replaced_when_it_is_stored_again(self) -> None:
        first, memory = self.open("anew", "first key"), filled()
        first.put(NAMES, memory.pieces, TIMEOUT_S)
        first.close()
        memory.clear()
        second = self.open("anew", "second key")
        assert second.get(KEYS, memory.pieces, TIMEOUT_S) == [ABSENT] * NUM
        assert all(memory.is_untouched(at) for at in range(NUM))
        memory = filled()
        assert second.put(NAMES, memory.pieces, TIMEOUT_S) == [THERE] * NUM
        memory.clear()
        assert second.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
        assert [memory.read(at) for at in range(NUM)] == [content(at) for at in range(NUM)]
        second.close()
        third = self.open("anew", "second key")
        memory.clear()
        assert third.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
        third.close()

    @pytest.mark.parametrize("name", ["lossless", "first key", "both"])
    @pytest.mark.parametrize("secret", ["", "ours"])
    def test_changed_value_never_becomes_a_wrong_byte(
        self, monkeypatch: pytest.MonkeyPatch, name: str, secret: str
    ) -> None:
        """Flip, truncate, lengthen and swap values."""
        monkeypatch.setenv("KVTIER_STORE_SECRET", secret)
        prefix = f"changed-{name.replace(' ', '-')}{secret}"
        tier, memory, rng = self.open(prefix, name), filled(), random.Random(3)
        tier.put(NAMES, memory.pieces, TIMEOUT_S)
        values = [self.stored(prefix, at) for at in range(NUM)]
        num_right = 0
        num_turns = effort(self.num_changes, step=8)
        for turn in range(num_turns):
            at = turn % NUM
            value = changed(values, at, turn, rng)
            self.replace(prefix, at, value)
            memory.clear()
            (outcome,) = tier.get([KEYS[at]], memory.pieces.pick([at]), TIMEOUT_S)
            if outcome is THERE:  # what was changed has no meaning
                assert memory.read(at) == content(at)
                assert not self.is_meant(value, values[at])
                num_right += 1
            else:
                assert outcome in (DAMAGED, ABSENT)
            memory.check_around()
            self.replace(prefix, at, values[at])
            self.learn(tier)
        assert num_right < num_turns * 3 // 4
        memory.clear()
        assert tier.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM
        tier.close()

    def is_meant(self, value: bytes, original: bytes) -> bool:
        """Return whether a store has to detect ``value`` in the place of ``original``."""
        del value, original
        return True


def changed(values: list[bytes], at: int, turn: int, rng: random.Random) -> bytes:
    """Return a changed value of block ``at``."""
    value = values[at]
    if turn % 4 == 0:
        return values[at - rng.randrange(1, NUM)]
    if turn % 4 == 1:
        return value[: rng.randrange(len(value))]
    if turn % 8 == 2:
        return value + rng.randbytes(rng.randrange(1, 2 * BLOCK_BYTES))
    flipped = bytearray(value)
    bit = rng.randrange(8 * (len(value) if turn % 2 else 200))
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)
