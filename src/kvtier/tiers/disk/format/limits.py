"""Limits of a slab's numbers. Nothing is made, read or reserved by a number beyond them.

A slab's files may have been damaged, or made to do harm: a checksum does not say who wrote it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.system.memory import available_bytes
from kvtier.tiers.disk.bounce import ALIGNMENT
from kvtier.tiers.disk.format.folder import DATA
from kvtier.tiers.disk.format.records import RECORD_BYTES
from kvtier.tiers.disk.format.superblock import Superblock

DELETE_OR_MOVE: Final = "delete the directory to start empty, or choose another path"

MAX_SLOTS: Final = 1 << 32
"""A record names its slot in 32 bits."""
MAX_BYTES: Final = (1 << 63) - 1
"""Largest size of a file."""
MAX_COUNT: Final = 1 << 62
"""Epochs, generations and steps are counted one by one, and never get this far: what follows still
fits into 64 bits."""
MAX_SEQUENCE: Final = (1 << 63) - (1 << 40)
"""Sequence numbers begin anew, higher, with every step of a set; after this many there is room."""

SURE_BYTES: Final = 256 << 20
"""Bytes of memory that may be allocated without checking how much is free."""
BYTES_PER_SLOT: Final = 128
"""Bytes of memory per slot of an open slab: its table, and the arrays made from it at start."""


def check_superblock(folder: Path, found: Superblock) -> None:
    """Raise ``ConfigError`` where the slab in ``folder`` can't be one, naming the number."""
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
    """Raise ``ConfigError`` where the journal counts further than any slab does."""
    if next_seq > MAX_SEQUENCE:
        raise _impossible(folder, "sequence number", next_seq - 1, f"not below {MAX_SEQUENCE}")


def _impossible(folder: Path, name: str, value: int, rule: str) -> ConfigError:
    return ConfigError(
        f"disk tier: the slab in {folder} can't be one: {name}: {value} is {rule}; {DELETE_OR_MOVE}"
    )


def check_room(num_slots: int, slot_bytes: int) -> None:
    """Raise ``ConfigError`` where a slab of that many slots is more than can be had."""
    if num_slots > MAX_SLOTS or num_slots * slot_bytes > MAX_BYTES:
        most = min(MAX_SLOTS, MAX_BYTES // slot_bytes)
        raise ConfigError(
            f"disk tier: {num_slots} slots of {slot_bytes} bytes are more than a slab can have "
            f"({most}); lower capacity_bytes"
        )


def check_memory(folder: Path, num_bytes: int, what: str) -> None:
    """Raise ``ConfigError`` where ``what`` takes more memory than is left."""
    if num_bytes <= SURE_BYTES:
        return
    left, limited_by = available_bytes()
    if num_bytes > left:
        raise ConfigError(
            f"disk tier: {what} of the slab in {folder} takes {num_bytes / 2**30:.1f} GiB of "
            f"memory, and {left / 2**30:.1f} GiB are left ({limited_by}); {DELETE_OR_MOVE}"
        )


def most_journal_bytes(num_slots: int) -> int:
    """Return the size that no journal exceeds.

    Compaction leaves an eighth of this; what could not be compacted for want of room has the rest.
    """
    return RECORD_BYTES * ((1 << 20) + 16 * num_slots)


def check_journal(folder: Path, num_bytes: int, num_slots: int) -> None:
    """Raise ``ConfigError`` where the journal of a slab of that many slots is too large."""
    most = most_journal_bytes(num_slots)
    if num_bytes > most:
        raise ConfigError(
            f"disk tier: the journal in {folder} has {num_bytes} bytes, and that of {num_slots} "
            f"slots never has more than {most}; {DELETE_OR_MOVE}"
        )


def as_far_as_data(folder: Path, found: Superblock) -> Superblock:
    """The slab with the slots that its file has room for.

    What was cut off, or was never there, is not made by whoever only repairs.
    """
    try:
        data_bytes = (folder / DATA).lstat().st_size
    except FileNotFoundError:
        data_bytes = 0
    num_slots = min(found.num_slots, max(1, data_bytes // found.slot_bytes))
    return dataclasses.replace(found, num_slots=num_slots)
