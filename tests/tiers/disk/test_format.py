"""The format on disk, byte by byte, and journals with any content."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.errors import ConfigError
from kvtier.plan import WriteBudget
from kvtier.tiers.disk.format.records import (
    RECORD,
    RecordKind,
    are_valid,
    as_keys,
    as_words,
    blank,
    seal,
)
from kvtier.tiers.disk.format.superblock import (
    DataMark,
    Membership,
    Superblock,
    decode,
    decode_both,
)
from kvtier.tiers.disk.format.trust import encode
from kvtier.tiers.disk.recovery import Recovery, newest
from kvtier.tiers.disk.slots import DiskSlots, in_order
from kvtier.tiers.storage import Outcome
from tests.tiers.disk.harness import harness, key, records_of

NUM_SLOTS = 5


def crc32c(data: bytes) -> int:
    """Compute CRC-32C bit by bit from its polynomial."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


# -- bytes -----------------------------------------------------------------------------------------


def test_record_of_version_1_is_these_bytes() -> None:
    record = blank(1, RecordKind.PUT)
    record["namespace"], record["seq"], record["slot"] = 0x0201, 0x0807060504030201, 0x04030201
    record["depth"], record["time"], record["data_crc"] = 7, 1_800_000_000, 0xDEADBEEF
    record["key"] = np.frombuffer(bytes(range(32)), "V32")
    seal(record)
    body = struct.pack(
        "<BBHQIIII", 2, 1, 0x0201, 0x0807060504030201, 0x04030201, 7, 1_800_000_000, 0xDEADBEEF
    ) + bytes(range(32))
    assert crc32c(b"123456789") == 0xE3069283
    assert record.tobytes() == struct.pack("<I", crc32c(body)) + body
    assert are_valid(record).tolist() == [True]


SUPERBLOCK = Superblock(
    slot_bytes=8192,
    block_bytes=5000,
    num_slots=77,
    rank=1,
    num_ranks=4,
    layout="0123456789abcdef",
    description='{"a":1}',
    slab_id=b"i" * 16,
    made_at=1_800_000_000,
    epoch=9,
    generation=3,
    journal_bytes=6400,
    is_clean=True,
    member=Membership(set_id=b"s" * 16, step=12, session=2**63 + 1, previous=5),
    data=DataMark(inode=1234, num_bytes=77 * 8192, mtime_ns=1_800_000_000_123_456_789),
)


def half(version: int, between: bytes) -> bytes:
    """4096 bytes; between: what is in front of the description."""
    body = struct.pack("<HHQQQQIIQQQ", version, 1, 9, 8192, 5000, 77, 1, 4, 3, 6400, 1_800_000_000)
    body += b"i" * 16 + b"0123456789abcdef".ljust(32, b"\0")
    body += between + struct.pack("<I", 7) + b'{"a":1}'
    body = body.ljust(4096 - 12, b"\0")
    return b"kvtslab\n" + struct.pack("<I", crc32c(body)) + body


def test_superblock_is_these_bytes() -> None:
    ours = struct.pack("<16sQQQ", b"s" * 16, 12, 2**63 + 1, 5)
    ours += struct.pack("<QQq", 1234, 77 * 8192, 1_800_000_000_123_456_789)
    encoded = half(2, ours)
    assert SUPERBLOCK.encode() == encoded
    assert decode(encoded) == SUPERBLOCK


def test_trust_is_these_bytes() -> None:
    bits = np.zeros(77, bool)
    bits[[0, 9, 76]] = True
    table = blank(77, RecordKind.PUT)
    table["slot"] = np.arange(77)
    table["kind"][9] = RecordKind.DEL
    seal(table)
    records = [0] * 77
    records[0], records[76] = int(table["crc"][0]), int(table["crc"][76])
    body = struct.pack("<16sQQI", b"i" * 16, 2**63 + 1, 77, crc32c(struct.pack("<77I", *records)))
    body += bytes([1, 2, 0, 0, 0, 0, 0, 0, 0, 0b00010000])
    assert encode(bits, table, SUPERBLOCK) == b"kvttrst2" + struct.pack("<I", crc32c(body)) + body


def test_newest_whole_superblock_counts() -> None:
    old, new = (
        Superblock(4096, 1, 1, 0, 1, "", "x" * 3000, b"i" * 16, 0, epoch=epoch).encode()
        for epoch in (3, 4)
    )
    torn = new[:512] + old[512:2048] + bytes(2048)
    for content, expected in (
        (new + old, (4, 2)),
        (old + new, (4, 2)),
        (torn + old, (3, 1)),
        (bytes(4096) + old, (3, 1)),
        (new[:4000], (None, 0)),
        (b"", (None, 0)),
    ):
        found, num_whole = decode_both(content)
        assert (found and found.epoch, num_whole) == expected


# -- replay ----------------------------------------------------------------------------------------

events = st.lists(
    st.tuples(
        st.sampled_from(
            [RecordKind.PUT, RecordKind.PUT, RecordKind.DEL, RecordKind.BAD, RecordKind.NAMESPACE]
        ),
        st.integers(0, NUM_SLOTS + 1),
        st.integers(0, 4),
        st.booleans(),
    ),
    max_size=40,
)


