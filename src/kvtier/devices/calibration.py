"""Measure the copy paths of a device, and verify that they copy correctly."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from statistics import median
from time import perf_counter

from kvtier.core.errors import DeviceError
from kvtier.devices.base import CopyBatch, Device, Direction
from kvtier.devices.path_table import Measured, PathTable
from kvtier.devices.paths import CopyPath
from kvtier.devices.rig import Copy, Rig, open_rig

logger = logging.getLogger(__name__)

COPY_BYTES = (2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20)
NUM_COPIES = (16, 128, 1024, 4096)
RIG_BYTES = (256 << 20, 64 << 20)
"""Memory to allocate on each side: the second if there is less than the first. A measurement copies
half of it at most; with few bytes it would not show the rate of many."""
REPEATS = 3
NUM_CHECKED = 16
"""Copies that are compared byte by byte, per size."""


def calibrate(
    device: Device,
    copy_bytes: Sequence[int] = COPY_BYTES,
    num_copies: Sequence[int] = NUM_COPIES,
    repeats: int = REPEATS,
) -> PathTable:
    """Measure each of the device's copy paths, in both directions.

    Paths that fail or copy wrong bytes are omitted. Takes a few seconds, and 256 MiB on both sides,
    or 64. Raises ``DeviceError`` if that memory is not available.
    """
    rows: list[Measured] = []
    ways = {CopyPath(name): copy for name, copy in device.ways().items()}
    with _largest_rig(device) as rig:
        for direction in Direction:
            right = {
                path: copy
                for path, copy in ways.items()
                if all(
                    _is_right(device.name, rig, path, copy, ways[CopyPath.EACH], direction, size)
                    for size in copy_bytes
                )
            }
            for size, count in product(copy_bytes, num_copies):
                if size * count <= rig.nbytes // 2:
                    batch = rig.scattered(direction, size, count)
                    rows += _measure(right, direction, batch, repeats)
    return PathTable(tuple(rows), frozenset(ways))


@contextmanager
def _largest_rig(device: Device) -> Iterator[Rig]:
    """Yield a rig of the first of ``RIG_BYTES`` for which there is memory."""
    with ExitStack() as stack:
        for nbytes in RIG_BYTES:
            try:
                rig = stack.enter_context(open_rig(device, nbytes))
                break
            except DeviceError:
                if nbytes == RIG_BYTES[-1]:
                    raise
        yield rig


def _measure(
    ways: Mapping[CopyPath, Copy], direction: Direction, batch: CopyBatch, repeats: int
) -> Iterator[Measured]:
    """Yield the measured rate of each path; the runs of the paths are interleaved."""
    seconds: dict[CopyPath, list[float]] = {path: [] for path in ways}
    for _ in range(repeats):
        for path, times in seconds.items():
            began = perf_counter()
            ways[path](batch, direction)
            times.append(perf_counter() - began)
    for path, times in seconds.items():
        rate = batch.num_bytes / median(times)
        yield Measured(direction, path, int(batch.size[0]), len(batch.size), rate)


def _is_right(
    name: str,
    rig: Rig,
    path: CopyPath,
    copy: Copy,
    plain_copy: Copy,
    direction: Direction,
    copy_bytes: int,
) -> bool:
    """Whether a few copies of this size arrive intact."""
    try:
        if rig.brings_the_right_bytes(copy, plain_copy, direction, copy_bytes, NUM_CHECKED):
            return True
    except DeviceError as error:
        logger.info("%s copies without path=%s: %s", name, path.value, error)
        return False
    logger.warning("%s: path=%s left out, it brought wrong bytes", name, path.value)
    return False
