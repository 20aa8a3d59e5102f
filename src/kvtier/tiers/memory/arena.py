"""Arena of host memory for blocks, touched and page-locked segment by segment.

The constructor prepares the first segment; a background thread prepares the others while the cache
serves.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from math import gcd
from pathlib import Path
from threading import Event, Thread

import numpy as np

from kvtier.core.errors import ConfigError
from kvtier.core.system.process import OwnerProcess, num_cores
from kvtier.devices.base import Device, Finding, Memory
from kvtier.layout import Layout
from kvtier.tiers.memory import pages

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 64 << 30
"""Maximum bytes of one registration. CUDA refuses registrations of 512 GiB and more."""

MAX_THREADS = 8

Touch = Callable[[int, int, int, Callable[[], bool]], bool]
"""Signature of ``pages.touch``."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring blocks of an arena.

    offset: first byte, from the start of the arena. num_bytes: size, in whole pages.
    """

    offset: int
    num_bytes: int
    num_blocks: int


def cut_segments(
    num_blocks: int, bytes_per_block: int, first_bytes: int, segment_bytes: int, page_bytes: int
) -> list[Segment]:
    """Return the segments that cover ``num_blocks`` blocks, in order.

    The first segment has about ``first_bytes`` bytes, the others have ``segment_bytes`` at most.

    Each segment ends at a boundary that pages and blocks share: drivers lock whole pages, and
    refuse a copy that runs over two registrations. If such boundaries are far apart, a segment is
    as large as their distance, even above the limit. Only the last segment is rounded up.
    """
    step = page_bytes // gcd(page_bytes, bytes_per_block)  # blocks between shared boundaries
    segments = []
    done = 0
    while done < num_blocks:
        limit = segment_bytes if done else min(first_bytes, segment_bytes)
        steps = max(1, limit // (step * bytes_per_block))
        num = min(steps * step, num_blocks - done)
        num_bytes = -(-num * bytes_per_block // page_bytes) * page_bytes
        segments.append(Segment(done * bytes_per_block, num_bytes, num))
        done += num
    return segments


class HugePages(StrEnum):
    """Whether the arena asks for huge pages."""

    AUTO = "auto"
    """Ask for huge pages; continue with small pages if the kernel refuses."""
    ON = "on"
    """Ask for huge pages; fail if the kernel refuses."""
    OFF = "off"
    """Use small pages, even if the system gives huge pages by default. For hosts whose memory is so
    fragmented that the search for huge pages takes minutes."""


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """Options of host memory for blocks."""

    huge_pages: HugePages = HugePages.AUTO
    """Whether to ask for huge pages."""
    at_once_bytes: int = 256 << 20
    """An arena of up to this size is prepared in the constructor, without a background thread."""
    first_bytes: int = 1 << 30
    """Bytes of the first segment. The start waits for it."""
    segment_bytes: int = 8 << 30
    """Maximum bytes of each further segment. A driver blocks copies while it locks one."""
    page_bytes: int = mmap.PAGESIZE
    """Segments end at multiples of this. For drivers whose pages differ from the system's."""
    threads: int = 0
    """Threads that touch pages; 0 for half of the cores, at most eight. The other cores compute."""
    file: Path | None = None
    """A file in memory, for processes that share one arena: the first process creates it. Each
    process uses the blocks that are ready in all of them. None for private memory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "huge_pages", HugePages(self.huge_pages))
        for name in ("first_bytes", "segment_bytes"):
            if not 1 <= getattr(self, name) <= MAX_SEGMENT_BYTES:
                raise ConfigError(
                    f"{name}: {getattr(self, name)} is not between 1 and {MAX_SEGMENT_BYTES}, the "
                    "most that drivers lock in one call"
                )
        if self.page_bytes < 1:
            raise ConfigError(f"page_bytes: {self.page_bytes} is below 1; {mmap.PAGESIZE} is usual")
        if self.threads < 0:
            raise ConfigError(f"threads: {self.threads} is below 0; use 0 for the default")

    @property
    def num_threads(self) -> int:
        """Number of threads that touch pages, with 0 replaced by the default."""
        return self.threads or max(1, min(MAX_THREADS, num_cores() // 2))


class Arena:
    """Host memory for the blocks of a layout, near the device and page-locked by it.

    The device locks memory on one thread at a time, which may differ from the thread that made
    the arena.

    Args:
        layout: layout of the blocks.
        device: device that locks the memory.
        options: options of the memory.
        touch: see ``pages.touch``; for tests.

    Attributes:
        num_ready_blocks: number of blocks, from the first on, that may be used. Another thread
            increases it. Only blocks whose pages were touched count; they count even if the device
            did not lock them.
        memory: the whole memory, ready or not.
        seams: int64, offsets at which one registration ends and another begins.

    Raises:
        ConfigError: the first segment cannot be allocated.
    """

    def __init__(
        self, layout: Layout, device: Device, options: ArenaOptions, touch: Touch = pages.touch
    ) -> None:
        self.options = options
        self._process = OwnerProcess()
        self._bytes_per_block = layout.group.bytes_per_block
        self._device = device
        self._touch = touch
        is_small = layout.nbytes <= options.at_once_bytes
        self.segments = cut_segments(
            layout.num_blocks,
            self._bytes_per_block,
            options.segment_bytes if is_small else options.first_bytes,
            options.segment_bytes,
            options.page_bytes,
        )
        self.seams = np.array([segment.offset for segment in self.segments[1:]], np.int64)
        self._mapped_bytes = self.segments[-1].offset + self.segments[-1].num_bytes
        self._map = _map(self._mapped_bytes, options.file)
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        self.memory = Memory(address, layout.nbytes, "host", self._map)
        self.num_ready_blocks = 0
        self._locked: list[Memory] = []
        self._failure = ""
        self._is_wanted = True
        self._done = Event()
        self._thread: Thread | None = None
        pages.leave_out_of_dumps(address, self._mapped_bytes)
        self._huge_pages = self._ask_for_huge_pages()
        self._node = self._bind()
        self._begin(is_small)

    # -- segment by segment ------------------------------------------------------------------------

    def _begin(self, is_small: bool) -> None:
        now, later = (self.segments, []) if is_small else (self.segments[:1], self.segments[1:])
        try:
            for segment in now:
                self._open(segment)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConfigError(
                    f"host tier: {self.memory.nbytes / 2**30:.2f} GiB cannot be allocated: "
                    f"{error.strerror}; lower host capacity"
                ) from error
            raise
        if not later:
            self._done.set()
            return
        self._thread = Thread(
            target=self._open_all, args=(later,), name="kvtier-arena", daemon=True
        )
        self._thread.start()

    def _open_all(self, segments: list[Segment]) -> None:
        try:
            for segment in segments:
                if not self._is_wanted:
                    return
                self._open(segment)
        except Exception as error:
            self._failure = str(getattr(error, "strerror", None) or error)
            logger.warning(
                "host memory is short: the cache works with less ready_gib=%.2f wanted_gib=%.2f "
                "reason=%s",
                self._ready_bytes / 2**30,
                self.memory.nbytes / 2**30,
                self._failure,
            )
        else:
            if self._is_wanted:
                logger.info(
                    "host memory is ready gib=%.2f page_locked=%s",
                    self._ready_bytes / 2**30,
                    self._describe_locked()[0],
                )
        finally:
            self._done.set()

    def _open(self, segment: Segment) -> None:
        address = self.memory.address + segment.offset
        threads = self.options.num_threads
        try:
            if not self._touch(address, segment.num_bytes, threads, lambda: self._is_wanted):
                return
        except OSError:
            with suppress(OSError):  # give back what was allocated: the system is short of memory
                pages.advise(address, segment.num_bytes, pages.MADV_DONTNEED)
            raise
        piece = Memory(address, segment.num_bytes, "host", self._map)
        if self._lock(piece):
            self._locked.append(piece)
        if self._is_wanted:
            self.num_ready_blocks += segment.num_blocks  # last: the owner's thread reads it

    def _lock(self, piece: Memory) -> bool:
        try:
            return self._device.page_lock(piece)
        except Exception as error:  # from a plug-in device: the cache is slower, but works
            logger.warning("page-locking failed bytes=%d error=%s", piece.nbytes, error)
            return False

    def forget_file(self) -> None:
        """Unlink the arena's file, once all processes that share the arena have mapped it.

        The memory is freed when its last user unmaps it. Does nothing in a forked child.
        """
        if self.options.file is not None and self._process.is_here:
            self.options.file.unlink(missing_ok=True)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the background thread is done. Return False if ``timeout_s`` expired."""
        return self._done.wait(timeout_s)

    def close(self) -> None:
        """Stop the background thread, and unlock the memory. Safe to call twice.

        The arena's file is unlinked, so that its memory does not outlive the processes. The memory
        itself is freed with its last user: a view may still refer to it. In a forked child nothing
        happens: the locks belong to its parent.
        """
        if not self._process.is_here:
            return
        self._is_wanted = False
        if self._thread is not None:
            self._thread.join()
        while self._locked:
            self._device.unlock(self._locked.pop(0))
        self.forget_file()

    # -- requests to the kernel --------------------------------------------------------------------

    def _ask_for_huge_pages(self) -> str:
        wanted = self.options.huge_pages
        is_off = wanted is HugePages.OFF
        advice = pages.MADV_NOHUGEPAGE if is_off else pages.MADV_HUGEPAGE
        try:
            pages.advise(self.memory.address, self._mapped_bytes, advice)
        except OSError as error:
            if wanted is HugePages.ON:
                raise ConfigError(
                    f"huge_pages: on, and the kernel refuses them: {error.strerror}; use auto"
                ) from error
            return f"no: {'switched off' if is_off else error.strerror}"
        return "no: switched off" if is_off else "asked for"

    def _bind(self) -> Finding:
        node = self._device.numa_node
        topic = "host memory is near the device"
        if node is None:
            return Finding(topic, "unknown", f"{self._device.name} reports no NUMA node")
        try:
            pages.prefer_node(self.memory.address, self._mapped_bytes, node)
        except OSError as error:
            return Finding(topic, "no", f"NUMA node {node}: {error.strerror}")
        return Finding(topic, "yes", f"NUMA node {node}, while it has free memory")

    # -- state -------------------------------------------------------------------------------------

    @property
    def _ready_bytes(self) -> int:
        return self.num_ready_blocks * self._bytes_per_block

    @property
    def ready_memory(self) -> Memory:
        """Memory of the ready blocks. Registering it elsewhere touches no other pages."""
        return Memory(self.memory.address, self._ready_bytes, "host", self._map)

    def findings(self) -> list[Finding]:
        found = [Finding("huge pages", self._huge_pages), self._node]
        found.append(Finding("page-locked", *self._describe_locked()))
        ready = f"{self._ready_bytes / 2**30:.2f} of {self.memory.nbytes / 2**30:.2f} GiB ready"
        if self._failure:
            found.append(Finding("host memory", ready, f"allocation failed: {self._failure}"))
        elif not self._done.is_set():
            found.append(Finding("host memory", ready, "the rest is being prepared"))
        return found

    def _describe_locked(self) -> tuple[str, str]:
        refusal = f"the {self._device.name} device does not need or grant it"
        locked = sum(piece.nbytes for piece in self._locked)
        if locked == self._mapped_bytes:
            return "yes", ""
        if not locked:
            return "no", refusal
        note = "" if self._done.is_set() else ", so far"
        return f"{locked / 2**30:.2f} of {self._mapped_bytes / 2**30:.2f} GiB{note}", (
            refusal if self._done.is_set() else ""
        )


def _map(num_bytes: int, file: Path | None) -> mmap.mmap:
    """Map new memory, or ``file``, which another process may have filled."""
    if file is None:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise ConfigError(
            f"host tier: {num_bytes / 2**30:.2f} GiB cannot be allocated in {file.parent}: "
            f"{error.strerror}; lower host capacity, or enlarge {file.parent}"
        ) from error
    finally:
        os.close(fd)
