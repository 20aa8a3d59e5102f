"""Files beside a node's arena, from which the next node takes its blocks over after a crash.

    memory                       the arena
    lock                         locked by the node that owns the directory
    records/header               what the files are for; any other header means new memory
    records/segments             uint64 [num_segments], the room that each segment belongs to
    records/ROOM.generations     int64 [num_slots], mapped by engines, too
    records/ROOM.slots           uint64 [num_slots], engines that use each slot; a record per slot
    records/engine-NUMBER        an engine, see ``users``

A slot's generation is odd while the slot is allocated, and even while it is free. A record counts
only while it has the generation of its slot. So a slot loses its record the moment that it is
freed, and before anybody writes to it. After that come the data, its checksum and the record.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier._hot import crc32c_rows
from kvtier.errors import ConfigError
from kvtier.index.selection import Int64s
from kvtier.node.users import SlotUsers
from kvtier.system.private_files import open_file, replace_file
from kvtier.tiers.disk.format.folder import DATA

logger = logging.getLogger(__name__)

FORMAT = 1
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


def _crcs(records: Records) -> npt.NDArray[np.uint32]:
    size = records.dtype.itemsize
    return crc32c_rows(records.view(np.uint8).reshape(len(records), size)[:, CRC_BYTES:])


class RoomRows:
    """Rows of one room's slots, in files that outlive the node.

    Attributes:
        fd: descriptor of the generations, for reading only.
        generations: int64 [num_slots].
        users: uint64 [num_slots], a bit per engine; see ``SlotUsers``.
        records: [num_slots] of ``record_type``.
    """

    def __init__(self, folder: Path, name: str, key_bytes: int, num_slots: int) -> None:
        path = folder / f"{name}{GENERATIONS}"
        record = record_type(key_bytes)
        self._parts: list[tuple[int, int, int]] = []  # descriptor, offset, bytes per slot
        self._fds: list[int] = []
        try:
            generations = self._open(path, 8 * num_slots)
            others = self._open(folder / f"{name}{SLOTS}", (8 + record.itemsize) * num_slots)
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
        num_bytes = max(num_bytes, mmap.PAGESIZE)
        os.ftruncate(fd, num_bytes)
        return mmap.mmap(fd, num_bytes)

    def prepare(self, slots: range) -> bool:
        """Allocate the memory of some rows. Return False if there is none.

        Otherwise the first store to a row would end the process.
        """
        try:
            for fd, offset, size in self._parts:
                os.posix_fallocate(fd, offset + slots.start * size, max(1, len(slots) * size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
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
        owners: uint64 [num_segments], tag of the room that each segment belongs to; 0 for none.
        users: engines that may use slots.
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
        self.users = SlotUsers(self._folder)
        reason = self._why_new()
        self.is_kept = reason is None
        if reason is not None:
            if reason:
                logger.warning("the blocks in memory of the node before are lost: %s", reason)
            self.users = SlotUsers(self._folder)
            self._file.unlink(missing_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700)
        self._map: mmap.mmap | None = None
        self.owners: Uint64s = np.zeros(num_segments, np.uint64)

    def _why_new(self) -> str | None:
        """Return why the memory of an earlier node can't be taken over.

        None if it can be; "" if there is none.
        """
        try:
            found = ArenaHeader(**json.loads((self._folder / HEADER).read_text()))
            inode = self._file.stat().st_ino
        except (OSError, ValueError, TypeError):
            return ""
        wanted = self._header
        if found.format != wanted.format:
            return f"it has records of format {found.format}, and this version writes {FORMAT}"
        if found.boot != wanted.boot or found.inode != inode:
            return ""
        sizes = (found.num_segments, found.segment_bytes)
        if sizes != (wanted.num_segments, wanted.segment_bytes):
            return (
                f"it has {found.num_segments} segments of {found.segment_bytes} bytes, and the "
                f"configuration wants {wanted.num_segments} of {wanted.segment_bytes}"
            )
        try:
            owners = np.fromfile(self._folder / SEGMENTS, np.uint64)
            self.users.load()
        except (OSError, ValueError, TypeError, KeyError) as error:
            return f"its records can't be read: {error}"
        tags = {tag_of(name) for name in self.rooms()}
        if len(owners) != found.num_segments or not tags.issuperset(owners[owners > 0].tolist()):
            return "its records are damaged"
        if found.disk and not _is_io_over(Path(found.disk)):
            return f"reads from {found.disk} may be in flight still"
        return None

    def begin(self, memory_fd: int) -> None:
        """Note the arena, once it is there. memory_fd: its descriptor."""
        self.users.memory_fd = memory_fd
        fd = open_file(self._folder / SEGMENTS, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, self.owners.nbytes)
            self._map = mmap.mmap(fd, self.owners.nbytes)
        finally:
            os.close(fd)
        self.owners = np.frombuffer(self._map, np.uint64)
        header = asdict(self._header) | {"inode": os.fstat(memory_fd).st_ino}
        replace_file(self._folder / HEADER, json.dumps(header))

    def rooms(self) -> list[str]:
        """Return the names of the rooms that have rows."""
        names = (path.name for path in self._folder.glob(f"*{GENERATIONS}"))
        return sorted(name.removesuffix(GENERATIONS) for name in names)

    def rows(self, name: str, key_bytes: int, num_slots: int) -> RoomRows:
        """Open the rows of a room. Raises ``ConfigError``."""
        try:
            return RoomRows(self._folder, name, key_bytes, num_slots)
        except OSError as error:
            raise ConfigError(
                f"memory_path: rows of {num_slots} slots can't be made in {self._folder}: "
                f"{error.strerror}; enlarge it"
            ) from error

    def segments_of(self, name: str) -> list[int]:
        """Return the segments that belong to a room."""
        found: list[int] = np.flatnonzero(self.owners == np.uint64(tag_of(name))).tolist()
        return found

    def close(self) -> None:
        """Delete the files, with the arena."""
        shutil.rmtree(self._folder, ignore_errors=True)


def tag_of(name: str) -> int:
    """Return the number that stands for a room in ``ArenaRecords.owners``; never 0."""
    return int.from_bytes(blake3(name.encode()).digest(8), "little") | 1


def _is_io_over(disk: Path) -> bool:
    """Return whether no slab is open for writing any more, after waiting for it a while.

    A request of io_uring keeps its file open until it has ended, also after its process has died:
    until then the device may write to the memory.
    """
    is_over: list[bool] = []

    def wait() -> None:
        end_s = time.monotonic() + IO_END_S
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
