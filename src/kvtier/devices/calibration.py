"""Measure which way of copying is fastest, of those that bring the right bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from kvtier.devices.base import Direction
from kvtier.devices.path_table import Measured, PathTable
from kvtier.devices.paths import CopyPath
from kvtier.devices.rig import Rig, open_rig
from kvtier.errors import DeviceError

if TYPE_CHECKING:
    from kvtier.devices.driver_device import DriverDevice

logger = logging.getLogger(__name__)

COPY_BYTES = (2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20)
NUM_COPIES = (16, 128, 1024, 4096)
MAX_TOTAL_BYTES = 64 << 20
"""Of one measurement, and of the memory that is taken on either side."""
REPEATS = 3


def calibrate(
    device: DriverDevice,
    copy_bytes: Sequence[int] = COPY_BYTES,
    num_copies: Sequence[int] = NUM_COPIES,
    repeats: int = REPEATS,
) -> PathTable:
    """Measure every usable path in both directions. Takes about a second, and 64 MiB on both sides.

    Raises ``DeviceError`` where there is no memory for it.
    """
    rows: list[Measured] = []
    tried = frozenset(device.paths.usable)
    with open_rig(device, MAX_TOTAL_BYTES) as rig:
        for direction, size, count in product(Direction, copy_bytes, num_copies):
            if size * count <= MAX_TOTAL_BYTES // 2:
                rows += _measure(device, rig, direction, size, count, repeats)
    return PathTable(tuple(rows), tried)


def _measure(
    device: DriverDevice,
    rig: Rig,
    direction: Direction,
    copy_bytes: int,
    num_copies: int,
    repeats: int,
) -> Iterator[Measured]:
    """Each usable path, interleaved; one that fails or brings wrong bytes is left out."""
    seconds: dict[CopyPath, list[float]] = {
        path: []
        for path in device.paths.usable
        if _is_right(device, rig, path, direction, copy_bytes, num_copies)
    }
    batch = rig.scattered(direction, copy_bytes, num_copies)
    for _ in range(repeats):
        for path, times in seconds.items():
            began = perf_counter()
            device.copy_by(path, batch, direction)
            times.append(perf_counter() - began)
    for path, times in seconds.items():
        rate = batch.num_bytes / median(times)
        yield Measured(direction, path, copy_bytes, num_copies, rate)


def _is_right(
    device: DriverDevice,
    rig: Rig,
    path: CopyPath,
    direction: Direction,
    copy_bytes: int,
    num_copies: int,
) -> bool:
    plain = partial(device.copy_by, CopyPath.EACH)
    try:
        by_path = partial(device.copy_by, path)
        if rig.brings_the_right_bytes(by_path, plain, direction, copy_bytes, num_copies):
            return True
    except DeviceError as error:
        logger.info("%s copies without path=%s: %s", device.name, path.value, error)
        return False
    logger.warning("%s: path=%s left out, it brought wrong bytes", device.name, path.value)
    return False
