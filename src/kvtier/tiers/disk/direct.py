"""Selection of the blocks that go directly between a slab and the engine's KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvtier.core.errors import ConfigError
from kvtier.core.types import Direct, Slot, Verify
from kvtier.devices.base import Device, Finding, Memory
from kvtier.tiers.base import MemoryTier
from kvtier.tiers.disk.arrays import Bools
from kvtier.tiers.disk.bounce import ALIGNMENT, why_bounced
from kvtier.tiers.disk.io.registered import RegisteredMemory
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.pieces import HOST_KINDS, Pieces

if TYPE_CHECKING:
    from kvtier.tiers.disk.io.probe import Probe


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The engine's KV pool.

    memory: address range of the pool.
    blocks: locations of the first two slots of each kind. All other slots follow at multiples of
        the distance between these two.
    device: device that the memory belongs to; None if the CPU can access it.
    allocations: the separate allocations within ``memory``, each of which is registered by itself.
        Bytes between them do not belong to the engine. By default one allocation is the whole.
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
        """Return the pool of a memory tier. device: device that the tier is in."""
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
class PoolPath:
    """Path of blocks from a slab to the pool.

    reason: why blocks don't go directly; "" if they do.
    probe: result of the probe of the accelerator's file library, if there was one.
    """

    reason: str
    probe: Probe | None = None

    @property
    def is_compatible(self) -> bool:
        """Whether the file library itself moves the blocks through host memory."""
        return not self.reason and self.probe is not None and self.probe.is_bounced

    def finding(self, direct: Direct, pool: Pool, has_host: bool) -> Finding:
        """Describe the path, and why it is this one. has_host: whether there is a host tier."""
        topic = "disk to device"
        if direct is Direct.OFF:
            return Finding(topic, "through host memory", "direct is off")
        way = "direct, in compatibility mode" if self.is_compatible else "direct"
        if has_host and direct is Direct.AUTO:
            note = f"{way} while host memory is full"
            if self.reason:
                note = f"also while host memory is full: {self.reason}"
            return Finding(topic, "through host memory", note)
        if self.reason:
            return Finding(topic, "through a buffer", self.reason)
        return Finding(topic, way, str(pool))


def find_pool_path(
    options: DiskOptions, pool: Pool | None, slot_bytes: int, is_direct: bool
) -> PoolPath:
    """Find the path of blocks to ``pool``; one to accelerator memory is tried in another process.

    is_direct: whether the data file was opened with O_DIRECT.

    Raises ``ConfigError`` if direct transfers are required, but impossible.
    """
    is_on = options.direct is Direct.ON
    if pool is None:
        if is_on:
            raise ConfigError(
                "direct: on, and the engine's memory pool is unknown to the disk; leave it at auto"
            )
        return PoolPath("no pool")
    reason = why_not(pool, slot_bytes, is_direct)
    if is_on and reason:
        raise ConfigError(
            f"direct: on, and direct reads don't work between the disk and {pool}: {reason}; "
            "leave it at auto, or choose a block_size that makes pieces of whole pages"
        )
    if reason or pool.device is None:
        return PoolPath(reason)
    if is_on and options.verify is Verify.ALWAYS:
        raise ConfigError(
            "verify: always, and the device computes no checksums, so no block could be read "
            "directly to it; use sampled, or direct=off"
        )
    path = _by_library(options, pool.device)
    check_library(options, pool.device, path.reason)
    return path


def _by_library(options: DiskOptions, device: Device) -> PoolPath:
    if options.direct is Direct.OFF:
        return PoolPath("direct is off")
    if options.verify is Verify.ALWAYS:
        return PoolPath(f"verify is {options.verify}, and the device computes no checksums")
    if not device.file_library:
        return PoolPath(f"no file library is known for the memory of {device.name}")
    # Imported here: ``probe`` is also run as a program, and must not be imported before that.
    from kvtier.tiers.disk.io.probe import probe

    found = probe(device.file_library, str(options.path), device.name)
    if not found.works:
        return PoolPath(found.why_not, found)
    if found.is_bounced and options.direct is Direct.AUTO:
        note = "reads into host memory and copies, like the path without it"
        return PoolPath(f"{found.library} supports only its compatibility mode: it {note}", found)
    return PoolPath("", found)


def why_not(pool: Pool, slot_bytes: int, is_direct: bool) -> str:
    """Return why blocks can't go directly between a slab and ``pool``; "" if they can."""
    if not is_direct:
        return "the file system has no O_DIRECT"
    if reason := why_bounced(pool.blocks.sizes):
        return reason
    if pool.blocks.block_bytes != slot_bytes:
        return f"a block of {pool.blocks.block_bytes} bytes does not fill its {slot_bytes} on disk"
    behind = pool.blocks.addresses % np.uint64(ALIGNMENT)
    if behind.any():
        return f"a piece begins {behind[behind > 0][0]} bytes after a page boundary"
    if pool.device is None:
        return ""
    # Calls of the file library name the registration that holds a piece.
    bases = RegisteredMemory(pool.allocations).bases(pool.blocks.addresses, pool.blocks.sizes)
    is_lost = (bases == 0) & pool.blocks.wanted
    if not is_lost.any():
        return ""
    _, piece = np.argwhere(is_lost)[0]
    return (
        f"a piece of {pool.blocks.sizes[piece]} bytes is not inside one of the accelerator's "
        f"{len(pool.allocations)} allocations"
    )


def check_library(options: DiskOptions, device: Device, reason: str) -> None:
    """Raise ``ConfigError`` if direct is required, but the accelerator's library can't do it.

    reason: why not; "" if it can.
    """
    if options.direct is Direct.ON and reason:
        raise ConfigError(
            f"direct: on, and direct reads don't work between {options.path} and {device.name}: "
            f"{reason}; leave it at auto"
        )


# -- verification ----------------------------------------------------------------------------------


def choose(trusted: Bools, verify: Verify, num_before: int, sample_every: int) -> Bools:
    """Return the blocks of a read whose checksum is compared: bool [n].

    Untrusted blocks are always verified.

    Args:
        trusted: bool [n], blocks that were written or verified by the current owner, or by one that
            closed the slab in order.
        verify: which trusted blocks to verify: all, one in ``sample_every``, or none.
        num_before: number of blocks that were read before.
        sample_every: see ``verify``.
    """
    if verify is Verify.ALWAYS:
        return np.ones(len(trusted), bool)
    if verify is Verify.SAMPLED:
        count = np.arange(num_before, num_before + len(trusted))
        return np.asarray(~trusted | (count % sample_every == 0))
    return ~trusted
