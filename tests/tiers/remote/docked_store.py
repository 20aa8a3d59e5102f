"""Tests of every store whose own client transfers the blocks."""

from __future__ import annotations

import gc
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest

from kvtier.core.types import BlockKey, BlockName
from kvtier.testing.storage_user import NAMESPACE, Scattered, User, stored_bytes, stored_key
from kvtier.tiers import Outcome, StorageTier

THERE, ABSENT, DAMAGED, FAILED = Outcome


def num_open() -> tuple[int, int]:
    """Return the numbers of open descriptors, and of threads that the system knows."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def eventually(what: Callable[[], bool], patience_s: float = 60.0) -> bool:
    """Return whether ``what`` becomes true within ``patience_s``."""
    ends_at = time.monotonic() + patience_s
    while not what():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.05)
    return True


class DockedStoreTests(ABC):
    num_flips = int(os.environ.get("KVTIER_NUM_MUTATIONS", "3000"))

    @abstractmethod
    def open_tier(self, place: str, num_blocks: int = 64, **options: object) -> StorageTier:
        """Open a tier. place: prefix that no other test uses."""

    @abstractmethod
    def value(self, place: str, key: BlockKey) -> bytes:
        """Return the stored bytes of a block, past the tier."""

    @abstractmethod
    def replace(self, place: str, key: BlockKey, content: bytes) -> None: ...

    def test_what_one_has_put_the_others_get(self) -> None:
        first, second = (self.open_tier("shared") for _ in range(2))
        assert User(first).put(*range(20)) == [THERE] * 20
        assert User(second).find(*range(20), 99) == [THERE] * 20 + [ABSENT]
        assert User(second).get(*range(20)) == [THERE] * 20
        first.close()
        second.close()

    def test_more_blocks_than_fit_into_a_dock(self) -> None:
        tier = self.open_tier("many", 1000)
        user = User(tier)
        assert user.put(*range(300)) == [THERE] * 300
        assert user.get(*range(290, 310)) == [THERE] * 10 + [ABSENT] * 10
        assert user.get(*range(300)) == [THERE] * 300
        tier.close()

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
        tier.close()

    def test_value_of_another_length_is_not_taken(self) -> None:
        tier = self.open_tier("lengths")
        user = User(tier)
        assert user.put(1) == [THERE]
        content = self.value("lengths", stored_key(1))
        for wrong in (content[:50], content[:-1], content + b"x"):
            self.replace("lengths", stored_key(1), wrong)
            assert user.get(1) == [DAMAGED]
            assert user.put(1) == user.get(1) == [THERE]
        tier.close()

    def test_block_of_another_key_is_not_taken(self) -> None:
        tier = self.open_tier("swapped")
        user = User(tier)
        user.put(1, 2)
        self.replace("swapped", stored_key(1), self.value("swapped", stored_key(2)))
        assert user.get(1, 2) == [DAMAGED, THERE]
        tier.close()

    def test_without_the_secret_nothing_is_believed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stranger = self.open_tier("tags")
        assert User(stranger).put(1) == [THERE]
        monkeypatch.setenv("KVTIER_STORE_SECRET", "ours")
        tier = self.open_tier("tags")
        assert User(tier).get(1) == [DAMAGED]
        assert User(tier).put(1) == User(tier).get(1) == [THERE]
        for each in (stranger, tier):
            each.close()

    def test_blocks_of_another_secret_are_neither_used_nor_touched(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("KVTIER_STORE_SECRET", "ours")
        tier = self.open_tier("secrets")
        assert User(tier).put(1, 2) == [THERE] * 2
        monkeypatch.setenv("KVTIER_STORE_SECRET", "another")
        other = self.open_tier("secrets")
        assert User(other).get(1, 2) == [DAMAGED] * 2
        assert User(other).find(1) == [ABSENT], "not read again and again"
        assert THERE not in User(other).put(1)
        assert User(other).put(3) == User(other).get(3) == [THERE]
        assert caplog.text.count("tag of another secret") == 1
        assert User(tier).get(1, 2) == [THERE] * 2
        monkeypatch.setenv("KVTIER_STORE_SECRET", " ours\n")
        same = self.open_tier("secrets")
        assert User(same).get(1) == [THERE]
        for each in (tier, other, same):
            each.close()

    def test_bytes_of_a_value_are_those_of_the_format(self) -> None:
        """Later versions have to read the values of this one."""
        tier = self.open_tier("format")
        memory = Scattered(1, [tier.bytes_per_block])
        content = stored_bytes(stored_key(7), tier.bytes_per_block)
        memory.write(0, content)
        assert tier.put([BlockName(NAMESPACE, 0, stored_key(7))], memory.pieces, 10) == [THERE]
        value = self.value("format", stored_key(7))
        assert value[:8] == b"kvtierB1"
        assert value[16:24] == len(content).to_bytes(8, "little")
        assert value[24:56] == stored_key(7)
        assert value[96 : 96 + len(content)] == content
        tier.close()

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
            for number in range(600):
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
        for number in range(2000):
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
