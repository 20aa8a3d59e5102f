"""Files beside a node's arena, from which the next node takes its blocks over after a crash.

    memory                 the arena
    lock                   locked by the node that owns the directory
    records/header         what the files are for; any other header means new memory
    records/segments       uint64 [num_segments], tag of the partition that each segment is of
    records/*.generations  per partition int64 [num_slots], mapped by engines, too
    records/*.slots        per partition uint64 [num_slots], engines that use each slot, and records
    records/engine-NUMBER  an engine, see ``users``

Header and engines have a checksum, and a segment's tag is one of a few 64-bit hashes. If any of
them is wrong, or a file is missing or has another size, nothing of the memory is taken over: slots
that an engine still writes to could be given away.

A slot's generation is odd while the slot is allocated, and even while it is free. A record counts
only while it has the generation of its slot. So a slot loses its record the moment that it is
freed, and before anybody writes to it. After that come the data, its checksum and the record.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier.core.errors import ConfigError
from kvtier.core.hot import crc32c_rows
from kvtier.core.system.private_files import (
    open_file,
    read_checked_file,
    remove,
    replace_checked_file,
)
from kvtier.index.selection import Int64s
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.server.users import SlotUsers
from kvtier.tiers.disk.format.folder import DATA

logger = logging.getLogger(__name__)

FORMAT = 2
FOLDER, HEADER, SEGMENTS = "records", "header", "segments"
GENERATIONS, SLOTS = ".generations", ".slots"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
IO_END_S = 10.0
"""Longest wait for reads of a dead node that the kernel has yet to end."""
CRC_BYTES = 4

Uint64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Records = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    """Description of the files.

    boot: the system's start, since memory and processes of an earlier one are gone. inode: of the
    arena. disk: directory of the slabs, "" for none.
    """

    format: int
    boot: str
    num_segments: int
    segment_bytes: int
    inode: int
    disk: str


def record_type(key_bytes: int) -> np.dtype[np.void]:
    """Return the type of a slot's record.

    crc: crc32c of the bytes behind it. data_crc: crc32c of the block. generation: of the slot when
    the block was written. depth: position of the block in its prompt. time: unix time.
    """
    return np.dtype(
        [
            ("crc", "<u4"),
            ("data_crc", "<u4"),
            ("generation", "<i8"),
            ("depth", "<u4"),
            ("time", "<u4"),
            ("key", f"V{key_bytes}"),
        ]
    )


def row_bytes(key_bytes: int, num_slots: int) -> tuple[int, int]:
    """Return the sizes of a partition's two files."""
    sizes = 8 * num_slots, (8 + record_type(key_bytes).itemsize) * num_slots
    return max(sizes[0], mmap.PAGESIZE), max(sizes[1], mmap.PAGESIZE)


def _crcs(records: Records) -> npt.NDArray[np.uint32]:
    size = records.dtype.itemsize
    return crc32c_rows(records.view(np.uint8).reshape(len(records), size)[:, CRC_BYTES:])


class PartitionRows:
    """Rows of one partition's slots, in files that outlive the node.

    Attributes:
        fd: descriptor of the generations, for reading only.
        generations: int64 [num_slots].
        users: uint64 [num_slots], a bit per engine; see ``SlotUsers``.
        records: [num_slots] of ``record_type``.
    """

    def __init__(self, folder: Path, name: str, key_bytes: int, num_slots: int) -> None:
        path = folder / f"{name}{GENERATIONS}"
        record = record_type(key_bytes)
        sizes = row_bytes(key_bytes, num_slots)
        self._parts: list[tuple[int, int, int]] = []  # descriptor, offset, bytes per slot
        self._fds: list[int] = []
        try:
            generations = self._open(path, sizes[0])
            others = self._open(folder / f"{name}{SLOTS}", sizes[1])
            self.fd = open_file(path, os.O_RDONLY)
        except OSError:
            self.close()
            raise
        self.generations: Int64s = np.frombuffer(generations, np.int64, num_slots)
        self.users: Uint64s = np.frombuffer(others, np.uint64, num_slots)
        self.records: Records = np.frombuffer(others, record, num_slots, 8 * num_slots)
        self._parts = [
            (self._fds[0], 0, 8),
            (self._fds[1], 0, 8),
            (self._fds[1], 8 * num_slots, record.itemsize),
        ]

    def _open(self, path: Path, num_bytes: int) -> mmap.mmap:
        fd = open_file(path, os.O_RDWR | os.O_CREAT)
        self._fds.append(fd)
        os.ftruncate(fd, num_bytes)
        return mmap.mmap(fd, num_bytes)

    def prepare(self, slots: range) -> bool:
        """Allocate the memory of some rows. Return False if there is none.

        Otherwise the first store to a row would end the process.
        """
        try:
            for fd, offset, size in self._parts:
                os.posix_fallocate(fd, offset + slots.start * size, max(1, len(slots) * size))
        except OSError:
            return False
        return True

    def write(
        self,
        slots: Int64s,
        generations: Int64s,
        keys: npt.NDArray[np.void],
        depths: Int64s,
        data_crcs: npt.NDArray[np.uint32],
    ) -> None:
        """Write the records of blocks. generations: those before the checksums were computed."""
        records = np.zeros(len(slots), self.records.dtype)
        records["data_crc"] = data_crcs
        records["generation"] = generations
        records["depth"] = np.clip(depths, 0, 0xFFFFFFFF)
        records["time"] = int(time.time())
        records["key"] = keys
        records["crc"] = _crcs(records)
        self.records[slots] = records

    def are_valid(self, slots: range) -> Bools:
        """Return which slots have a record that counts: bool [n]."""
        records = self.records[slots.start : slots.stop]
        generations = self.generations[slots.start : slots.stop]
        is_current = (records["generation"] == generations) & (generations % 2 == 1)
        return np.asarray(is_current & (records["crc"] == _crcs(records)))

    def outdate_records(self, slots: range) -> None:
        """Raise generations that a record is ahead of, so that it never counts again.

        A generation only grows: one below that of a record has been damaged.
        """
        records = self.records[slots.start : slots.stop]
        generations = self.generations[slots.start : slots.stop]
        is_ahead = (records["crc"] == _crcs(records)) & (records["generation"] > generations)
        generations[is_ahead] = records["generation"][is_ahead] + 1
        generations[generations < 0] = 0

    def renew(self, slots: Int64s) -> None:
        """Give allocated slots another generation: their records count no more."""
        self.generations[slots] += 2

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (*self._fds, getattr(self, "fd", -1)):
            with suppress(OSError):
                os.close(fd)
        self._fds.clear()


