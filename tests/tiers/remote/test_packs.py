"""Formats of packs and manifests, and the catalogue, against plain models."""

from __future__ import annotations

import platform
import random
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.testing.storage_user import Scattered, cuts, stored_bytes, stored_key
from kvtier.tiers.remote.bucket.catalogue import Catalogue
from kvtier.tiers.remote.bucket.manifests import Manifest, Pack, Tombstone
from kvtier.tiers.remote.bucket.pack_reader import GAP_BYTES, PART_BYTES, parts_of
from kvtier.tiers.remote.bucket.packs import PackShape, pack_name, pack_path
from kvtier.tiers.remote.envelope import Envelope, as_keys

BLOCK_BYTES = 1000
SHAPE = PackShape(BLOCK_BYTES, 16 << 20)


def pack(stamp: int, *numbers: int) -> Pack:
    return Pack(stamp, as_keys([stored_key(number) for number in numbers]))


# -- packs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 7, 40])
@pytest.mark.parametrize("sizes", list(cuts(BLOCK_BYTES).values()))
def test_pack_has_its_blocks_behind_its_header(num_blocks: int, sizes: list[int]) -> None:
    keys = [stored_key(number) for number in range(num_blocks)]
    memory = Scattered(num_blocks, sizes)
    for at, key in enumerate(keys):
        memory.write(at, stored_bytes(key, BLOCK_BYTES))
    envelope = Envelope(BLOCK_BYTES, b"secret")
    made, _ = SHAPE.build(keys, memory.pieces, envelope)
    assert len(made) == SHAPE.offset(num_blocks, num_blocks)
    assert SHAPE.header_bytes(num_blocks) % 4096 == 0
    headers = SHAPE.read_header(made[: SHAPE.header_bytes(num_blocks)], num_blocks)
    assert headers is not None
    assert all(envelope.are_of([header.tobytes() for header in headers], keys))
    for at, key in enumerate(keys):
        begin = SHAPE.offset(num_blocks, at)
        assert made[begin : begin + BLOCK_BYTES].tobytes() == stored_bytes(key, BLOCK_BYTES)
    again, _ = SHAPE.build(keys, memory.pieces, envelope)
    assert (made == again).all(), "whoever writes these blocks writes these bytes"


def test_no_flipped_bit_in_a_header_is_overlooked() -> None:
    memory = Scattered(2, [BLOCK_BYTES])
    made, _ = SHAPE.build([stored_key(0), stored_key(1)], memory.pieces, Envelope(BLOCK_BYTES))
    header = made[: SHAPE.header_bytes(2)]
    assert SHAPE.read_header(header, 2) is not None
    assert SHAPE.read_header(header, 1) is None
    assert SHAPE.read_header(header[:-1], 2) is None
    assert PackShape(BLOCK_BYTES + 1, 1 << 20).read_header(header, 2) is None
    for at in range(len(header)):
        header[at] ^= 1 << at % 8
        assert SHAPE.read_header(header, 2) is None
        header[at] ^= 1 << at % 8


def test_pack_is_called_by_its_last_key_and_all_of_them() -> None:
    keys = [stored_key(0), stored_key(1)]
    name = pack_name(as_keys(keys))
    assert pack_path(name).startswith(f"packs/{keys[1].hex()[:2]}/{keys[1].hex()}-")
    assert name != pack_name(as_keys(keys[1:]))
    assert name != pack_name(as_keys([stored_key(2), keys[1]]))


# -- parts of a pack -------------------------------------------------------------------------------


