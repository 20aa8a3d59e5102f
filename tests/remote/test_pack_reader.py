"""Blocks out of parts of a pack, in whatever order they come."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.testing.storage_user import Scattered, cuts, stored_bytes, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.remote import reading
from kvtier.tiers.remote.catalogue import Place, as_keys
from kvtier.tiers.remote.envelope import Envelope
from kvtier.tiers.remote.pack_reader import Asked, PackReader
from kvtier.tiers.remote.packs import PackShape, pack_name
from kvtier.tiers.remote.reading import Part
from tests.remote.bucket import OnePack

THERE, ABSENT, DAMAGED, FAILED = Outcome
BLOCK_BYTES = 256
KEYS = [stored_key(number) for number in range(8)]


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_parts_that_come_before_their_header_are_judged_by_it(
    is_spoiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PART_BYTES", 3 * BLOCK_BYTES)
    envelope, shape = Envelope(BLOCK_BYTES), PackShape(BLOCK_BYTES, 1 << 20)
    memory = Scattered(len(KEYS), cuts(BLOCK_BYTES)["unequal pieces"])
    for number, key in enumerate(KEYS):
        memory.write(number, stored_bytes(key, BLOCK_BYTES))
    content = bytearray(shape.build(KEYS, memory.pieces, envelope))
    content[100] ^= is_spoiled
    memory.clear()
    reader = PackReader(OnePack(bytes(content)), shape, envelope)  # type: ignore[arg-type]
    name = pack_name(as_keys(KEYS))
    parts = reader.parts([Place(name, len(KEYS), number) for number in range(len(KEYS))])
    assert len(parts) == -(-len(KEYS) // 3)

    async def take(asked: Asked, part: Part) -> dict[int, Outcome]:
        return reader.take(asked, part, await reader.read(asked, part), KEYS, memory.pieces)

    async def run() -> None:
        first, second, *others = parts
        for each in others:
            assert await take(*each) == {}
        told = DAMAGED if is_spoiled else THERE
        told_first = {number: told for number in range(len(KEYS)) if number not in (3, 4, 5)}
        assert await take(*first) == told_first
        assert await take(*second) == dict.fromkeys((3, 4, 5), told)

    asyncio.run(run())
    for number, key in enumerate(KEYS):
        assert is_spoiled != (memory.read(number) == stored_bytes(key, BLOCK_BYTES))
