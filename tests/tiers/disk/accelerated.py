"""A disk tier under a fake accelerator: its pool, and a fake file library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.core.types import BlockKey, BlockName, Slot, Verify
from kvtier.devices.base import Memory
from kvtier.devices.driver_device import DriverDevice
from kvtier.layout import DType, KVGroup, full_attention, latent_attention, named_layout, repack
from kvtier.testing import host_memory
from kvtier.tiers import DeviceTier, Outcome, Pieces
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.disk.direct import Pool
from kvtier.tiers.disk.format.records import as_keys
from kvtier.tiers.disk.io.vendors import VENDORS
from tests.devices.drivers import environment, host_compute, make_device
from tests.kit.fakes.storage import Cancel, StorageFake
from tests.tiers.disk.harness import finding

Bytes = npt.NDArray[np.uint8]

PAGE = 4096
GQA = full_attention(4, 2, 64, DType.FLOAT16, 32)
"""Layer first: 8 pieces of 8 KiB."""
MLA = latent_attention(3, 128, 32, DType.FLOAT16, 64)
"""Layer first: a piece of 16 KiB and one of 4 KiB in each of 3 layers."""
ODD = full_attention(3, 2, 24, DType.FLOAT16, 8)
"""Pieces of 768 bytes: nothing of them is a page."""
KINDS = {"cuda": "cuda", "hip": "cuda", "ascend": "npu"}
"""Accelerator of each vendor, by torch's name."""
NUM_BLOCKS = 6
THERE = [Outcome.THERE] * NUM_BLOCKS
BY_LAYER = (32, 64, 96)
"""Cuts of a pool of ``GQA``, layer first: each layer is an allocation, as engines have it."""


def names(num: int = NUM_BLOCKS) -> list[BlockName]:
    return [BlockName(b"n" * 32, at, BlockKey(b"%032d" % at)) for at in range(num)]


def keys(num: int = NUM_BLOCKS) -> list[BlockKey]:
    return [name.key for name in names(num)]


def on_fake(
    name: str, compute: Callable[[], int | None] = host_compute
) -> tuple[StorageFake, DriverDevice, ExitStack]:
    """Provide a fake accelerator and file library ``name`` while the stack is open."""
    fake, stack = StorageFake(name), ExitStack()
    variables = (fake.library_variable, f"KVTIER_{fake.vendor.upper()}_LIBRARY")
    stack.enter_context(environment(**dict.fromkeys(variables, str(fake.path))))
    return fake, make_device(fake, 0, compute), stack


