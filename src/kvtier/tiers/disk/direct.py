"""Decide which blocks may go directly between a slab and the memory that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Device, Finding, Memory
from kvtier.errors import ConfigError
from kvtier.tiers.base import MemoryTier
from kvtier.tiers.disk.bounce import ALIGNMENT, why_bounced
from kvtier.tiers.disk.io.placed import Registered
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.pieces import HOST_KINDS, Pieces
from kvtier.types import Direct, Slot, Verify

if TYPE_CHECKING:
    from kvtier.tiers.disk.io.probe import Probe

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The memory that blocks are used in: the engine's.

    blocks: where the first two of its slots lie, of each kind that it has; every other one lies as
    far from the second as that from the first, or a multiple. device: whose memory it is, where the
    processor can't reach it.

    allocations: what of ``memory`` was allocated together, each to be registered by itself; what
    lies between them is not the engine's. By default all of it was.
    """

    memory: Memory
    blocks: Pieces
    device: Device | None = None
    allocations: Sequence[Memory] = ()

    def __post_init__(self) -> None:
        assert self.blocks.is_host or self.device is not None, "whose memory the pool lies in"
        if not self.allocations:
            object.__setattr__(self, "allocations", (self.memory,))

    @classmethod
    def of(cls, tier: MemoryTier, device: Device | None = None) -> Pool:
        """Return the layout of the first tier. device: the device that the tier is in."""
        first = tier.pieces([Slot(at) for at in range(min(2, tier.num_slots))])
        return cls(tier.memory, first, None if tier.memory.kind in HOST_KINDS else device)

    def part(self, first: int, num_bytes: int) -> Pool:
        """Return ``num_bytes`` bytes of each block, from byte ``first`` on."""
        return replace(self, blocks=self.blocks.part(first, num_bytes))

    def __str__(self) -> str:
        sizes = self.blocks.sizes.tolist()
        least, most = f"{min(sizes) / 1024:g}", f"{max(sizes) / 1024:g}"
        size = f"{least} KiB" if least == most else f"{least} to {most} KiB"
        return f"{len(sizes)} pieces of {size}" if len(sizes) > 1 else f"one piece of {size}"


@dataclass(frozen=True, slots=True)
class Way:
    """From a slab to the pool.

    reason: why blocks don't go directly; "" where they do. probe: what was found out about the
    accelerator's file library, where that was looked for.
    """

    reason: str
    probe: Probe | None = None

    @property
    def is_compatible(self) -> bool:
        """Whether blocks go directly to a library that takes them through host memory itself."""
        return not self.reason and self.probe is not None and self.probe.is_bounced

    def __str__(self) -> str:
        return "direct, in compatibility mode" if self.is_compatible else "direct"


def find_way(options: DiskOptions, pool: Pool | None, slot_bytes: int, is_direct: bool) -> Way:
    """Find the path of blocks to ``pool``.

    A path to accelerator memory is tried in a process of its own.

    slot_bytes, is_direct: as ``why_not``. Raises ``ConfigError`` where blocks have to go directly,
    and can't.
    """
    reason = why_not(pool, slot_bytes, is_direct) if pool is not None else "no pool"
    check_direct(options.direct, pool, reason)
    if reason or pool is None or pool.device is None:
        return Way(reason)
    if options.direct is Direct.ON:
        check_verify(options.verify, can_check=False)
    way = _by_library(options, pool.device)
    check_library(options, pool.device, way.reason)
    return way


def _by_library(options: DiskOptions, device: Device) -> Way:
    if options.direct is Direct.OFF:
        return Way("direct is off")
    if options.verify is Verify.ALWAYS:
        return Way(f"verify is {options.verify}, and the device computes no checksums")
    if not device.file_library:
        return Way(f"no library is known that brings files to the memory of {device.name}")
    # Here, for people run it as a program: it must not be there before.
    from kvtier.tiers.disk.io.probe import probe

    found = probe(device.file_library, str(options.path), device.name)
    if not found.works:
        return Way(found.why_not, found)
    if found.is_bounced and options.direct is Direct.AUTO:
        note = "reads into host memory and copies, as is done without it"
        return Way(f"{found.library} has its compatibility mode only: it {note}", found)
    return Way("", found)


