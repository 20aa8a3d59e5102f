"""Slabs of many blocks, as a killed process leaves them. Their data files are sparse."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Memory
from kvtier.layout import DType, full_attention
from kvtier.tiers.disk import DiskOptions, DiskSystem, DiskTier, IoKind
from kvtier.tiers.disk.format.records import RecordKind, Records, blank, header, seal
from kvtier.tiers.disk.format.superblock import HALF_BYTES, decode_both

GROUP = full_attention(2, 2, 64, DType.FLOAT16, 4)
"""4 KiB per block."""
PIECE = 1 << 18


class SparseDisk(DiskSystem):
    """A disk system that does not reserve space."""

    def reserve(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def reserve_ahead(self, fd: int, num_bytes: int) -> None:
        return


Keys = Callable[[int, int, np.random.Generator], npt.NDArray[np.void]]
"""Return the keys of blocks ``start`` to ``end``, dtype V32."""


def random_keys(start: int, end: int, rng: np.random.Generator) -> npt.NDArray[np.void]:
    """Return random keys."""
    return np.frombuffer(rng.bytes(32 * (end - start)), "V32")


def pieces(num_blocks: int, num_dead: int, keys: Keys) -> Iterator[Records]:
    """Yield ``num_dead`` records that later ones replace, then a PUT per slot in random order.

    The first half of the dead ones are deletions.
    """
    rng = np.random.default_rng(0)
    slots = rng.permutation(num_blocks)
    for start in (*range(-num_dead, 0, PIECE), *range(0, num_blocks, PIECE)):
        end = min(start + PIECE, 0 if start < 0 else num_blocks)
        records = blank(end - start, RecordKind.PUT)
        numbers = np.arange(start, end)
        records["kind"][numbers < -num_dead // 2] = RecordKind.DEL
        records["slot"] = slots[numbers] if start >= 0 else numbers % num_blocks
        records["seq"] = numbers + num_dead + 1
        records["depth"] = rng.integers(0, 2000, end - start)
        records["time"] = 1_790_000_000 + numbers * (10**7 // num_blocks)
        records["key"] = keys(start, end, rng)
        seal(records)
        yield records


def write_slab(
    folder: Path, num_blocks: int, num_dead: int = 0, keys: Keys = random_keys
) -> DiskOptions:
    """Write a slab of ``num_blocks`` slots, all of them full."""
    options = DiskOptions(folder, num_blocks * GROUP.bytes_per_block, io=IoKind.PREADV)
    open_tier(options).close()
    current, _ = decode_both((folder / "superblock").read_bytes())
    assert current is not None, "the slab was made just now"
    first = header(current.slab_id, current.generation)
    seal(first)
    with (folder / "journal").open("wb") as journal:
        journal.write(first.tobytes())
        for records in pieces(num_blocks, num_dead, keys):
            journal.write(records.tobytes())
    dirty = dataclasses.replace(current, is_clean=False, epoch=current.epoch + 1)
    with (folder / "superblock").open("r+b") as file:
        file.seek(dirty.epoch % 2 * HALF_BYTES)
        file.write(dirty.encode())
    return options


def open_tier(options: DiskOptions) -> DiskTier:
    """Open the tier as a server does."""
    arena = np.zeros(1 << 16, np.uint8)
    memory = Memory(arena.ctypes.data, arena.nbytes, "host", arena)
    return DiskTier(options, GROUP, memory, SparseDisk())


@contextmanager
def abandoned(options: DiskOptions) -> Iterator[DiskTier]:
    """Yield the tier. The slab stays as it was before."""
    tier = open_tier(options)
    try:
        yield tier
    finally:
        tier.abandon()
