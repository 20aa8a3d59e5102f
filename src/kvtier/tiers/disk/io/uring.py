"""io_uring engine: one call submits a batch and waits for it; file and memory are registered."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import numpy as np

from kvtier.core.errors import TierError
from kvtier.core.hot import UringRing
from kvtier.devices.base import Finding, Memory
from kvtier.tiers.disk.arrays import Int64s, Uint32s, Uint64s
from kvtier.tiers.disk.io.base import IoEngine, check_batch

PIECE_BYTES = 4 << 20
"""Maximum bytes of a request; a larger block takes several. The kernel splits requests that are too
large for the device, at a lower cost than more requests: half the CPU time at 2.5 MiB."""

FUSED_BYTES = 512 << 10
"""Blocks of up to this size that are neighbours in the file share one request."""

REGISTERED_BYTES = 1 << 30
"""Maximum bytes of a memory registration, a limit of the kernel."""


class UringEngine(IoEngine):
    """io_uring engine with two rings of the native core, one per direction.

    Args:
        fd: descriptor of the file.
        buffers: memory that most blocks lie in; registered if the kernel allows it.
        queue_depth: requests in flight per direction.

    Raises:
        TierError: io_uring is not available.
    """

    name = "uring"

    def __init__(self, fd: int, buffers: Sequence[Memory] = (), queue_depth: int = 32) -> None:
        if UringRing is None:
            raise TierError("disk", "io_uring", "the native core is missing")
        super().__init__(fd)
        self._depth = queue_depth
        try:
            fuse_bytes = min(FUSED_BYTES, PIECE_BYTES)
            self._rings = [
                UringRing(fd, queue_depth, PIECE_BYTES, self._direct, fuse_bytes)
                for _ in ("read", "write")
            ]
        except RuntimeError as error:
            raise TierError("disk", "io_uring", str(error)) from error
        self._notes = [note for ring in self._rings for note in self._register(ring, buffers)]

    def _register(self, ring: UringRing, buffers: Sequence[Memory]) -> list[str]:
        """Register file and memory; return notes on what could not be registered."""
        notes = []
        if refused := ring.register_file():
            notes.append(f"the file is not registered: {os.strerror(-refused)}")
        pieces = [
            (start, min(REGISTERED_BYTES, memory.address + memory.nbytes - start))
            for memory in buffers
            for start in range(memory.address, memory.address + memory.nbytes, REGISTERED_BYTES)
        ]
        if pieces and (refused := ring.register_buffers(pieces)):
            remedy = "; raise the limit on locked memory" if refused == -errno.ENOMEM else ""
            notes.append(f"memory is not registered: {os.strerror(-refused)}{remedy}")
        return notes

    def read_checked(
        self,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        num_checked: int,
        deadline_s: float | None = None,
    ) -> tuple[Int64s, Uint32s]:
        """Read a batch; compute checksums while other blocks are still in flight."""
        done, crcs = self._submit(False, offsets, addresses, sizes, deadline_s, num_checked)
        assert crcs is not None
        return done, crcs

    def findings(self) -> list[Finding]:
        note = "; ".join(dict.fromkeys(self._notes))
        return [Finding("disk I/O", f"io_uring, {self._depth} requests at a time", note)]

    def close(self) -> None:
        self._is_closed = True
        self._rings.clear()

    def _transfer(
        self,
        write: bool,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        deadline_s: float | None,
    ) -> Int64s:
        return self._submit(write, offsets, addresses, sizes, deadline_s)[0]

    def _submit(
        self,
        write: bool,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        deadline_s: float | None,
        num_checked: int | None = None,
    ) -> tuple[Int64s, Uint32s | None]:
        self._check_open()
        check_batch(offsets, addresses, sizes, self._direct)
        return self._rings[write].transfer(
            write,
            np.ascontiguousarray(offsets),
            np.ascontiguousarray(addresses),
            np.ascontiguousarray(sizes),
            deadline_s,
            num_checked,
        )