@given(events=events, seed=st.integers(0, 2**32), piece=st.integers(1, 7))
def test_recovery_is_the_last_record_of_each_slot(
    events: list[tuple[RecordKind, int, int, bool]], seed: int, piece: int
) -> None:
    """As in a dictionary, whatever the order of the records, however they are cut in pieces.

    Of equal sequence numbers the last record counts. Some of the records are damaged.
    """
    rng = np.random.default_rng(seed)
    records = np.concatenate([blank(0, RecordKind.PUT), *(blank(1, kind) for kind, *_ in events)])
    records["seq"] = rng.integers(0, 30, len(events))
    records["slot"] = [slot for _, slot, *_ in events]
    records["namespace"] = [name for _, _, name, _ in events]
    records["key"] = as_keys([key(name) for _, _, name, _ in events])
    records["time"], records["depth"] = rng.integers(0, 300, (2, len(events)))
    seal(records)
    records["depth"][[not right for *_, right in events]] ^= 1
    found = Recovery(NUM_SLOTS)
    for start in range(0, len(records), piece):
        found.add(records[start : start + piece])

    last: dict[int, int] = {}
    names: dict[int, bytes] = {}
    num_beyond = 0
    right = [at for at, event in enumerate(events) if event[3]]
    for at in sorted(right, key=lambda at: (int(records["seq"][at]), at)):
        if events[at][0] is RecordKind.NAMESPACE:
            continue
        if events[at][1] < NUM_SLOTS:
            last[events[at][1]] = at
        else:
            num_beyond += 1
    for at in right:
        if events[at][0] is RecordKind.NAMESPACE:
            names[events[at][2]] = key(events[at][2])
    table = np.zeros(NUM_SLOTS, RECORD)
    for slot, at in last.items():
        table[slot] = records[at]
    for field in ("kind", "seq", "crc", "data_crc"):
        assert (found.rows[field] == table[field]).all()
    puts = np.flatnonzero(table["kind"] == RecordKind.PUT)
    assert found.rows.keys[puts].tobytes() == table["key"][puts].tobytes()
    assert (found.num_records, found.num_invalid) == (len(right), len(events) - len(right))
    assert (found.num_beyond, found.namespaces) == (num_beyond, names)
    assert found.next_seq == 1 + max((int(records["seq"][at]) for at in right), default=0)

    words, seqs = as_words(found.rows.keys[puts]), found.rows.seqs(puts)
    by_key = {words[at].tobytes(): at for at in np.argsort(seqs, kind="stable").tolist()}
    assert sorted(newest(words, seqs)) == sorted(by_key.values())
    slots = DiskSlots(found.rows.kinds, puts, found.ages)
    slots.check_invariants()
    rows = table[puts]
    order = np.lexsort((-rows["depth"].astype(np.int64), rows["time"] // 60))
    ages = found.ages[slots.unclaimed()]
    assert (ages == found.ages[puts[order]]).all()


@given(
    st.lists(st.tuples(st.integers(0, 2**26), st.integers(0, 2**32 - 1)), max_size=30),
    st.sampled_from([1, 1000, 2**26]),
)
def test_blocks_leave_by_age_however_far_apart_they_are(
    blocks: list[tuple[int, int]], num_slots: int
) -> None:
    """Slots of few bits and of many use different sorts."""
    ages = np.array([step << 32 | height for step, height in blocks], np.uint64)
    slots = np.arange(len(blocks)) * num_slots
    expected = [slot for _, slot in sorted(zip(ages.tolist(), slots.tolist(), strict=True))]
    assert in_order(slots, ages).tolist() == expected


def test_keys_that_agree_in_eight_bytes_are_two_blocks() -> None:
    keys = as_keys([b"12345678" + bytes([last]) * 24 for last in (3, 1, 2, 1)])
    assert sorted(newest(as_words(keys), np.array([5, 6, 7, 4]))) == [0, 1, 2]


@given(st.binary(max_size=1000))
def test_any_bytes_can_be_recovered(content: bytes) -> None:
    records = np.frombuffer(content[: len(content) // 64 * 64], RECORD)
    found = Recovery(NUM_SLOTS)
    found.add(records)
    assert found.num_invalid + found.num_records == len(records)


def test_more_namespaces_than_numbers_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.disk.slab.MAX_NAMESPACES", 3)
    with harness(tmp_path, 8) as here:
        slots = here.allocate(6)
        for number, slot in enumerate(slots):
            assert here.store([key(number)], [slot], namespace=bytes([number]) * 32) == [True]
        assert records_of(here.options.path, 8)["namespace"][slots].tolist() == [1, 2, 3, 0, 0, 0]
        here.reopen()
        assert here.get(*range(6)) == [Outcome.THERE] * 6


# -- endurance -------------------------------------------------------------------------------------


@given(
    wanted=st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 3000)), max_size=60),
    per_day=st.integers(1, 10**6),
    burst=st.integers(1, 10**5),
)
def test_budget_is_kept_over_any_time(
    wanted: list[tuple[int, int]], per_day: int, burst: int
) -> None:
    now = 0.0
    budget = WriteBudget(per_day, burst, clock=lambda: now)
    written = 0
    largest = 0
    for pause, num_bytes in wanted:
        now += pause
        had = budget.left_bytes
        assert budget.allows == (had >= 1)
        assert budget.share_left == max(0.0, had) / burst
        if budget.allows:
            budget.spend(num_bytes)
            written += num_bytes
            largest = max(largest, num_bytes)
        assert written <= burst + largest + now * per_day / 86400 + 1e-6 * written + 1e-6


def test_no_budget_is_no_limit() -> None:
    budget = WriteBudget(0)
    budget.spend(1 << 60)
    assert budget.allows
    assert budget.share_left == 1.0
    assert budget.left_bytes > 1 << 60


def test_budget_that_can_not_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1 bytes per day"):
        WriteBudget(-1)


def test_budget_earns_an_hour_at_most() -> None:
    now = 0.0
    budget = WriteBudget(24_000, clock=lambda: now)
    budget.spend(1000)
    assert not budget.allows
    now += 100 * 86400
    assert budget.left_bytes == 1000
