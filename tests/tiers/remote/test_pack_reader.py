"""Blocks from parts of a pack that arrive in any order."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvtier.testing.storage_user import stored_bytes, stored_key
from kvtier.tiers.remote.bucket import pack_reader
from kvtier.tiers.remote.bucket.catalogue import Catalogue, PackLocation
from kvtier.tiers.remote.bucket.manifests import Pack
from kvtier.tiers.remote.bucket.pack_reader import PackPart, PackRequest
from kvtier.tiers.remote.bucket.packs import pack_name
from kvtier.tiers.remote.envelope import as_keys
from tests.tiers.remote.bucket import OnePack

BLOCK_BYTES, KEYS = OnePack.BLOCK_BYTES, OnePack.KEYS


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_parts_that_come_before_their_header_are_judged_by_it(
    is_spoiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_reader, "PART_BYTES", 3 * BLOCK_BYTES)
    store = OnePack()
    store.content = (
        store.content[:100] + bytes([store.content[100] ^ is_spoiled]) + store.content[101:]
    )
    reader, memory = store.reader(), store.memory
    keys = as_keys(KEYS)
    every = np.arange(len(KEYS))
    parts = reader.parts([PackLocation(pack_name(keys), len(KEYS), every, every)])
    assert len(parts) == -(-len(KEYS) // 3)

    async def take(asked: PackRequest, part: PackPart) -> tuple[list[int], list[int]]:
        content = await reader.read(asked, part)
        there, damaged = reader.take(asked, part, content, keys, memory.pieces)
        return sorted(there.tolist()), sorted(damaged.tolist())

    async def run() -> None:
        first, second, *others = parts
        for other in others:
            assert await take(*other) == ([], [])
        for part, expected in ((first, [0, 1, 2, 6, 7]), (second, [3, 4, 5])):
            assert await take(*part) == (([], expected) if is_spoiled else (expected, []))

    asyncio.run(run())
    for number, key in enumerate(() if is_spoiled else KEYS):
        assert memory.read(number) == stored_bytes(key, BLOCK_BYTES)


def test_damaged_block_is_told_of_by_itself_whatever_the_order_of_the_call() -> None:
    store = OnePack()
    content, shape, memory = bytearray(store.content), store.shape, store.memory
    for at in (2, 5):
        content[shape.offset(len(KEYS), at) + 7] ^= 1
    store.content = bytes(content)
    reader = store.reader()
    catalogue = Catalogue(len(KEYS))
    catalogue.add([Pack(1, as_keys(KEYS))])
    order = [6, 2, 0, 9, 7, 2, 5, 1]  # one twice, one that is not stored
    keys = as_keys([stored_key(number) for number in order])
    ((asked, part),) = reader.parts(catalogue.places(keys))
    found = asyncio.run(reader.read(asked, part))
    there, damaged = reader.take(asked, part, found, keys, memory.pieces)
    assert sorted(there.tolist()) == [0, 2, 4, 7]
    assert sorted(damaged.tolist()) == [1, 5, 6]
    for number, block in enumerate(order):
        if number in there:
            assert memory.read(number) == stored_bytes(stored_key(block), BLOCK_BYTES)
        elif number not in damaged:
            assert memory.is_untouched(number)
