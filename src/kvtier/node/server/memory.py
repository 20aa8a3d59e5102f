"""Host memory of a node: one shared arena in segments, each of which belongs to one block size.

A slot is named by its number at its block size: slot ``s`` begins at byte ``s * block_bytes`` of
the arena, whichever segment that is. Slots that cross the end of a segment do not exist. Engines
therefore compute every address by themselves, and need no notice when segments change partitions.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import numpy as np

from kvtier.core.errors import ConfigError
from kvtier.core.hot import FreeSlots, free_rows
from kvtier.core.system.landlock import can_forbid_truncation
from kvtier.core.system.private_files import open_file, remove
from kvtier.core.types import HOST, Slot
from kvtier.devices.base import Device
from kvtier.index.selection import Int64s, as_numbers
from kvtier.layout import named_layout, opaque
from kvtier.node.config import SHARED_MEMORY
from kvtier.node.server.records import FREE, ArenaRecords, Bools, tag_of
from kvtier.tiers import MemoryTier
from kvtier.tiers.memory import pages
from kvtier.tiers.memory.arena import Arena, ArenaOptions
from kvtier.tiers.memory.slots import check_count

logger = logging.getLogger(__name__)

MAX_SLOTS = 1 << 26
"""Most slots of one block size. Each costs the node some bytes, used or not."""
CANDIDATES = 8
"""Segments that are examined for a run of free neighbours before slots are taken from several."""


class NodeMemory:
    """The arena of a node, in segments that are lent to tiers.

    The arena is a file in ``directory``, which no other node uses at the same time. Its pages are
    touched by the node, so that a control group charges them to the node and not to an engine. It
    is the arena of an earlier node if that one has not closed it, and it fits.

    Args:
        directory: directory in memory, usually below ``/dev/shm``; made if it is missing.
        num_bytes: size, rounded down to whole segments.
        segment_bytes: size of a segment, in whole pages.
        device: prepares the memory; the CPU's, since engines register it with their devices.
        disk: directory of the slabs, whose blocks are read into the memory; "" for none.

    Attributes:
        records: the files beside the arena.

    Raises:
        ConfigError: the memory can't be allocated, or another node uses the directory.
    """

    def __init__(
        self,
        directory: Path,
        num_bytes: int,
        segment_bytes: int,
        device: Device,
        disk: str = "",
    ) -> None:
        self.segment_bytes = segment_bytes
        self.num_segments = num_bytes // segment_bytes
        if self.num_segments < 1:
            raise ConfigError(
                f"segment_capacity: segments of {segment_bytes} bytes in {num_bytes} bytes of host "
                "memory; lower it, or raise host_capacity"
            )
        beside = _beside(directory)
        self._locks = {directory: _lock(directory)}
        try:
            if beside != directory:
                self._locks[beside] = _lock(beside)
            self._open(directory / "memory", beside, device, disk)
        except OSError as error:
            self._unlock()
            raise ConfigError(
                f"memory_path: the memory can't be made in {directory}: {error.strerror}: "
                f"{error.filename or beside}; free or enlarge it, or name another directory"
            ) from error
        except BaseException:
            self._unlock()
            raise
        if not can_forbid_truncation():
            logger.warning(
                "an engine could end this node by truncating its memory: the kernel can't forbid "
                "it (Landlock, Linux 6.2)"
            )
        self.memory = self._arena.memory
        self.num_bytes = self.num_segments * segment_bytes
        self.seams = np.arange(1, self.num_segments, dtype=np.int64) * segment_bytes
        self._free: list[int] = np.flatnonzero(self.records.owners == FREE).tolist()  # a heap

    def _open(self, file: Path, beside: Path, device: Device, disk: str) -> None:
        """Open the arena and its records. Raises ``OSError`` or ``ConfigError``."""
        self.records = ArenaRecords(beside, file, self.num_segments, self.segment_bytes, disk)
        try:
            self._open_arena(file, device)
        except (OSError, ConfigError) as error:
            if not self.records.is_kept:
                raise
            self.records.begin_anew(str(error))
            self._open_arena(file, device)

    def _open_arena(self, file: Path, device: Device) -> None:
        layout = named_layout("block_first", opaque(self.segment_bytes), self.num_segments)
        touch = _leave if self.records.is_kept else pages.touch
        arena = Arena(layout, device, ArenaOptions(file=file), touch)
        try:
            fd = open_file(file, os.O_RDWR)
            try:
                self.records.begin(fd)
            except BaseException:
                os.close(fd)
                raise
        except BaseException:
            arena.close()
            raise
        self._arena, self.fd = arena, fd

    def check_block(self, block_bytes: int) -> None:
        """Raise ``ConfigError`` for a block size that no tier can have."""
        if self.num_bytes // block_bytes > MAX_SLOTS:
            raise ConfigError(
                f"a block of {block_bytes} bytes is too small: {self.num_bytes} bytes of memory "
                f"would have more than {MAX_SLOTS} slots; use larger blocks"
            )
        if block_bytes > self.segment_bytes:
            raise ConfigError(
                f"segment_capacity: a block of {block_bytes} bytes does not fit into a segment of "
                f"{self.segment_bytes}; raise it"
            )

    @property
    def num_free(self) -> int:
        """Number of segments that belong to no tier and whose pages are ready."""
        num_later = self.num_segments - self._arena.num_ready_blocks
        return max(0, len(self._free) - num_later)

    @property
    def free_segments(self) -> Sequence[int]:
        """Segments that belong to no tier."""
        return self._free

    def take(self, tier: SegmentTier) -> int | None:
        """Return a free segment for a tier, the lowest one. None if none is free and ready."""
        if not self.num_free:
            return None
        segment = heappop(self._free)
        if not tier.rows.prepare(tier.slots_of(segment)):
            logger.warning("no memory for the records of segment %d", segment)
            heappush(self._free, segment)
            return None
        self.records.owners[segment] = tag_of(tier.partition)
        return segment

    def give_back(self, segment: int) -> None:
        """Return a segment whose slots are all unused to the free ones."""
        self.records.owners[segment] = FREE
        heappush(self._free, segment)

    def close(self) -> None:
        """Release the memory. Engines that have mapped it keep it until they unmap it."""
        self._arena.close()
        self.records.close()
        os.close(self.fd)
        self._unlock()

    def _unlock(self) -> None:
        """Release the directories, and remove empty ones."""
        while self._locks:
            directory, lock = self._locks.popitem()
            lock.release()
            with suppress(OSError):  # a killed node's memory is in it, or it is mounted
                directory.rmdir()


def _leave(address: int, num_bytes: int, threads: int, is_wanted: Callable[[], bool]) -> bool:
    """Touch no page of an arena that was touched before: its bytes are of use."""
    return True


class LockFile:
    """File that only this process holds. It is removed when it is released.

    Raises ``BlockingIOError`` if another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        while self._fd < 0:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), path.lstat()):
                    self._fd = fd
            except FileNotFoundError:  # its holder has released it meanwhile
                pass
            finally:
                if self._fd < 0:
                    os.close(fd)

    def release(self) -> None:
        """Remove the file, and let another process make it."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _beside(directory: Path) -> Path:
    """Return the directory of the records: another one if files can't be written in this one.

    On hugetlbfs they can't, and a file of any size would take a huge page.
    """
    there = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    if os.statvfs(there).f_bsize < pages.HUGE_PAGE_BYTES:
        return directory
    name = str(directory.absolute()).strip("/").replace("/", "-")
    return SHARED_MEMORY / f"kvtier-records-{name}"


def _lock(directory: Path) -> LockFile:
    """Return a lock file in ``directory``."""
    lock = directory / "lock"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        if not S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ConfigError(
                f"memory_path: others may write to {directory}, or it is no directory of this "
                "user; remove it, or name another one"
            )
        with suppress(FileNotFoundError):
            if not S_ISREG(lock.lstat().st_mode):  # no node can have locked it
                remove(lock)
        return LockFile(lock)
    except BlockingIOError:
        raise ConfigError(
            f"memory_path: another node uses {directory}; stop it, or name another directory"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"memory_path: {directory} can't be used: {error.strerror}; name a directory in memory "
            "that this user can write to"
        ) from error


class SegmentTier(MemoryTier):
    """Slots of one block size, in the segments of a node's arena that belong to it.

    Segments are added and retired while it serves. A retired segment gives out no more slots, and
    ``take_empty`` returns it once its last slot was freed.

    A slot has a generation, which grows each time that the slot is given out or freed. It lies in
    memory that engines map, too: an engine that reads a slot compares it after its copy.

    Args:
        node: the arena.
        partition: name of the partition, for the files of its slots.
        block_bytes: bytes of a block.
        key_bytes: length of a block's key.

    Attributes:
        rows: the files.
        fd: file descriptor of the generations, for reading.
        generations: int64 [num_slots].
        users: uint64 [num_slots], engines that use each slot; see ``SlotUsers``.
    """

    def __init__(self, node: NodeMemory, partition: str, block_bytes: int, key_bytes: int) -> None:
        node.check_block(block_bytes)
        num_slots = node.num_bytes // block_bytes
        layout = named_layout("block_first", opaque(block_bytes), num_slots)
        super().__init__(HOST, node.memory, layout)
        self.seams = node.seams
        self._segment_bytes = node.segment_bytes
        self._block_bytes = block_bytes
        self._open: dict[int, tuple[FreeSlots, int]] = {}  # free slots, number of the first slot
        self._retired: dict[int, int] = {}  # segment: slots that are still in use
        self._with_free: dict[int, None] = {}
        self._num_free = self._num_open = self._num_used = 0
        self.partition = partition
        self.rows = node.records.rows(partition, key_bytes, num_slots)
        self.fd = self.rows.fd
        self.generations, self.users = self.rows.generations, self.rows.users

    # -- segments ----------------------------------------------------------------------------------

    def slots_of(self, segment: int) -> range:
        """Return the slots that lie in a segment as a whole."""
        begin, end = segment * self._segment_bytes, (segment + 1) * self._segment_bytes
        return range(-(-begin // self._block_bytes), end // self._block_bytes)

    def segments_of(self, slots: Int64s) -> Int64s:
        """Return the segment of each slot."""
        return slots * self._block_bytes // self._segment_bytes

    @property
    def segments(self) -> Sequence[int]:
        """Segments that belong to the tier, without the retired ones."""
        return list(self._open)

    @property
    def num_segments(self) -> int:
        """Number of ``segments``."""
        return len(self._open)

    @property
    def retired_segments(self) -> Sequence[int]:
        """Retired segments, until ``take_empty`` has returned them."""
        return list(self._retired)

    def add(self, segment: int) -> None:
        """Add a segment; its slots are free."""
        slots = self.slots_of(segment)
        free = FreeSlots(len(slots))
        free.open(0, len(slots))
        self._open[segment] = free, slots.start
        self._with_free[segment] = None
        self._num_free += len(slots)
        self._num_open += len(slots)

    def restore(self, segment: int, are_used: Bools) -> None:
        """Add a segment some of whose slots are used. are_used: bool [number of its slots]."""
        free = FreeSlots(len(are_used))
        free.open(0, len(are_used))
        if len(are_used):
            free.take(len(are_used))
            free.free(np.flatnonzero(~are_used).tolist())
        self._open[segment] = free, self.slots_of(segment).start
        if free.num_free():
            self._with_free[segment] = None
        self._num_free += free.num_free()
        self._num_open += len(are_used)
        self._num_used += int(are_used.sum())

    def retire(self, segment: int) -> None:
        """Give out no more slots of a segment."""
        free, _ = self._open.pop(segment)
        self._with_free.pop(segment, None)
        num_slots = len(self.slots_of(segment))
        self._retired[segment] = num_slots - free.num_free()
        self._num_free -= free.num_free()
        self._num_open -= num_slots

    def take_empty(self) -> list[int]:
        """Return the retired segments whose slots are all free, and remove them from this tier."""
        empty = [segment for segment, num_used in self._retired.items() if not num_used]
        for segment in empty:
            del self._retired[segment]
        return empty

    # -- slots -------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._num_open

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self._num_used

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        check_count(num_slots)
        if num_slots > self._num_free:
            return None
        parts = [*self._take(num_slots)] or [np.zeros(0, np.int64)]
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.generations[slots] = (self.generations[slots] + 1) | 1  # odd, whatever it was
        self._num_free -= num_slots
        self._num_used += num_slots
        return as_numbers(slots)

    def _take(self, num_slots: int) -> Iterator[Int64s]:
        """Yield slots: one run of neighbours if a segment has it, else the lowest ones."""
        left = num_slots
        for segment in self.segments_for(num_slots):
            num = min(left, self._open[segment][0].num_free())
            left -= num
            yield self._take_from(segment, num)

    def segments_for(self, num_slots: int) -> list[int]:
        """Return segments with free slots, so many of them if there are, in the order of use.

        It is one if it has as many neighbours.
        """
        found: list[int] = []
        for segment in islice(self._with_free, CANDIDATES):
            if self._open[segment][0].longest_run() >= num_slots:
                return [segment]
        for segment in self._with_free:
            if num_slots <= 0:
                break
            found.append(segment)
            num_slots -= self._open[segment][0].num_free()
        return found

    def free_slots(self, segments: Sequence[int]) -> tuple[tuple[FreeSlots, int], ...]:
        """Return the free slots of segments, numbered from its first one, and that slot."""
        return tuple([self._open[segment] for segment in segments])

    def note_taken(self, segments: Sequence[int], num_slots: int) -> None:
        """Count slots that were taken out of ``free_slots``. num_slots: of all segments."""
        for segment in segments:
            if not self._open[segment][0].num_free():
                self._with_free.pop(segment, None)
        self._num_free -= num_slots
        self._num_used += num_slots

    def _take_from(self, segment: int, num_slots: int) -> Int64s:
        free, first = self._open[segment]
        taken = np.asarray(free.take(num_slots), np.int64) + first
        if not free.num_free():
            self._with_free.pop(segment, None)
        return taken

    def free(self, slots: Sequence[Slot]) -> None:
        if not len(slots):
            return
        low, high = free_rows(slots, self.generations, self.users)
        first, last = (slot * self._block_bytes // self._segment_bytes for slot in (low, high))
        parts: Iterable[tuple[int, Sequence[Slot]]] = [(first, slots)]
        for segment, mine in parts if first == last else self._by_segment(slots):
            self._num_used -= len(mine)
            if segment in self._retired:
                self._retired[segment] -= len(mine)
                continue
            free, start = self._open[segment]
            free.free(mine, start)
            self._with_free.setdefault(segment)
            self._num_free += len(mine)

    def _by_segment(self, slots: Sequence[Slot]) -> Iterator[tuple[int, Sequence[Slot]]]:
        freed = np.asarray(slots, np.int64)
        segments = self.segments_of(freed)
        for segment in np.unique(segments).tolist():
            yield segment, as_numbers(freed[segments == segment])

    def longest_run(self) -> int:
        some = list(islice(self._with_free, CANDIDATES))
        return max((self._open[segment][0].longest_run() for segment in some), default=0)

    def check_invariants(self) -> None:
        """Raise AssertionError if segments and counts don't agree."""
        num_free = {segment: free.num_free() for segment, (free, _) in self._open.items()}
        assert self._num_free == sum(num_free.values()), "free slots are counted wrongly"
        assert self._with_free.keys() == {each for each, num in num_free.items() if num}
        num_open = sum(len(self.slots_of(segment)) for segment in self._open)
        assert self._num_open == num_open, "open slots are counted wrongly"
        num_retired = sum(self._retired.values())
        assert self._num_used == num_open - self._num_free + num_retired, "a slot is lost"

    def close(self) -> None:
        """Close the files; the arena is the node's."""
        self.rows.close()