def why_not(pool: Pool, slot_bytes: int, is_direct: bool) -> str:
    """Why blocks can't go directly between a slab and ``pool``; "" where they can.

    slot_bytes: of the slab. is_direct: its file was opened with O_DIRECT.
    """
    if not is_direct:
        return "the file system has no O_DIRECT"
    if reason := why_bounced(pool.blocks.sizes):
        return reason
    if pool.blocks.block_bytes != slot_bytes:
        return f"a block of {pool.blocks.block_bytes} bytes does not fill its {slot_bytes} on disk"
    behind = pool.blocks.addresses % np.uint64(ALIGNMENT)
    if behind.any():
        return f"a piece begins {behind[behind > 0][0]} bytes behind the beginning of a page"
    return _why_not_whole(pool)


def _why_not_whole(pool: Pool) -> str:
    """Why the pieces of a pool on an accelerator are not those of registered memory.

    A library is told of each piece which registration holds it.
    """
    if pool.device is None:
        return ""
    is_held = Registered(pool.allocations).bases(pool.blocks.addresses, pool.blocks.sizes) != 0
    if (is_held | ~pool.blocks.wanted).all():
        return ""
    _, piece = np.argwhere(~is_held & pool.blocks.wanted)[0]
    return (
        f"a piece of {pool.blocks.sizes[piece]} bytes lies in none of the accelerator's "
        f"{len(pool.allocations)} allocations as a whole"
    )


def check_direct(direct: Direct, pool: Pool | None, reason: str) -> None:
    """Raise ``ConfigError`` where blocks have to go directly, and can't. reason: of ``why_not``."""
    if direct is Direct.ON and pool is None:
        raise ConfigError(
            "direct: on, and the disk is not told what memory blocks are used in; leave it at auto"
        )
    if direct is Direct.ON and reason:
        raise ConfigError(
            f"direct: on, and direct reads don't work between the disk and {pool}: {reason}; "
            "leave it at auto, or choose a block_size that makes pieces of whole pages"
        )


def check_library(options: DiskOptions, device: Device, reason: str) -> None:
    """The same of an accelerator, whose library can't. reason: why; "" where it can."""
    if options.direct is Direct.ON and reason:
        raise ConfigError(
            f"direct: on, and direct reads don't work between {options.path} and {device.name}: "
            f"{reason}; leave it at auto"
        )


def way_of(direct: Direct, pool: Pool, has_host: bool, way: Way) -> Finding:
    """Describe the path of blocks from disk, and its reason. has_host: there is a host tier."""
    topic = "disk to device"
    if direct is Direct.OFF:
        return Finding(topic, "through host memory", "direct is off")
    if has_host and direct is Direct.AUTO:
        note = f"{way} while that is full"
        if way.reason:
            note = f"also while that is full: {way.reason}"
        return Finding(topic, "through host memory", note)
    if way.reason:
        return Finding(topic, "through a buffer", way.reason)
    return Finding(topic, str(way), str(pool))


# -- verification ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ReadPaths:
    """Read paths of the blocks of one read.

    checked: their checksum is compared. direct: they go directly to where they are used; the
    others by way of host memory.
    """

    checked: Bools
    direct: Bools


def check_verify(verify: Verify, can_check: bool) -> None:
    """Raise ``ConfigError`` if blocks must be verified where they go directly and nobody can.

    can_check: checksums can be computed there.
    """
    if verify is Verify.ALWAYS and not can_check:
        raise ConfigError(
            "verify: always, and the device computes no checksums, so no block could be read "
            "directly to it; use sampled, or direct=off"
        )


def choose(
    trusted: Bools, verify: Verify, num_before: int, sample_every: int, can_check: bool
) -> ReadPaths:
    """Choose the blocks of a read to verify, and those to read directly.

    trusted: bool [n], those that were written or verified by an owner that lives, or that closed
    the slab in order. verify: of these all, one in ``sample_every``, or none; of the others all.
    num_before: blocks that were read before. can_check: checksums can be computed where blocks are
    used. Where they can't, no block that has to be verified goes there before it was.
    """
    checked = ~trusted
    if verify is Verify.ALWAYS:
        checked = np.ones(len(trusted), bool)
    elif verify is Verify.SAMPLED:
        count = np.arange(num_before, num_before + len(trusted))
        checked = checked | (count % sample_every == 0)
    direct = np.ones(len(trusted), bool) if can_check else ~checked
    return ReadPaths(checked, direct)
