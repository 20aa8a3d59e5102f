"""The ways between one slab and memory: opened together, and closed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.devices.base import Finding, Memory
from kvtier.errors import DeviceError, TierError
from kvtier.tiers.disk.accelerator import Accelerator
from kvtier.tiers.disk.bounce import BlockPort, Bounce
from kvtier.tiers.disk.direct import Pool, Way, check_library, find_way
from kvtier.tiers.disk.health import DiskHealth
from kvtier.tiers.disk.io import IoEngine
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.system import DiskSystem
from kvtier.types import Direct, IoKind


class Ports:
    """One I/O engine for a writer and a reader, a buffer for each, and the path to an accelerator.

    arena: memory that blocks mostly come from and go to; None where there is no host tier, and the
    processor does not reach the pool. pool: the memory that blocks are used in. clock: seconds,
    ever growing.

    way: how blocks come to the pool. accelerator: that of the pool, where blocks go to its memory
    from here; None where they go by a host tier, or the pool is the processor's.

    Raises ``TierError``, and ``ConfigError`` where blocks are to go straight and can't.
    """

    def __init__(
        self,
        options: DiskOptions,
        slab: Slab,
        arena: Memory | None,
        pool: Pool | None,
        system: DiskSystem,
        clock: Callable[[], float],
    ) -> None:
        self._options = options
        self._slab = slab
        self._pool = pool
        self._system = system
        self._engines: list[IoEngine] = []
        self.way = find_way(options, pool, slab.superblock.slot_bytes, slab.is_direct)
        self.accelerator: Accelerator | None = None
        try:
            self.writer, self.reader = self._open(arena, clock)
        except BaseException:
            self.close()
            raise

    def _open(
        self, arena: Memory | None, clock: Callable[[], float]
    ) -> tuple[BlockPort, BlockPort]:
        superblock, options = self._slab.superblock, self._options
        block_bytes, slot_bytes = superblock.block_bytes, superblock.slot_bytes
        num_slots = min(options.bounce_bytes // slot_bytes, superblock.num_slots)
        there, back = (Bounce(num_slots, slot_bytes) for _ in range(2))
        self._open_accelerator(back.memory, arena is not None, clock)
        engine = self.open_engine(options.io, self._registered(arena, (there, back)))
        writer = BlockPort(engine, there, block_bytes, slot_bytes, options.checksum_threads)
        reader = BlockPort(engine, back, block_bytes, slot_bytes, accelerator=self.accelerator)
        return writer, reader

    def open_engine(self, kind: IoKind, buffers: Sequence[Memory]) -> IoEngine:
        """One more engine for the slab, until ``close``."""
        depth = self._options.queue_depth
        engine = self._system.open_engine(self._slab.data_fd, kind, buffers, depth)
        self._engines.append(engine)
        return engine

    def _registered(self, arena: Memory | None, bounces: Sequence[Bounce]) -> list[Memory]:
        """Return the memory to register with the engine.

        Registered memory stays resident, so rarely used buffers and pools are left out.
        """
        pool = self._pool if self._pool is not None and self._pool.device is None else None
        is_pool = arena is not None and pool is not None and arena.address == pool.memory.address
        has_tail = self._slab.superblock.block_bytes != self._slab.superblock.slot_bytes
        has_only_buffers = arena is None and self.accelerator is not None
        if has_tail or has_only_buffers or (is_pool and self.way.reason):
            return [each.memory for each in bounces]
        memories = [arena] if arena is not None else []
        if self._options.direct is Direct.ON and pool is not None and not is_pool:
            memories += pool.allocations
        return memories

    # -- an accelerator ----------------------------------------------------------------------------

    def _open_accelerator(self, buffer: Memory, has_host: bool, clock: Callable[[], float]) -> None:
        """Open the path to the accelerator's memory.

        has_host: there is a host tier to go through.
        """
        pool, options = self._pool, self._options
        if pool is None or pool.device is None or options.direct is Direct.OFF:
            return
        if has_host and self.way.reason:
            return
        what = f"{options.path}, straight to {pool.device.name}"
        health = DiskHealth(what, ["read"], options.errors_until_off, clock)
        try:
            self.accelerator = Accelerator(
                pool.device, pool.memory, pool.allocations, buffer, health
            )
            if not self.way.reason:
                self.accelerator.open(self._slab.data_fd, self.way.is_compatible)
        except (DeviceError, TierError) as error:
            self.way = Way(str(error), self.way.probe)
            check_library(options, pool.device, self.way.reason)
            if has_host and self.accelerator is not None:
                self.accelerator.close()
                self.accelerator = None

    # -- for both ----------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """Return the I/O engines in use, and what was found out about an accelerator's."""
        lines = [*self.writer.engine.findings()]
        if self.way.probe is not None:
            lines.append(self.way.probe.finding())
        if self.accelerator is not None and (state := self.accelerator.state()):
            lines.append(Finding("straight from disk", "not now", state))
        return lines

    def close(self) -> None:
        """Nothing is read or written any more; the slab stays open."""
        if self.accelerator is not None:
            self.accelerator.close()
        for engine in self._engines:
            engine.close()
