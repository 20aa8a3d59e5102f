"""One piece of host memory for blocks, touched and page-locked segment by segment.

The first segment is ready when the arena is made; a thread does the others while the cache serves.
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

from kvtier.devices.base import Device, Finding, Memory
from kvtier.errors import ConfigError
from kvtier.layout import Layout
from kvtier.system.process import OwnerProcess
from kvtier.tiers import pages

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 64 << 30
"""Bytes of one registration at most; CUDA refuses those of 512 GiB and more."""

MAX_THREADS = 8

Touch = Callable[[int, int, int, Callable[[], bool]], bool]
"""As ``pages.touch``."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring blocks of an arena. offset: where they begin. num_bytes: in whole pages."""

    offset: int
    num_bytes: int
    num_blocks: int


def cut_segments(
    num_blocks: int, bytes_per_block: int, first_bytes: int, segment_bytes: int, page_bytes: int
) -> list[Segment]:
    """Segments that cover ``num_blocks`` blocks, in order.

    The first of about ``first_bytes``, the others of ``segment_bytes`` at most.

    Each ends where a page and a block end: drivers lock whole pages, and refuse a copy that runs
    over two registrations. Blocks that share ends with pages only every few GiB may make a segment
    larger than asked for, for it can't be smaller than that. Only the last one is rounded up.
    """
    step = page_bytes // gcd(page_bytes, bytes_per_block)  # blocks from one common end to the next
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
    """Asks; goes on without where they are refused."""
    ON = "on"
    """Asks, and can't do without."""
    OFF = "off"
    """Small pages, even where the system gives huge ones to everybody. For hosts whose memory is so
    fragmented that looking for huge pages takes minutes."""


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """Options of host memory for blocks."""

    huge_pages: HugePages = HugePages.AUTO
    """Whether to ask for huge pages."""
    at_once_bytes: int = 256 << 20
    """Up to this size nothing is left for the background."""
    first_bytes: int = 1 << 30
    """Bytes of the first segment, which the start waits for."""
    segment_bytes: int = 8 << 30
    """Bytes of each further segment at most. A driver blocks copies while it locks one."""
    page_bytes: int = mmap.PAGESIZE
    """Segments end at multiples of this: for drivers whose pages are not the system's."""
    threads: int = 0
    """Threads that touch pages; 0 for half of the cores, at most eight. The other cores compute."""
    file: Path | None = None
    """A file in memory, for processes that share one arena: the first of them makes it. Each uses
    what all of them have ready. None for memory of one's own."""

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
            raise ConfigError(f"threads: {self.threads} is below 0; use 0 to have them chosen")

    @property
    def num_threads(self) -> int:
        """``threads``, or what is taken for 0."""
        return self.threads or max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))


class Arena:
    """Memory for the blocks of a layout, near the device and page-locked by it.

    num_ready_blocks: so many of the first ones may be used. It grows, on another thread, and never
    beyond what could be touched; blocks of segments that the device did not lock are ready as well.
    memory: all of it. seams: int64, offsets at which one registration ends and another begins.

    touch: see ``pages.touch``; for tests. The device locks on one thread at a time, not always the
    one that made it. Raises ``ConfigError`` where not even the first segment can be had.
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
                    f"host tier: {self.memory.nbytes / 2**30:.2f} GiB can't be had: "
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
                "host memory is short: the cache goes on with less ready_gib=%.2f wanted_gib=%.2f "
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
            with suppress(OSError):  # what was got of it: the system is short
                pages.advise(address, segment.num_bytes, pages.MADV_DONTNEED)
            raise
        piece = Memory(address, segment.num_bytes, "host", self._map)
        if self._lock(piece):
            self._locked.append(piece)
        if self._is_wanted:
            self.num_ready_blocks += segment.num_blocks  # last: the owner's thread looks at it

    def _lock(self, piece: Memory) -> bool:
        try:
            return self._device.page_lock(piece)
        except Exception as error:  # a device from elsewhere: it costs speed, not the cache
            logger.warning("page-locking failed bytes=%d error=%s", piece.nbytes, error)
            return False

    def forget_file(self) -> None:
        """All who share the arena have it: the file's name goes, the memory with its last user.

        A forked child has nothing to say about it.
        """
        if self.options.file is not None and self._process.is_here:
            self.options.file.unlink(missing_ok=True)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until nothing is under way in the background. False if ``timeout_s`` was too short."""
        return self._done.wait(timeout_s)

    def close(self) -> None:
        """Stop in the middle if need be, and unlock what was locked.

        Safe to call twice. A file's name goes, too, lest its memory stay when everybody has gone.

        The memory goes with its last user: a view may still look at it. In a forked child nothing
        happens: what is locked there is its parent's.
        """
        if not self._process.is_here:
            return
        self._is_wanted = False
        if self._thread is not None:
            self._thread.join()
        while self._locked:
            self._device.unlock(self._locked.pop(0))
        self.forget_file()

    # -- the kernel's favours ----------------------------------------------------------------------

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
            return Finding(topic, "unknown", f"{self._device.name} names no NUMA node")
        try:
            pages.prefer_node(self.memory.address, self._mapped_bytes, node)
        except OSError as error:
            return Finding(topic, "no", f"NUMA node {node}: {error.strerror}")
        return Finding(topic, "yes", f"NUMA node {node}, as far as it has room")

    # -- what became of it -------------------------------------------------------------------------

    @property
    def _ready_bytes(self) -> int:
        return self.num_ready_blocks * self._bytes_per_block

    @property
    def ready_memory(self) -> Memory:
        """The part whose pages are there by now; to register it elsewhere touches no others."""
        return Memory(self.memory.address, self._ready_bytes, "host", self._map)

    def findings(self) -> list[Finding]:
        found = [Finding("huge pages", self._huge_pages), self._node, self._locked_finding()]
        ready = f"{self._ready_bytes / 2**30:.2f} of {self.memory.nbytes / 2**30:.2f} GiB ready"
        if self._failure:
            found.append(Finding("host memory", ready, f"no more could be had: {self._failure}"))
        elif not self._done.is_set():
            found.append(Finding("host memory", ready, "the rest is being made ready"))
        return found

    def _locked_finding(self) -> Finding:
        return Finding("page-locked", *self._describe_locked())

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
    """Memory that holds nothing, or what others have put into ``file``."""
    if file is None:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise ConfigError(
            f"host tier: {num_bytes / 2**30:.2f} GiB can't be had in {file.parent}: "
            f"{error.strerror}; lower host capacity, or give {file.parent} more room"
        ) from error
    finally:
        os.close(fd)
