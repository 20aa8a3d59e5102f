"""Tests of every store of values: the suite of storage tiers, sharing, damage, and coded blocks."""

from __future__ import annotations

import gc
import os
import random
import threading
from abc import ABC, abstractmethod
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import pytest

from kvtier.core.config import DEFAULT_CODING, CodingConfig
from kvtier.core.types import BlockKey, BlockName
from kvtier.layout import KVGroup, opaque
from kvtier.testing import StorageSuite
from kvtier.testing.codec_suite import KINDS
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import (
    NAMESPACE,
    TIMEOUT_S,
    Scattered,
    User,
    cuts,
    stored_bytes,
    stored_key,
)
from kvtier.tiers import Outcome, StorageTier
from kvtier.tiers.row import make_storage
from tests.kit.effort import effort

THERE, ABSENT, DAMAGED, FAILED = Outcome


def open_store(
    place: str,
    num_blocks: int = 64,
    group: KVGroup = GROUP,
    coding: CodingConfig = DEFAULT_CODING,
    **options: Any,
) -> StorageTier:
    """Open a tier. place: URL without options."""
    query = "&".join(f"{name}={quote(str(value))}" for name, value in options.items())
    num_bytes = num_blocks * group.bytes_per_block
    return closed_later(make_storage(f"{place}?{query}", group, num_bytes, None, coding))


Tier = TypeVar("Tier", bound=StorageTier)
opened: list[StorageTier] | None = None
"""Tiers that a test has opened, which are closed at its end; None outside of a test."""


def closed_later(tier: Tier) -> Tier:
    """Return the tier, which is closed at the end of the test."""
    if opened is not None:
        opened.append(tier)
    return tier


class Place(ABC):
    """A store whose values can be read and replaced past the tier."""

    @abstractmethod
    def open_tier(
        self,
        place: str,
        num_blocks: int = 64,
        group: KVGroup = GROUP,
        coding: CodingConfig = DEFAULT_CODING,
        **options: Any,
    ) -> StorageTier:
        """Open a tier. place: prefix that no other test uses."""

    @abstractmethod
    def value(self, place: str, key: BlockKey) -> bytes:
        """Return the stored bytes of a block."""

    @abstractmethod
    def replace(self, place: str, key: BlockKey, content: bytes) -> None:
        """Replace the stored bytes of a block."""


class StoreSuite(Place, StorageSuite):
    """The suite of storage tiers."""

    def make_storage(self, num_blocks: int) -> StorageTier:
        self.prefix = os.urandom(8).hex()
        return self.open_tier(self.prefix, num_blocks)

    def reopen(self, storage: StorageTier) -> StorageTier:
        return self.open_tier(self.prefix, storage.num_blocks)

    def spoil(self, storage: StorageTier, key: BlockKey) -> bool:
        content = bytearray(self.value(self.prefix, key))
        content[96 + storage.bytes_per_block - 3] ^= 1
        self.replace(self.prefix, key, bytes(content))
        return True


