"""Conformance suite of codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.testing.storage_user import together
from kvtier.tiers.codecs.codec import LAST_NUMBER, Codec, Uint8s

SIZES = (1, 2, 3, 8, 100, 4096, 4104, 65536, (256 << 10) + 8, 1_000_000)
UNTOUCHED = 0xAB


def block_kinds() -> dict[str, Uint8s]:
    """Return blocks of 1 MiB by what is in them: numbers like KV in every type, and other bytes."""
    rng = np.random.default_rng(5)
    scales = np.exp(rng.normal(0, 1, 256)).astype(np.float32)
    values = (rng.standard_normal((1 << 10, 256), np.float32) * scales).astype(np.float32)
    bits = values.view(np.uint32)
    bfloat16 = ((bits + 0x8000) >> 16).astype(np.uint16)
    special = bfloat16.copy()
    special.ravel()[::97] = rng.integers(0, 1 << 16, special.size // 97 + 1, np.uint16)
    kinds = {
        "float32": values,
        "float16": values.astype(np.float16),
        "bfloat16": bfloat16,
        "bfloat16 with any bits": special,
        "float8": (bfloat16 >> 8).astype(np.uint8),
        "zeros": np.zeros(1 << 20, np.uint8),
        "ones": np.full(1 << 20, 255, np.uint8),
        "random": rng.integers(0, 256, 1 << 20, np.uint8),
        "half zeros": np.concatenate((bfloat16.ravel(), np.zeros_like(bfloat16).ravel())),
        "counted": np.arange(1 << 18, dtype=np.uint32),
    }
    return {
        name: np.resize(np.ascontiguousarray(each).view(np.uint8).ravel(), 1 << 20)
        for name, each in kinds.items()
    }


KINDS = block_kinds()
each_kind = pytest.mark.parametrize("kind", list(KINDS))


class CodecRules(ABC):
    """Rules of exact and of lossy codecs."""

    num_damaged: int = 2000
    """Damaged blocks to decode."""

    @abstractmethod
    def make_codec(self) -> Codec:
        """Make the codec. A lossy codec is made without a shape."""

    def encoded(self, codec: Codec, block: Uint8s) -> Uint8s:
        """Return the encoded block; skip the test if it does not fit into twice its size."""
        into = np.empty(2 * len(block) + 1024, np.uint8)
        num = codec.encode(block, into)
        if num is None:
            pytest.skip("this codec does not encode the block")
        return into[:num].copy()

    def test_number_can_be_stored(self) -> None:
        assert 1 <= self.make_codec().number <= LAST_NUMBER

    def damaged(self, codec: Codec, block: Uint8s, num: int) -> Iterator[tuple[bool, Uint8s]]:
        """Decode ``num`` damaged blocks; yield the result and the memory of each.

        There is no error, and no byte outside of the block is written.
        """
        stored, rng = self.encoded(codec, block), np.random.default_rng(7)
        memory = np.full(len(block) + 128, UNTOUCHED, np.uint8)
        into = memory[64:-64]
        for _ in range(num):
            spoiled = stored.copy()
            for _ in range(rng.integers(1, 4)):
                at = rng.integers(len(spoiled) if rng.integers(2) else min(32, len(spoiled)))
                spoiled[at] = rng.integers(256)
            if rng.integers(3) == 0:
                spoiled = spoiled[: rng.integers(len(spoiled))]
            yield codec.decode(np.ascontiguousarray(spoiled), into), into
            assert (memory[:64] == UNTOUCHED).all()
            assert (memory[-64:] == UNTOUCHED).all()

    def check_room(self, codec: Codec, block: Uint8s) -> dict[int, int | None]:
        """Check that nothing is written beyond the room, and that what fits is whole.

        Returns the bytes that were written for each room.
        """
        whole = self.encoded(codec, block)
        right, again = np.empty_like(block), np.empty_like(block)
        assert codec.decode(whole, right)
        most, written = len(whole), dict[int, int | None]()
        for room in (0, 1, 13, most // 3, most - 1, most, most + 7, len(block)):
            memory = np.full(room + 64, UNTOUCHED, np.uint8)
            num = written[room] = codec.encode(block, memory[:room])
            assert num is None or num <= room
            assert (memory[room:] == UNTOUCHED).all()
            if num is not None:
                assert codec.decode(memory[:num], again)
                assert (again == right).all()
        return written

    def check_sizes(self, codec: Codec, block: Uint8s) -> None:
        """Check that what was encoded is decoded neither in part nor into another size."""
        stored = self.encoded(codec, block)
        for size in (0, 8, len(block) - 8, len(block) + 8, 2 * len(block)):
            assert not codec.decode(stored, np.empty(size, np.uint8))
        for wrong in (stored[:0], stored[:-1], np.append(stored, np.uint8(0))):
            assert not codec.decode(wrong, np.empty_like(block))


class CodecSuite(CodecRules):
    """Conformance suite of codecs. Implement ``make_codec``."""

    @each_kind
    def test_block_comes_back_bit_for_bit(self, kind: str) -> None:
        codec = self.make_codec()
        for size in SIZES:
            for first in (0, 1):  # unaligned, too
                block = KINDS[kind][first : first + size]
                before = block.copy()
                stored = self.encoded(codec, block)
                assert (block == before).all(), "the block was changed"
                again = np.empty(size, np.uint8)
                assert codec.decode(stored, again)
                assert (again == block).all()

    def test_another_instance_decodes(self) -> None:
        block = KINDS["bfloat16"]
        stored = self.encoded(self.make_codec(), block)
        again = np.empty_like(block)
        assert self.make_codec().decode(stored, again)
        assert (again == block).all()

    @each_kind
    def test_nothing_is_written_beyond_the_room(self, kind: str) -> None:
        self.check_room(self.make_codec(), KINDS[kind][: 300 << 10])

    @each_kind
    def test_damage_is_an_outcome(self, kind: str) -> None:
        num = self.num_damaged // len(KINDS)
        assert sum(1 for _ in self.damaged(self.make_codec(), KINDS[kind][: 20 << 10], num)) == num

    def test_block_of_another_size_is_none(self) -> None:
        self.check_sizes(self.make_codec(), KINDS["bfloat16"][: 64 << 10])

    def test_threads_share_a_codec(self) -> None:
        codec, kinds = self.make_codec(), ("bfloat16", "float16", "float32", "random")

        def work(at: int) -> None:
            block = KINDS[kinds[at]]
            again, into = np.empty_like(block), np.empty(2 * len(block), np.uint8)
            num = codec.encode(block, into)
            if num is not None:
                assert codec.decode(into[:num], again)
                assert (again == block).all()

        together([(work, at) for at in range(len(kinds))], rounds=5)