@given(
    num_blocks=st.integers(1, 40),
    block_bytes=st.sampled_from([700, GAP_BYTES // 3, GAP_BYTES + 5, PART_BYTES + 3]),
    seed=st.integers(0, 1 << 30),
    with_header=st.booleans(),
)
def test_parts_have_what_is_wanted_and_little_else(
    num_blocks: int, block_bytes: int, seed: int, with_header: bool
) -> None:
    place = random.Random(seed)
    wanted = sorted(place.sample(range(num_blocks), place.randint(1, num_blocks)))
    shape = PackShape(block_bytes, 16 << 20)
    parts = parts_of(shape.offsets(num_blocks), np.array(wanted), with_header)
    assert [at for part in parts for at in wanted[part.wanted]] == wanted, "each in one part"
    assert all(one.end <= two.start for one, two in pairwise(parts))
    header_bytes = shape.header_bytes(num_blocks)
    assert (parts[0].start == 0) == with_header
    assert parts[0].end >= header_bytes
    num_in_vain = 0
    for part in parts:
        blocks = wanted[part.wanted]
        for at in blocks:
            assert part.start <= shape.offset(num_blocks, at)
            assert shape.offset(num_blocks, at + 1) <= part.end
        num_header = header_bytes if part.start == 0 else 0
        assert len(blocks) <= 1 or part.end - part.start <= num_header + GAP_BYTES + PART_BYTES
        num_in_vain += part.end - part.start - len(blocks) * block_bytes - num_header
    assert 0 <= num_in_vain <= GAP_BYTES * (len(wanted) + with_header)


ANSWERS_COME_AND_GO = """
import resource, sys
from kvtier.tiers.remote.bucket.pack_reader import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    answers = [bytearray(17 << 20) for _ in range(3)]
    del answers
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's malloc")
def test_answers_come_into_memory_of_those_before_them() -> None:
    """Count the page faults of the last three answers."""

    def faults(*arguments: str) -> int:
        command = [sys.executable, "-c", ANSWERS_COME_AND_GO, *arguments]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    assert faults("keep") < 100 < faults()


# -- manifests -------------------------------------------------------------------------------------


def test_manifest_comes_back() -> None:
    tombstones = [Tombstone(7, stored_key(9)), Tombstone(2**64 - 1, stored_key(8))]
    written = Manifest(BLOCK_BYTES, [pack(5, 0, 1, 2), pack(6, 3)], tombstones)
    read = Manifest.from_bytes(written.to_bytes())
    assert read is not None
    assert (read.block_bytes, read.tombstones, read.newest) == (BLOCK_BYTES, tombstones, 2**64 - 1)
    assert [each.stamp for each in read.packs] == [5, 6]
    assert [each.keys.tobytes() for each in read.packs] == [
        each.keys.tobytes() for each in written.packs
    ]
    empty = Manifest.from_bytes(Manifest(1).to_bytes())
    assert empty is not None
    assert (empty.packs, empty.tombstones, empty.newest) == ([], [], 0)


def test_no_flipped_bit_in_a_manifest_is_overlooked() -> None:
    content = Manifest(BLOCK_BYTES, [pack(5, 0, 1)], [Tombstone(7, stored_key(9))]).to_bytes()
    for at in range(8 * len(content)):
        spoiled = bytearray(content)
        spoiled[at // 8] ^= 1 << at % 8
        assert Manifest.from_bytes(bytes(spoiled)) is None
    for end in range(len(content)):
        assert Manifest.from_bytes(content[:end]) is None
    assert Manifest.from_bytes(content + b"\0") is None


@given(st.binary(max_size=200))
def test_anything_is_no_manifest(content: bytes) -> None:
    assert Manifest.from_bytes(content) is None


# -- the catalogue ---------------------------------------------------------------------------------


@given(seed=st.integers(0, 1 << 30))
def test_catalogue_agrees_with_a_dictionary(seed: int) -> None:
    """known: number to (stamp, pack, place).

    What the catalogue has is some of it, and all of it while there is room.
    """
    place = random.Random(seed)
    capacity = place.choice([1, 5, 200])
    catalogue, known, deleted = Catalogue(capacity), {}, {}
    was_full = False
    for _ in range(30):
        numbers = place.sample(range(30), place.randint(1, 8))
        match place.randrange(4):
            case 0 | 1:
                half = max(1, len(numbers) // 2)
                packs = [
                    pack(catalogue.next_stamp(place.randrange(50)), *some)
                    for some in (numbers[:half], numbers[half:])
                    if some
                ]
                catalogue.add(packs)
                for each, some in zip(packs, (numbers[:half], numbers[half:]), strict=False):
                    for at, number in enumerate(some):
                        if number not in known or was_full:
                            known[number] = (each.stamp, pack_name(each.keys), at, len(some))
            case 2:
                catalogue.forget([stored_key(number) for number in numbers])
                for number in numbers:
                    known.pop(number, None)
            case 3:
                stamp = catalogue.next_stamp(0)
                catalogue.apply_tombstones(
                    [Tombstone(stamp, stored_key(number)) for number in numbers]
                )
                for number in numbers:
                    deleted[number] = stamp
                    known.pop(number, None)
        was_full |= len(known) > capacity
        catalogue.check_invariants()
        assert len(catalogue) <= capacity
        keys = [stored_key(number) for number in range(30)]
        found = {}
        for found_at in catalogue.places(as_keys(keys)):
            assert (np.diff(found_at.at) > 0).all(), "not in the order of the pack"
            for number, at in zip(found_at.numbers.tolist(), found_at.at.tolist(), strict=True):
                found[number] = (found_at.pack, at, found_at.num_blocks)
        assert catalogue.have(keys) == [number in found for number in range(30)]
        assert found.keys() <= known.keys()
        if not was_full:
            assert found == {number: told[1:] for number, told in known.items()}


def test_older_pack_does_not_bring_a_deleted_block_back() -> None:
    catalogue = Catalogue(10)
    catalogue.apply_tombstones([Tombstone(5, stored_key(0))])
    catalogue.add([pack(5, 0, 1), pack(4, 2)])
    assert catalogue.have([stored_key(0), stored_key(1), stored_key(2)]) == [False, True, True]
    catalogue.add([pack(6, 0)])
    assert catalogue.have([stored_key(0)]) == [True]


def test_pack_is_empty_when_all_its_blocks_were_deleted() -> None:
    catalogue = Catalogue(10)
    both, single = pack(1, 0, 1), pack(2, 2)
    catalogue.add([both, single])
    assert catalogue.apply_tombstones(
        [Tombstone(3, stored_key(0)), Tombstone(3, stored_key(2))]
    ) == [pack_name(single.keys)]
    assert catalogue.apply_tombstones([Tombstone(4, stored_key(1))]) == [pack_name(both.keys)]
    catalogue.add([pack(5, 0, 1)])
    catalogue.forget([stored_key(0)])
    assert catalogue.apply_tombstones([Tombstone(6, stored_key(1))]) == [], (
        "who knows about the other one"
    )