def num_open() -> tuple[int, int]:
    """Return the numbers of open descriptors, and of threads that the system knows."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class StoreTests(Place):
    """Rules of stores."""

    num_flips = int(os.environ.get("KVTIER_NUM_MUTATIONS", "3000"))
    looks_at_headers = False
    """Whether a look-up reads the headers of values."""

    def test_what_one_has_put_the_others_get(self) -> None:
        first, second = (self.open_tier("shared") for _ in range(2))
        assert User(first).put(*range(20)) == [THERE] * 20
        assert User(second).find(*range(20), 99) == [THERE] * 20 + [ABSENT]
        assert User(second).get(*range(20)) == [THERE] * 20

    def test_more_blocks_than_fit_into_a_call(self) -> None:
        tier = self.open_tier("many", 1000)
        user = User(tier)
        assert user.put(*range(300)) == [THERE] * 300
        assert user.get(*range(290, 310)) == [THERE] * 10 + [ABSENT] * 10
        assert user.get(*range(300)) == [THERE] * 300

    @pytest.mark.slow
    @pytest.mark.parametrize("secret", ["", "a secret"])
    def test_flipped_bits_are_noticed_wherever_they_are(
        self, monkeypatch: pytest.MonkeyPatch, secret: str
    ) -> None:
        monkeypatch.setenv("KVTIER_STORE_SECRET", secret)
        place = f"flips{len(secret)}"
        tier = self.open_tier(place)
        user = User(tier)
        assert user.put(1) == [THERE]
        content = self.value(place, stored_key(1))
        num_bits = 8 * (96 + tier.bytes_per_block)
        for at in range(0, num_bits, max(1, num_bits // self.num_flips)):
            flipped = content[: at // 8] + bytes([content[at // 8] ^ 1 << at % 8])
            self.replace(place, stored_key(1), flipped + content[at // 8 + 1 :])
            assert user.get(1) == [DAMAGED]
            assert user.get(1) == [ABSENT], "it would be in the way of the right one"
        assert user.put(1) == user.get(1) == [THERE]

    def test_value_of_another_length_is_not_taken(self) -> None:
        tier = self.open_tier("lengths")
        user = User(tier)
        assert user.put(1) == [THERE]
        content = self.value("lengths", stored_key(1))
        for wrong in (b"", content[:50], content[:-1], content + b"x"):
            self.replace("lengths", stored_key(1), wrong)
            assert user.get(1) == [DAMAGED]
            assert user.put(1) == user.get(1) == [THERE]

    def test_block_of_another_key_is_not_taken(self) -> None:
        tier = self.open_tier("swapped")
        user = User(tier)
        user.put(1, 2)
        self.replace("swapped", stored_key(1), self.value("swapped", stored_key(2)))
        assert not self.looks_at_headers or user.find(1) == [ABSENT]
        assert user.get(1, 2) == [DAMAGED, THERE]

    def test_without_the_secret_nothing_is_believed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stranger = self.open_tier("tags")
        assert User(stranger).put(1) == [THERE]
        monkeypatch.setenv("KVTIER_STORE_SECRET", "ours")
        tier = self.open_tier("tags")
        assert not self.looks_at_headers or User(tier).find(1) == [ABSENT]
        assert User(tier).get(1) == [DAMAGED]
        assert User(tier).put(1) == User(tier).get(1) == [THERE]

    def test_blocks_of_another_secret_are_neither_used_nor_touched(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("KVTIER_STORE_SECRET", "ours")
        tier = self.open_tier("secrets")
        assert User(tier).put(1, 2) == [THERE] * 2
        monkeypatch.setenv("KVTIER_STORE_SECRET", "another")
        other = self.open_tier("secrets")
        assert User(other).get(1, 2) == [DAMAGED] * 2
        User(other).drop(1, 2, for_good=True)  # as a cache does with what it could not read
        assert User(other).find(1) == [ABSENT], "not read again and again"
        assert THERE not in User(other).put(1)
        assert User(other).put(3) == User(other).get(3) == [THERE]
        assert caplog.text.count("tag of another secret") == 1
        assert User(tier).get(1, 2) == [THERE] * 2
        monkeypatch.setenv("KVTIER_STORE_SECRET", " ours\n")
        same = self.open_tier("secrets")
        assert User(same).get(1) == [THERE]

    def test_bytes_of_a_value_are_those_of_the_format(self) -> None:
        """Later versions have to read the values of this one."""
        tier = self.open_tier("format")
        memory = Scattered(1, [tier.bytes_per_block])
        content = stored_bytes(stored_key(7), tier.bytes_per_block)
        memory.write(0, content)
        assert tier.put([BlockName(NAMESPACE, 0, stored_key(7))], memory.pieces, 10) == [THERE]
        value = self.value("format", stored_key(7))
        assert value[:12] == b"kvtierB1" + bytes(4)
        assert value[16:24] == len(content).to_bytes(8, "little")
        assert value[24:88] == stored_key(7) + bytes(32)
        assert value[92:96] == bytes(4)
        assert value[96 : 96 + len(content)] == content

    def test_dropped_for_good_is_gone_for_all(self) -> None:
        first, second = (self.open_tier("drops") for _ in range(2))
        User(first).put(1, 2)
        User(first).drop(1)
        assert User(second).find(1) == [THERE], "others may use it still"
        User(first).drop(1, for_good=True)
        assert User(second).find(1, 2) == [ABSENT, THERE]

    def test_nothing_is_used_after_a_close(self) -> None:
        tier = self.open_tier("closed")
        user = User(tier)
        user.put(1)
        tier.close()
        tier.close()
        assert user.get(1) == user.put(2) == user.find(1) == [FAILED]

    @pytest.mark.slow
    def test_many_operations_leave_nothing_behind(self) -> None:
        before_all = num_open()
        tier = self.open_tier("leaks", 1000)
        user = User(tier)

        def work() -> None:
            mine = User(tier)
            for number in range(effort(600)):
                assert mine.get(number % 4) == [THERE]

        def use() -> None:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        user.put(*range(4))
        use()
        before = num_open()
        for number in range(effort(2000)):
            user.find(number % 8)
            assert user.get(number % 4) == [THERE]
            if not number % 10:
                user.drop(number % 4 + 4, for_good=True)
                assert user.put(number % 4 + 4) == [THERE]
        for _ in range(3):
            use()
        descriptors, num_threads = num_open()
        assert descriptors <= before[0] + 2
        assert num_threads <= before[1] + 2
        tier.close()
        assert num_open()[1] <= before_all[1] + 2


# -- coded blocks ----------------------------------------------------------------------------------

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


class CodedStoreTests(Place):
    """Tests of compressed and encrypted blocks: damage, other codecs and other keys."""

    num_changes = 600

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
        return self.open_tier(prefix, 64, opaque(BLOCK_BYTES), OPTIONS[name])

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
        sizes = [len(self.value("mixed", KEYS[at])) for at in range(NUM)]
        assert max(sizes[1], sizes[3], sizes[4]) < 0.9 * min(sizes[0], sizes[2], sizes[5])

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
        values = [self.value(prefix, KEYS[at]) for at in range(NUM)]
        num_right = 0
        num_turns = effort(self.num_changes, step=8)
        for turn in range(num_turns):
            at = turn % NUM
            value = changed(values, at, turn, rng)
            self.replace(prefix, KEYS[at], value)
            memory.clear()
            (outcome,) = tier.get([KEYS[at]], memory.pieces.pick([at]), TIMEOUT_S)
            if outcome is THERE:  # what was changed has no meaning
                assert memory.read(at) == content(at)
                assert not self.is_meant(value, values[at])
                num_right += 1
            else:
                assert outcome in (DAMAGED, ABSENT)
            memory.check_around()
            self.replace(prefix, KEYS[at], values[at])
            self.learn(tier)
        assert num_right < num_turns * 3 // 4
        memory.clear()
        assert tier.get(KEYS, memory.pieces, TIMEOUT_S) == [THERE] * NUM

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
