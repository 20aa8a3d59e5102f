"""A fake accelerator and file library, an engine over both, and a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Memory
from kvtier.devices.driver_device import DriverDevice
from kvtier.tiers.disk.arrays import Int64s, Uint64s
from kvtier.tiers.disk.io.direct import DirectEngine, FileInterface
from kvtier.tiers.disk.io.vendors import VENDORS
from tests.devices.drivers import environment, host_compute, make_device
from tests.kit.fakes.storage import StorageFake

Bytes = npt.NDArray[np.uint8]
Batch = tuple[Int64s, Uint64s, Int64s]

PAGE = 4096
BY_DEVICE = {vendor.device: vendor for vendor in VENDORS.values()}
WAYS = {
    "cufile113-batch": ("cufile113", FileInterface.BATCH),
    "cufile115-batch": ("cufile115", FileInterface.BATCH),
    "cufile120-vectors": ("cufile120", FileInterface.VECTORS),
    "cufile120-single": ("cufile120", FileInterface.SINGLE),
    "hipfile03-single": ("hipfile03", FileInterface.SINGLE),
    "nds-single": ("nds", FileInterface.SINGLE),
}
"""Every library, by every way that it may be used in."""
BATCHES = [name for name, (_, way) in WAYS.items() if way is FileInterface.BATCH]


def open_direct(
    fake: StorageFake,
    device: DriverDevice,
    fd: int,
    buffers: list[Memory],
    way: FileInterface | None = None,
) -> DirectEngine:
    """The product's engine over ``fake``."""
    with environment(**{fake.library_variable: str(fake.path)}):
        return DirectEngine(BY_DEVICE[fake.vendor], fd, buffers, device.driver.use, way)


class Harness:
    """``num_pages`` of a file with known bytes, and twice as much zeroed device memory."""

    def __init__(
        self,
        name: str,
        folder: Path,
        num_pages: int = 64,
        compute: Callable[[], int | None] = host_compute,
    ) -> None:
        fake_name, self.way = WAYS[name]
        self.fake = StorageFake(fake_name)
        self.prefix = BY_DEVICE[self.fake.vendor].prefix
        self.device = make_device(self.fake, 0, compute)
        self.num_pages = num_pages
        self.memory = Memory(self.fake.allocate(2 * num_pages * PAGE), 2 * num_pages * PAGE, "", 0)
        self.content = np.random.default_rng(7).integers(0, 256, num_pages * PAGE, np.uint8)
        self.path = folder / "slab"
        self.path.write_bytes(self.content.tobytes())
        self.fd = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        self.engines: list[DirectEngine] = []

    def open(self, fd: int | None = None) -> DirectEngine:
        engine = open_direct(
            self.fake, self.device, self.fd if fd is None else fd, [self.memory], self.way
        )
        self.engines.append(engine)
        return engine

    def batch(self, *pieces: tuple[int, int, int]) -> Batch:
        """Return a batch of (offset in the file, place in memory, size), in pages."""
        offsets, places, sizes = np.array(pieces, np.int64).reshape(-1, 3).T * PAGE
        return (
            offsets.copy(),
            places.astype(np.uint64) + np.uint64(self.memory.address),
            sizes.copy(),
        )

    def in_memory(self, place: int, num: int) -> Bytes:
        """Return pages of the device."""
        return self.fake.peek(self.memory.address + place * PAGE, num * PAGE)

    def in_file(self, page: int, num: int) -> Bytes:
        written = np.frombuffer(self.path.read_bytes(), np.uint8)
        return written[page * PAGE : (page + num) * PAGE]

    def page(self, page: int, num: int = 1) -> Bytes:
        """Return a page of the file's first content."""
        return self.content[page * PAGE : (page + num) * PAGE]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        os.close(self.fd)
        self.device.close()
        if self.fake.num_moving == 0:
            self.fake.free(self.memory.address)


@contextmanager
def direct_harness(name: str, folder: Path, num_pages: int = 64) -> Iterator[Harness]:
    """Yield a harness; check that hardware would accept its calls, and that all is released."""
    with ExitStack() as stack:
        harness = Harness(name, folder, num_pages)
        stack.callback(harness.close)
        yield harness
    assert harness.fake.violations == []
    assert harness.fake.storage_leaks == []
    assert harness.fake.leaks == []