class Accelerated:
    """``NUM_BLOCKS`` known blocks, and a pool of them in accelerator memory.

    Unless ``open`` gets other options, blocks that were verified once are not verified again.

    Args:
        name: Name of the file library.
        has_host: Add a host tier, so that no transfer has to be direct.
        cuts: Pages of the pool at which a new allocation begins.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        group: KVGroup = GQA,
        order: str = "layer_first",
        has_host: bool = False,
        compute: Callable[[], int | None] = host_compute,
        cuts: Sequence[int] = (),
    ) -> None:
        self.fake, self.device, self._stack = on_fake(name, compute)
        self.prefix = next(
            vendor.prefix for vendor in VENDORS.values() if vendor.device == self.fake.vendor
        )
        self.folder = folder
        self.group = group
        layout = named_layout(order, group, NUM_BLOCKS + 2)
        address = self.fake.allocate(layout.nbytes + PAGE)
        self._stack.callback(self.fake.free, address)
        self._stack.callback(self.device.close)
        memory = Memory(address, layout.nbytes, KINDS[self.fake.vendor], None)
        self.pool = DeviceTier(memory, layout)
        ends = [0, *(cut * PAGE for cut in sorted(cuts)), layout.nbytes]
        self.allocations = [
            Memory(address + begin, end - begin, memory.kind, None) for begin, end in pairwise(ends)
        ]
        for allocation in self.allocations[1:]:
            self.fake.cut(allocation.address)
        self.file_layout = named_layout("block_first", group, NUM_BLOCKS)
        self.content = np.random.default_rng(7).integers(0, 256, self.file_layout.nbytes, np.uint8)
        """Bytes of all blocks, one behind the other."""
        self._host = host_memory(layout.nbytes + PAGE)
        self._has_host = has_host
        self.tiers: list[DiskTier] = []
        self.now = 0.0
        """Seconds, for pauses."""

    def open(self, **options: object) -> DiskTier:
        """Open the tier, which recovers the blocks of the one before."""
        slot_bytes = -(-self.group.bytes_per_block // PAGE) * PAGE
        made = DiskOptions(
            self.folder, NUM_BLOCKS * slot_bytes, verify=Verify.OFF, bounce_bytes=4 * slot_bytes
        )
        arena = self._host if self._has_host else None
        tier = DiskTier(
            replace(made, **options),  # type: ignore[arg-type]
            self.group,
            arena,
            monotonic=lambda: self.now,
            pool=replace(Pool.of(self.pool, self.device), allocations=self.allocations),
        )
        self.tiers.append(tier)
        return tier

    def stored(self, **options: object) -> DiskTier:
        """Return a tier that has stored, and trusts, all blocks; the pool is zeroed."""
        tier = self.open(**options)
        assert tier.put(names(), self.in_host(), 60) == THERE
        self.fill_pool(0)
        return tier

    def num_calls(self, name: str) -> int:
        """Return how often the file library was called by ``name``, without the prefix."""
        return self.fake.count(self.prefix + name)

    def in_host(self, at: Sequence[int] = range(NUM_BLOCKS)) -> Pieces:
        """Return the location of blocks in host memory, to be stored."""
        size = self.group.bytes_per_block
        return Pieces.whole(self.content.ctypes.data + np.array(at) * size, size)

    def in_pool(self, slots: Sequence[int] = range(NUM_BLOCKS)) -> Pieces:
        return self.pool.pieces([Slot(slot) for slot in slots])

    def fill_pool(self, content: Bytes | int) -> None:
        memory = self.pool.memory
        whole = np.broadcast_to(np.asarray(content, np.uint8), memory.nbytes)
        self.fake.poke(memory.address, whole)

    def pool_bytes(self) -> Bytes:
        return self.fake.peek(self.pool.memory.address, self.pool.memory.nbytes)

    def expected(self, before: Bytes, slots: Sequence[int], at: Sequence[int]) -> Bytes:
        """Return the pool's content when blocks ``at`` have arrived in ``slots``."""
        after = before.copy()
        repack(self.content, self.file_layout, list(at), after, self.pool.layout, list(slots))
        return after

    def check_pool(self, at: Sequence[int] = range(NUM_BLOCKS)) -> None:
        """Check that blocks ``at`` are in the slots of their numbers, and zeros elsewhere."""
        zeros = np.zeros(self.pool.memory.nbytes, np.uint8)
        assert np.array_equal(self.pool_bytes(), self.expected(zeros, at, at))

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()
        self._stack.close()


def hang(harness: Accelerated, tier: DiskTier) -> list[Outcome]:
    """Let the driver hold a read until its engine is abandoned, then release it.

    Return the outcomes of the read. It begins within a second, also on a busy machine.
    """
    harness.fake.cancels(Cancel.IGNORED)
    harness.fake.hold_storage()
    outcomes: list[Outcome] = []
    reading = threading.Thread(
        target=lambda: outcomes.extend(tier.get(keys(), harness.in_pool(), 1.0))
    )
    reading.start()
    event = threading.Event()
    for _ in range(6000):
        if any("given up" in line.note for line in tier.findings()):
            break
        event.wait(0.01)
    else:
        raise AssertionError("it was never given up")
    assert reading.is_alive(), "whoever waits for it keeps its memory"
    harness.fake.let_storage_go()
    reading.join()
    return outcomes


line_of = finding


def on_disk(tier: DiskTier, folder: Path, block: int, at: int, value: int) -> None:
    """Change a byte of a block in the file, past the tier."""
    (slot,) = tier.blocks.listed.find(as_keys(keys()[block : block + 1])).tolist()
    with (folder / "data.slab").open("r+b") as file:
        file.seek(slot * tier.blocks.parts[0].slot_bytes + at)
        file.write(bytes([value]))


@contextmanager
def accelerated(name: str, folder: Path, **named: object) -> Iterator[Accelerated]:
    """Yield a harness; check that hardware would accept its calls, and that all is released."""
    harness = Accelerated(name, folder, **named)  # type: ignore[arg-type]
    try:
        yield harness
    finally:
        harness.close()
    assert harness.fake.violations == []
    assert harness.fake.storage_leaks == []
    assert harness.fake.leaks == []