class ArenaRecords:
    """The files beside an arena.

    Args:
        directory: directory of the records, locked by this process.
        file: the arena.
        num_segments, segment_bytes: of the arena.
        disk: directory of the slabs, "" for none.

    Attributes:
        is_kept: whether the arena of an earlier node is taken over.
        owners: uint64 [num_segments], tag of the partition of each segment, or ``FREE``.
        users: engines that may use slots.

    Raises:
        OSError: what an earlier node has left can't be removed.
    """

    def __init__(
        self,
        directory: Path,
        file: Path,
        num_segments: int,
        segment_bytes: int,
        disk: str = "",
    ) -> None:
        self._folder = directory / FOLDER
        self._file = file
        boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
        disk = str(Path(disk).absolute()) if disk else ""
        self._header = ArenaHeader(FORMAT, boot, num_segments, segment_bytes, 0, disk)
        self._found: ArenaHeader | None = None
        self._map: mmap.mmap | None = None
        self.owners: Uint64s = np.full(num_segments, FREE, np.uint64)
        self.users = SlotUsers(self._folder)
        reason = self._why_new()
        self.is_kept = reason is None
        if reason is not None:
            self.begin_anew(reason)

    def begin_anew(self, reason: str) -> None:
        """Remove the files of the previous process. reason: why; "" if no block is lost."""
        if reason:
            logger.warning("the blocks in memory of the previous node are lost: %s", reason)
        self.is_kept = False
        self._found = None
        self.users = SlotUsers(self._folder)
        remove(self._file)
        remove(self._folder)
        self._folder.mkdir(mode=0o700)

    def _why_new(self) -> str | None:
        """Return why the memory of an earlier node can't be taken over.

        None if it can be; "" if there is none.
        """
        try:
            content = read_checked_file(self._folder / HEADER)
        except FileNotFoundError:  # a node that died before its memory was ready
            return ""
        except (OSError, ValueError) as error:
            return _unreadable(error)
        try:
            found = msgspec.json.decode(content, type=ArenaHeader)
            memory = self._file.lstat()
            if found.format != FORMAT:
                return f"it has records of format {found.format}, and this version writes {FORMAT}"
            if found.boot != self._header.boot or found.inode != memory.st_ino:
                return ""
            reason = self._mismatch(found, memory.st_size)
            if reason:
                return reason
            self.users.load()
            self._check_segments(found)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            return _unreadable(error)
        if found.disk and not _is_io_over(Path(found.disk)):
            return f"reads from {found.disk} may be in flight still"
        self._found = found
        return None

    def _mismatch(self, found: ArenaHeader, num_bytes: int) -> str:
        """Return why the memory is of no use to this node; "" if it is. num_bytes: its size."""
        sizes = (found.num_segments, found.segment_bytes)
        wanted = (self._header.num_segments, self._header.segment_bytes)
        if sizes != wanted:
            return (
                f"it has {sizes[0]} segments of {sizes[1]} bytes, and the configuration wants "
                f"{wanted[0]} of {wanted[1]}"
            )
        if num_bytes != sizes[0] * sizes[1]:
            return f"a process has changed its size to {num_bytes} bytes"
        return ""

    def _check_segments(self, found: ArenaHeader) -> None:
        """Raise ``ValueError`` or ``OSError`` if the rows of a segment are not whole."""
        with os.fdopen(open_file(self._folder / SEGMENTS, os.O_RDONLY), "rb") as file:
            content = file.read(8 * found.num_segments + 1)
        if len(content) != 8 * found.num_segments:
            raise ValueError(f"{SEGMENTS} has another size")
        tags = set(np.frombuffer(content, np.uint64).tolist()) - {FREE}
        for name in self.partitions():
            if tag_of(name) in tags:
                tags.remove(tag_of(name))
                self._check_rows(name, found.num_segments * found.segment_bytes)
        if tags:
            raise ValueError(f"{SEGMENTS} names rooms that are not there")

    def _check_rows(self, name: str, num_bytes: int) -> None:
        """Raise ``ValueError`` or ``OSError`` if a partition's files are not of the right size."""
        key = PartitionKey.of_folder(name)
        if key is None:
            raise ValueError(f"{name} is no room")
        sizes = row_bytes(key.key_bytes, num_bytes // key.block_bytes)
        for ending, size in zip((GENERATIONS, SLOTS), sizes, strict=True):
            fd = open_file(self._folder / f"{name}{ending}", os.O_RDONLY)
            try:
                found = os.fstat(fd).st_size
            finally:
                os.close(fd)
            if found != size:
                raise ValueError(f"{name}{ending} has another size")

    def begin(self, memory_fd: int) -> None:
        """Note the arena, once it is there. memory_fd: its descriptor. Raises ``OSError``."""
        self.users.memory_fd = memory_fd
        fd = open_file(self._folder / SEGMENTS, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, self.owners.nbytes)
            self._map = mmap.mmap(fd, self.owners.nbytes)
        finally:
            os.close(fd)
        self.owners = np.frombuffer(self._map, np.uint64)
        if not self.is_kept:
            self.owners[:] = FREE
        header = replace(self._header, inode=os.fstat(memory_fd).st_ino)
        if header != self._found:  # there may be no memory left for a new one
            content = msgspec.json.encode(header).decode()
            replace_checked_file(self._folder / HEADER, content)

    def partitions(self) -> list[str]:
        """Return the names of the partitions that have rows."""
        names = (path.name for path in self._folder.glob(f"*{GENERATIONS}"))
        return sorted(name.removesuffix(GENERATIONS) for name in names)

    def rows(self, name: str, key_bytes: int, num_slots: int) -> PartitionRows:
        """Open the rows of a partition. Raises ``ConfigError``."""
        try:
            if not self.segments_of(name):  # rows of an earlier node, which say nothing any more
                for ending in GENERATIONS, SLOTS:
                    remove(self._folder / f"{name}{ending}")
            return PartitionRows(self._folder, name, key_bytes, num_slots)
        except OSError as error:
            raise ConfigError(
                f"memory_path: rows of {num_slots} slots can't be made in {self._folder}: "
                f"{error.strerror}; enlarge it"
            ) from error

    def segments_of(self, name: str) -> list[int]:
        """Return the segments that belong to a partition."""
        found: list[int] = np.flatnonzero(self.owners == np.uint64(tag_of(name))).tolist()
        return found

    def close(self) -> None:
        """Delete the files, with the arena."""
        with suppress(OSError):
            remove(self._folder)


def tag_of(name: str) -> int:
    """Return the number that stands for a partition in ``ArenaRecords.owners``."""
    return int.from_bytes(blake3(name.encode()).digest(8), "little") | 1


FREE = tag_of("")
"""Owner of a segment of no partition. It is not 0, so that memory that was lost is no tag."""


def _unreadable(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename} can't be read: {error.strerror}"
    return f"its records can't be read: {error}"


def _is_io_over(disk: Path) -> bool:
    """Return whether no slab is open for writing any more, after waiting for it a while.

    A request of io_uring keeps its file open until it has ended, also after its process has died:
    until then the device may write to the memory.
    """
    is_over: list[bool] = []

    def wait() -> None:
        end_s = time.monotonic() + IO_END_S
        with suppress(OSError):  # a disk that can't be read may still write
            for data in sorted(disk.rglob(DATA)):
                while not _is_unused(data):
                    if time.monotonic() > end_s:
                        return
                    time.sleep(0.01)
            is_over.append(True)

    thread = Thread(target=wait, name="kvtier-node-io", daemon=True)  # a disk may hang
    thread.start()
    thread.join(IO_END_S + 1)
    return bool(is_over)


def _is_unused(data: Path) -> bool:
    """Return whether a file is not open for writing, by the rule of leases on files."""
    try:
        fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
