"""A hundred thousand flipped bits, in headers and in bodies: none ever becomes a wrong byte."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from kvtier.testing.storage_user import stored_bytes
from kvtier.tiers.crc_join import block_crcs
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.bucket.catalogue import PackLocation
from kvtier.tiers.remote.bucket.packs import pack_name
from kvtier.tiers.remote.envelope import HEADER_BYTES, Envelope, as_headers, as_keys
from tests.kit.effort import effort
from tests.tiers.remote.bucket import OnePack

pytestmark = pytest.mark.slow

BLOCK_BYTES, KEYS = OnePack.BLOCK_BYTES, OnePack.KEYS
IN_VALUES, IN_PACKS = effort(80_000), effort(20_000)


def flipped(content: bytes, at: random.Random) -> bytes:
    """Return the bytes with one bit changed, anywhere."""
    number = at.randrange(8 * len(content))
    made = bytearray(content)
    made[number // 8] ^= 1 << number % 8
    return bytes(made)


@pytest.mark.parametrize("secret", [b"", b"a secret"])
def test_no_flipped_bit_of_a_value_is_overlooked(secret: bytes) -> None:
    envelope, at = Envelope(BLOCK_BYTES, secret), random.Random(3)
    contents = b"".join(stored_bytes(key, BLOCK_BYTES) for key in KEYS)
    rows = np.frombuffer(contents, np.uint8).copy().reshape(len(KEYS), BLOCK_BYTES)
    begins = np.arange(len(KEYS), dtype=np.uint64) * np.uint64(BLOCK_BYTES)
    blocks = Pieces.whole(begins + np.uint64(rows.ctypes.data), BLOCK_BYTES)
    headers = envelope.headers(KEYS, blocks, block_crcs(blocks))
    keys = as_keys(KEYS)
    assert envelope.are_blocks(as_headers(headers), keys, blocks, block_crcs(blocks)).all()
    values = [header + row.tobytes() for header, row in zip(headers, rows, strict=True)]
    for _ in range(IN_VALUES // 2 // len(KEYS)):
        spoiled = [flipped(value, at) for value in values]
        for row, value in zip(rows, spoiled, strict=True):
            row[:] = np.frombuffer(value, np.uint8)[HEADER_BYTES:]
        found = as_headers([value[:HEADER_BYTES] for value in spoiled])
        assert not envelope.are_blocks(found, keys, blocks, block_crcs(blocks)).any()


@pytest.mark.parametrize("secret", [b"", b"a secret"])
def test_no_flipped_bit_of_a_pack_becomes_a_wrong_byte(secret: bytes) -> None:
    """Read and verified as from a bucket, with a header in the cache and without."""
    store, at = OnePack(secret), random.Random(4)
    memory, whole = store.memory, store.content
    expected = [stored_bytes(key, BLOCK_BYTES) for key in KEYS]
    # Most of a pack this small are zeros of its header: blocks and entries are to be hit as often.
    number_of_entries = 24 + len(KEYS) * 112
    keys = as_keys(KEYS)
    every = np.arange(len(KEYS))
    places = [PackLocation(pack_name(keys), len(KEYS), every, every)]
    num_there = num_damaged = 0

    async def run() -> None:
        nonlocal num_there, num_damaged
        for turn in range(IN_PACKS // 2):
            reader = store.reader()
            ((asked, part),) = reader.parts(places)
            if turn % 2:  # its header is known
                store.content = whole
                content = await reader.read(asked, part)
                reader.take(asked, part, content, keys, memory.pieces)
                ((asked, part),) = reader.parts(places)
                assert part.start, "the header is not read again"
            begin, end = (0, number_of_entries) if turn % 4 < 2 else (4096, len(whole))
            store.content = whole[:begin] + flipped(whole[begin:end], at) + whole[end:]
            memory.clear()
            content = await reader.read(asked, part)
            there, damaged = reader.take(asked, part, content, keys, memory.pieces)
            assert sorted([*there, *damaged]) == list(range(len(KEYS)))
            for number in there.tolist():
                assert memory.read(number) == expected[number]
            if begin:
                assert len(damaged) == 1, "the others are right"
            elif not turn % 2:
                assert len(damaged), "a changed header was taken"
            num_there += len(there)
            num_damaged += len(damaged)

    asyncio.run(run())
    assert min(num_there, num_damaged) > IN_PACKS // 8
