"""Trial transfer from accelerator memory to a file and back; ``probe`` runs it as a child process.

Its last line of output is the result as JSON.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from kvtier.core.errors import CacheError, TierError
from kvtier.core.system.plugins import load_plugin
from kvtier.devices.base import CopyBatch, Device, Direction, Memory
from kvtier.tiers.disk.arrays import Int64s, Uint64s
from kvtier.tiers.disk.io.base import IO_ALIGNMENT
from kvtier.tiers.disk.io.direct import DirectEngine
from kvtier.tiers.disk.io.vendors import VENDORS

NUM_BYTES: Final = 32 << 20
"""Bytes moved in each direction."""
PIECE_BYTES: Final = 128 << 10
"""Bytes of a piece, about one layer of a block. Pieces are scattered in memory."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a trial.

    engine, accelerator: description of the engine and the accelerator.
    why_not: reason of the failure; "" if the bytes came back unchanged. Only then speeds are given.
    """

    engine: str = ""
    accelerator: str = ""
    why_not: str = ""
    write_gb_per_s: float = 0.0
    read_gb_per_s: float = 0.0


def run(kind: str, device_name: str, path: str, num_bytes: int = NUM_BYTES) -> TrialResult:
    """Write a pattern from accelerator memory to a file, read it back elsewhere, and compare.

    kind: library, as ``VENDORS`` names it. device_name: accelerator, as torch names it. path: an
        existing file. num_bytes: bytes to move in each direction.

    Raises ``CacheError`` if the accelerator or the library fails, and ``OSError`` if the file or a
    transfer does.
    """
    vendor = VENDORS[kind]
    with ExitStack() as stack:
        device: Any = load_plugin("devices", vendor.device)(device_name, _no_compute)
        stack.callback(device.close)
        accelerator = device.driver.identity
        # Twice the bytes, to read back to other addresses; one page more, for alignment.
        whole = device.allocate(2 * num_bytes + IO_ALIGNMENT)
        stack.callback(device.free, whole)
        begin = -(-whole.address // IO_ALIGNMENT) * IO_ALIGNMENT
        memory = Memory(begin, 2 * num_bytes, device.name, whole)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        stack.callback(os.close, fd)
        os.posix_fallocate(fd, 0, num_bytes)
        engine = DirectEngine(vendor, fd, [memory], device.driver.use)
        stack.callback(engine.close)
        words = ", ".join(finding.found for finding in engine.findings())

        random = np.random.default_rng()
        content = random.integers(0, 256, num_bytes, np.uint8)
        _copy(device, memory, np.concatenate([content, np.zeros_like(content)]), Direction.LOAD)
        places = random.permutation(num_bytes // PIECE_BYTES)
        began = time.perf_counter()
        _move(engine.write, memory.address, places)
        engine.sync()
        wrote = time.perf_counter()
        others = random.permutation(num_bytes // PIECE_BYTES)
        _move(engine.read, memory.address + num_bytes, others)
        read = time.perf_counter()
        found = np.empty(2 * num_bytes, np.uint8)
        _copy(device, memory, found, Direction.STORE)
        pieces = found.reshape(2, -1, PIECE_BYTES)
        if not np.array_equal(pieces[1][others], content.reshape(-1, PIECE_BYTES)[places]):
            return TrialResult(words, accelerator, "it brought wrong bytes")
        if not np.array_equal(found[:num_bytes], content):
            return TrialResult(words, accelerator, "it changed the bytes to write")
        gigabytes = num_bytes / 1e9
        return TrialResult(
            words, accelerator, "", gigabytes / (wrote - began), gigabytes / (read - wrote)
        )


def _no_compute() -> None:
    """Do nothing: no compute has to be waited for."""


def _copy(
    device: Device, memory: Memory, content: np.ndarray[tuple[int], np.dtype[np.uint8]],
    direction: Direction,
) -> None:  # fmt: skip
    """Copy ``content`` to accelerator memory, or fill it from there."""
    arena = mmap.mmap(-1, len(content))
    view = np.frombuffer(arena, np.uint8)
    host = Memory(view.ctypes.data, len(content), "host", arena)
    start, size = np.zeros(1, np.int64), np.array([len(content)], np.int64)
    if direction is Direction.LOAD:
        view[:] = content
        device.copy(CopyBatch(host, memory, start, start, size), direction)
    else:
        device.copy(CopyBatch(memory, host, start, start, size), direction)
        content[:] = view


def _move(move: Callable[[Int64s, Uint64s, Int64s], Int64s], address: int, places: Int64s) -> None:
    """Move the file's pieces from or to ``places`` in the memory at ``address``."""
    num = len(places)
    offsets = np.arange(num) * PIECE_BYTES
    addresses = (places * PIECE_BYTES).astype(np.uint64) + np.uint64(address)
    done = move(offsets, addresses, np.full(num, PIECE_BYTES, np.int64))
    if (done != PIECE_BYTES).any():
        bad = int(done[done != PIECE_BYTES][0])
        words = os.strerror(-bad) if bad < 0 else f"{bad} of {PIECE_BYTES} bytes moved"
        raise OSError(-bad if bad < 0 else errno.EIO, words)


def main(kind: str, device_name: str, path: str) -> None:
    try:
        tried = run(kind, device_name, path)
    except TierError as error:
        tried = TrialResult(why_not=error.reason)
    except (CacheError, OSError) as error:
        tried = TrialResult(why_not=str(error))
    print(json.dumps(asdict(tried)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # skip exit handlers of drivers
