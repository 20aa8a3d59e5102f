"""Limits of the numbers in a slab's files, checked before anything is allocated or read by them.

The files may be damaged or malicious: a checksum does not authenticate its author.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from kvtier.core.errors import ConfigError
from kvtier.core.system.memory import available_bytes
from kvtier.tiers.disk.bounce import ALIGNMENT
from kvtier.tiers.disk.format.folder import DATA
from kvtier.tiers.disk.format.records import RECORD_BYTES
from kvtier.tiers.disk.format.superblock import Superblock

DELETE_OR_MOVE: Final = "delete the directory to start empty, or choose another path"

MAX_SLOTS: Final = 1 << 32
"""Maximum number of slots: a record names its slot in 32 bits."""
MAX_BYTES: Final = (1 << 63) - 1
"""Largest size of a file."""
MAX_COUNT: Final = 1 << 62
"""Limit of epochs, generations and steps. They are counted one by one, so they never reach it, and
later numbers still fit into 64 bits."""
MAX_SEQUENCE: Final = (1 << 63) - (1 << 40)
"""Largest sequence number. They jump to a higher range with every step of a set, so this limit
leaves room for later ones."""

SURE_BYTES: Final = 256 << 20
"""Bytes of memory that may be allocated without checking how much is free."""
BYTES_PER_SLOT: Final = 128
"""Bytes of memory per slot of an open slab: its table, and arrays derived from it at start."""


def check_superblock(folder: Path, found: Superblock) -> None:
    """Raise ``ConfigError`` if a number in the superblock is impossible, and name it."""
    slot_bytes = -(-found.block_bytes // ALIGNMENT) * ALIGNMENT
    for is_right, name, value, rule in (
        (found.block_bytes > 0, "bytes per block", found.block_bytes, "not above 0"),
        (
            found.slot_bytes == slot_bytes,
            "bytes per slot",
            found.slot_bytes,
            f"not those of a block, rounded up to {ALIGNMENT}: {slot_bytes}",
        ),
        (0 < found.num_slots <= MAX_SLOTS, "slots", found.num_slots, f"not in 1 .. {MAX_SLOTS}"),
        (
            found.num_slots * found.slot_bytes <= MAX_BYTES,
            "bytes in all slots",
            found.num_slots * found.slot_bytes,
            f"above {MAX_BYTES}",
        ),
        (found.num_ranks > 0, "ranks", found.num_ranks, "not above 0"),
        (found.rank < found.num_ranks, "rank", found.rank, f"not below {found.num_ranks}"),
        (found.epoch < MAX_COUNT, "epoch", found.epoch, f"not below {MAX_COUNT}"),
        (found.generation < MAX_COUNT, "generation", found.generation, f"not below {MAX_COUNT}"),
        (found.member.step < MAX_COUNT, "step", found.member.step, f"not below {MAX_COUNT}"),
    ):
        if not is_right:
            raise _impossible(folder, name, value, rule)


def check_sequence(folder: Path, next_seq: int) -> None:
    """Raise ``ConfigError`` if a sequence number in the journal is impossibly high."""
    if next_seq > MAX_SEQUENCE:
        raise _impossible(folder, "sequence number", next_seq - 1, f"not below {MAX_SEQUENCE}")


def _impossible(folder: Path, name: str, value: int, rule: str) -> ConfigError:
    return ConfigError(
        f"disk tier: the slab in {folder} is invalid: {name}: {value} is {rule}; {DELETE_OR_MOVE}"
    )


def check_room(num_slots: int, slot_bytes: int) -> None:
    """Raise ``ConfigError`` if a slab of this size is impossible."""
    if num_slots > MAX_SLOTS or num_slots * slot_bytes > MAX_BYTES:
        most = min(MAX_SLOTS, MAX_BYTES // slot_bytes)
        raise ConfigError(
            f"disk tier: {num_slots} slots of {slot_bytes} bytes are more than a slab can have "
            f"({most}); lower disk_capacity"
        )


def check_memory(folder: Path, num_bytes: int, what: str) -> None:
    """Raise ``ConfigError`` if ``what`` needs more memory than is available."""
    if num_bytes <= SURE_BYTES:
        return
    left, limited_by = available_bytes()
    if num_bytes > left:
        raise ConfigError(
            f"disk tier: {what} of the slab in {folder} takes {num_bytes / 2**30:.1f} GiB of "
            f"memory, and {left / 2**30:.1f} GiB are left ({limited_by}); {DELETE_OR_MOVE}"
        )


def most_journal_bytes(num_slots: int) -> int:
    """Return the size in bytes that no journal exceeds.

    A journal that is compacted on time has at most an eighth of this. The rest is for journals that
    could not be compacted because the disk was full.
    """
    return RECORD_BYTES * ((1 << 20) + 16 * num_slots)


def check_journal(folder: Path, num_bytes: int, num_slots: int) -> None:
    """Raise ``ConfigError`` if the journal is too large for a slab of ``num_slots`` slots."""
    most = most_journal_bytes(num_slots)
    if num_bytes > most:
        raise ConfigError(
            f"disk tier: the journal in {folder} has {num_bytes} bytes, but that of {num_slots} "
            f"slots has at most {most}; {DELETE_OR_MOVE}"
        )


def as_far_as_data(folder: Path, found: Superblock) -> Superblock:
    """Return the superblock with only the slots that the data file has room for.

    A repair does not extend the file.
    """
    try:
        data_bytes = (folder / DATA).lstat().st_size
    except FileNotFoundError:
        data_bytes = 0
    num_slots = min(found.num_slots, max(1, data_bytes // found.slot_bytes))
    return dataclasses.replace(found, num_slots=num_slots)
