"""The log of a bucket: numbered objects that bring the manifests of all writers to all readers.

    magic    8   "kvtierL1"
    check    4   crc32c of all, with zeros here
    entries  4   number of entries
    writer   8   of this object
    pace     4   shortest interval at which a process should publish, ms
    zeros    4
    covered  8   all manifests that were written before this time are in the log, ns
    used     8   bytes of all packs; 0 if they are not counted
    touch    4   a pack that was not used for this long counts as unused, s
    deleted  4   number of deleted packs
    stamp    8   stamp of the deletions
    of each entry
      length   2   of the path
      size     4   of the manifest; 0 if its content is in the log already
      path, manifest
    of each deleted pack
      name    40

Numbers are little-endian. A number is taken by the one process that creates its object, so all
readers see the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import Final

from kvtier.tiers.crc_join import checksum
from kvtier.tiers.remote.bucket.packs import NAME_BYTES, PackName

FOLDER: Final = "log"
MAGIC: Final = b"kvtierL1"
HEAD: Final = Struct("<8sII8sIIQQIIQ")
ENTRY: Final = Struct("<HI")


@dataclass(frozen=True, slots=True)
class LogObject:
    """One object of the log.

    entries: path and content of each manifest. b"" for a content that is in the log already.
    covered_ns: all manifests that were written before this time are in the log, by the store's
        clock.
    used_bytes: size of all packs; 0 if it is not known.
    deleted: packs that were deleted to make room, by a process whose stamp was ``stamp``.
    """

    writer: str
    entries: Sequence[tuple[str, bytes]] = ()
    pace_ms: int = 0
    covered_ns: int = 0
    used_bytes: int = 0
    touch_s: int = 0
    deleted: Sequence[PackName] = ()
    stamp: int = 0

    def to_bytes(self) -> bytes:
        parts = []
        for path, content in self.entries:
            name = path.encode()
            parts += [ENTRY.pack(len(name), len(content)), name, content]
        body = b"".join([*parts, *self.deleted])
        check = checksum(self._head(0) + body)
        return self._head(check) + body

    def _head(self, check: int) -> bytes:
        return HEAD.pack(
            MAGIC,
            check,
            len(self.entries),
            bytes.fromhex(self.writer),
            self.pace_ms,
            0,
            self.covered_ns,
            self.used_bytes,
            self.touch_s,
            len(self.deleted),
            self.stamp,
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> LogObject | None:
        """Parse an object of the log. Return None if it is invalid or damaged."""
        try:
            return cls._read(content)
        except (StructError, UnicodeDecodeError):
            return None

    @classmethod
    def _read(cls, content: bytes) -> LogObject | None:
        magic, check, num_entries, writer, pace, _, covered, used, touch, num_deleted, stamp = (
            HEAD.unpack_from(content)
        )
        if magic != MAGIC or checksum(content[:8] + bytes(4) + content[12:]) != check:
            return None
        entries, at = [], HEAD.size
        for _ in range(num_entries):
            length, size = ENTRY.unpack_from(content, at)
            begin = at + ENTRY.size + length
            at = begin + size
            entries.append((content[begin - length : begin].decode(), content[begin:at]))
        names = content[at:]
        if len(names) != num_deleted * NAME_BYTES:
            return None
        deleted = [
            PackName(names[one : one + NAME_BYTES]) for one in range(0, len(names), NAME_BYTES)
        ]
        return cls(writer.hex(), entries, pace, covered, used, touch, deleted, stamp)


def log_path(number: int) -> str:
    """Return the path of an object of the log below the prefix."""
    return f"{FOLDER}/{number:012d}"


def number_of(path: str) -> int:
    """Return the number of an object of the log; 0 for another object."""
    name = path.rpartition("/")[2]
    return int(name) if len(name) == 12 and name.isdecimal() else 0
