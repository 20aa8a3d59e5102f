"""Random single changes of a slab's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from kvtier.tiers.disk.format.records import RECORD, RECORD_BYTES, Records, seal
from kvtier.tiers.disk.format.superblock import HALF_BYTES, decode
from tests.tiers.disk.forging import FIELDS, put_field

Files = dict[str, bytearray]
"""Content by name. A slab of a set has its rank in front: ``0/journal``."""

EXTREMES = [
    number + step
    for power in (0, 1, 7, 8, 12, 15, 16, 20, 28, 30, 31, 32, 40, 47, 48, 61, 62, 63, 64)
    for step in (-1, 0, 1)
    if (number := 1 << power) + step >= 0
]
MAX_DATA, MAX_JOURNAL = 1 << 30, 1 << 40
"""Bytes that files are extended to, by holes."""


@dataclass(slots=True)
class Damage:
    """A change that was made to the files.

    sizes: final size of each file that ends in a hole, or is cut short.

    is_plain: a checksum, a size or a modification time shows the damage. Other damage could look
    like a slab that was closed in order.
    """

    files: Files
    others: Sequence[Files]
    sizes: dict[str, int]
    is_plain: bool = True

    def pick(self, rng: Random, ending: str = "") -> str:
        """Return the name of a file that is not empty and ends with ``ending``."""
        names = [name for name, content in self.files.items() if content and name.endswith(ending)]
        if not names:
            return ""
        return rng.choice(names)


def mutate(rng: Random, files: Files, others: Sequence[Files]) -> Damage:
    """Make one to three random changes to ``files``. others: the same slabs at other times."""
    damage = Damage(files, others, {})
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        rng.choice(MUTATIONS)(rng, damage)
    return damage


# -- bytes -----------------------------------------------------------------------------------------


def flip_bits(rng: Random, damage: Damage) -> None:
    content = damage.files.get(damage.pick(rng))
    for _ in range(rng.choice((1, 1, 2, 8))):
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def blank_sector(rng: Random, damage: Damage) -> None:
    """Overwrite some aligned bytes with zeros, ones or noise."""
    if content := damage.files.get(damage.pick(rng)):
        size = rng.choice((RECORD_BYTES, 512, 4096))
        start = rng.randrange(len(content)) // size * size
        end = min(start + size, len(content))
        fill = rng.choice((b"\0", b"\xff", None))
        content[start:end] = rng.randbytes(end - start) if fill is None else fill * (end - start)


def swap_sectors(rng: Random, damage: Damage) -> None:
    """Swap two ranges of a file, or of two files."""
    first = damage.pick(rng)
    second = first if rng.random() < 0.7 else damage.pick(rng)
    if not first:
        return
    damage.is_plain &= first == second
    size = rng.choice((RECORD_BYTES, 512, 4096))
    a, b = (
        rng.randrange(max(1, len(damage.files[name]) // size)) * size for name in (first, second)
    )
    left, right = damage.files[first][a : a + size], damage.files[second][b : b + size]
    if len(left) == len(right):
        damage.files[first][a : a + size], damage.files[second][b : b + size] = right, left


def copy_sector(rng: Random, damage: Damage) -> None:
    """Copy a range over another one of the file, whose content is lost without a trace."""
    damage.is_plain = False
    if content := damage.files.get(damage.pick(rng)):
        size = rng.choice((RECORD_BYTES, 512, 4096))
        a, b = (rng.randrange(max(1, len(content) // size)) * size for _ in range(2))
        content[a : a + size] = content[b : b + size]


def cut(rng: Random, damage: Damage) -> None:
    if name := damage.pick(rng):
        del damage.files[name][rng.randrange(len(damage.files[name])) :]


def extend(rng: Random, damage: Damage) -> None:
    """Extend a file by noise, by zeros, by its own end, or by a hole."""
    name = damage.pick(rng)
    if not name:
        return
    content = damage.files[name]
    match rng.randrange(4):
        case 0:
            content += rng.randbytes(rng.randrange(1, 9000))
        case 1:
            content += bytes(rng.randrange(1, 9000))
        case 2:
            damage.is_plain = False
            content += content[rng.randrange(len(content)) :]
        case _:
            most = MAX_DATA if name.endswith("data.slab") else MAX_JOURNAL
            damage.sizes[name] = rng.choice((1 << 20, most, rng.randrange(len(content), most)))


def remove(rng: Random, damage: Damage) -> None:
    damage.files.pop(damage.pick(rng), None)


# -- of other times and places ---------------------------------------------------------------------


def splice(rng: Random, damage: Damage) -> None:
    """Replace a file, or a part of it, by its content at another time."""
    damage.is_plain = False
    name, other = damage.pick(rng), rng.choice(damage.others)
    if name not in other:
        return
    content = damage.files[name]
    if rng.random() < 0.5:
        content[:] = other[name]
    else:
        start = rng.randrange(len(content)) // 512 * 512
        end = start + 512 * rng.randrange(1, 9)
        content[start:end] = other[name][start:end]


def mix_up(rng: Random, damage: Damage) -> None:
    """Exchange two files of one name between the slabs of a set."""
    damage.is_plain = False
    first = damage.pick(rng)
    second = f"{1 - int(first[0])}{first[1:]}" if first else ""
    if second in damage.files:
        files = damage.files
        files[first], files[second] = files[second], files[first]


# -- forged: every checksum is right ---------------------------------------------------------------


def forge_superblock(rng: Random, damage: Damage) -> None:
    damage.is_plain = False
    content = damage.files.get(damage.pick(rng, "superblock"))
    if not content or len(content) != 2 * HALF_BYTES:
        return
    name = rng.choice(list(FIELDS))
    number, text = rng.choice(EXTREMES), rng.randbytes(3000)
    for start in rng.choice(((0,), (HALF_BYTES,), (0, HALF_BYTES))):
        half = content[start : start + HALF_BYTES]
        form = FIELDS[name][1]
        if form.endswith("s"):
            size = int(form[:-1])
            texts = (b"[" * 3000, b"\x1b[2J", b"\xff" * 32, text, bytes(size))
            put_field(half, name, rng.choice(texts)[:size])
        else:
            most = (1 << {"H": 16, "I": 32, "Q": 64}[form[-1]]) - 1
            put_field(half, name, min(number, most))
        content[start : start + HALF_BYTES] = half


def forge_records(rng: Random, damage: Damage) -> None:
    """Change fields of some records.

    No record gets the key of another block. A record that names the wrong block, with the right
    checksum of its bytes, cannot be detected.
    """
    name, records = _records(rng, damage)
    for _ in range(rng.choice((1, 1, 3)) if len(records) else 0):
        record = records[rng.randrange(len(records))]
        field = rng.choice([name for name in RECORD.names or () if name != "crc"])
        if field == "key":
            record[field] = rng.choice((bytes(32), b"\xff" * 32, rng.randbytes(32)))
        else:
            most = int(np.iinfo(RECORD[field]).max)
            near = (int(record[field]) + rng.choice((-1, 1, 2))) % (most + 1)
            record[field] = rng.choice((near, min(rng.choice(EXTREMES), most)))
    _put_records(damage, name, records)


def replay_records(rng: Random, damage: Damage) -> None:
    """Insert old records, of this journal or of one from another time, once more.

    They are put in front, at the end or between others, with their own sequence numbers or the
    newest.
    """
    name, records = _records(rng, damage)
    if not len(records):
        return
    times = [other[name] for other in damage.others if other.get(name)]
    source = _whole_records(rng.choice(times)) if times else records
    start = rng.randrange(len(source))
    again = source[start : start + rng.randrange(1, 6)].copy()
    if rng.random() < 0.7:
        newest = int(records["seq"].max())
        again["seq"] = [(newest + 1 + at) % 2**64 for at in range(len(again))]
    at = rng.choice((0, 1, len(records), rng.randrange(len(records))))
    _put_records(damage, name, np.concatenate([records[:at], again, records[at:]]))


def shuffle_records(rng: Random, damage: Damage) -> None:
    """Change the order of records, or drop some of them."""
    name, records = _records(rng, damage)
    if len(records):
        order = rng.sample(range(len(records)), rng.randrange(1, len(records) + 1))
        _put_records(damage, name, records[order if rng.random() < 0.5 else sorted(order)])


def _records(rng: Random, damage: Damage) -> tuple[str, Records]:
    """Return a journal's name and its records, writable; empty if there are none."""
    damage.is_plain = False
    name = damage.pick(rng, "journal")
    return name, _whole_records(damage.files.get(name, b""))


def _whole_records(content: bytes | bytearray) -> Records:
    return np.frombuffer(
        bytes(content[: len(content) // RECORD_BYTES * RECORD_BYTES]), RECORD
    ).copy()


def _put_records(damage: Damage, name: str, records: Records) -> None:
    if len(records):
        records = records.copy()
        seal(records)
        damage.files[name][:] = records.tobytes()


MUTATIONS: list[Callable[[Random, Damage], None]] = [
    flip_bits,
    blank_sector,
    swap_sectors,
    copy_sector,
    cut,
    extend,
    remove,
    splice,
    mix_up,
    forge_superblock,
    forge_superblock,
    forge_records,
    forge_records,
    replay_records,
    replay_records,
    shuffle_records,
]


def not_closed(files: Files) -> None:
    """Clear the flag of a clean close in every superblock, as after a crash."""
    for name, content in files.items():
        if name.endswith("superblock"):
            for start in (0, HALF_BYTES):
                half = content[start : start + HALF_BYTES]
                if (found := decode(bytes(half))) is not None and found.is_clean:
                    put_field(half, "flags", 0)
                    content[start : start + HALF_BYTES] = half
