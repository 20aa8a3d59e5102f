"""Creation of a slab. Its superblock is written last."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from pathlib import Path

from kvtier.core.errors import ConfigError
from kvtier.core.system.private_files import open_file
from kvtier.tiers.disk.format.folder import (
    DATA,
    JOURNAL,
    LOCK,
    NEW_JOURNAL,
    NEW_SUPERBLOCK,
    SUPERBLOCK,
    TRUST,
)
from kvtier.tiers.disk.format.journal import make_spare, max_journal_bytes
from kvtier.tiers.disk.format.records import RECORD_BYTES, header, seal
from kvtier.tiers.disk.format.superblock import Superblock
from kvtier.tiers.disk.recovery.trust import reserve_trust
from kvtier.tiers.disk.slab import write_superblock
from kvtier.tiers.disk.system import DiskSystem, spare_bytes

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_new(folder: Path) -> bool:
    """Return whether the folder is missing, or has no slab and nothing but files of one.

    Such files are left by a creation that was interrupted, and by a process under which the folder
    was emptied: it writes some of them when it ends. A new file system has ``lost+found``, too.
    """
    try:
        there = {each.name for each in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return True
    is_interrupted = NEW_SUPERBLOCK in there and SUPERBLOCK not in there
    return is_interrupted or not there - {JOURNAL, NEW_JOURNAL, TRUST, LOCK, "lost+found"}


def make_slab(folder: Path, want: Superblock, system: DiskSystem) -> None:
    """Create the files of an empty slab, and allocate all space that it will ever need.

    Raises ``ConfigError`` if there is too little space. Created files are removed then.
    """
    created = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    fds: list[int] = []
    try:
        fds.append(new := open_file(folder / NEW_SUPERBLOCK, created))
        fds.append(data := open_file(folder / DATA, created))
        system.reserve(data, want.slot_bytes * want.num_slots)
        fds.append(journal := open_file(folder / JOURNAL, created))
        system.reserve_ahead(journal, max_journal_bytes(want.num_slots))
        make_spare(folder, want.num_slots, system)
        reserve_trust(folder, want.num_slots, system)
        first = header(want.slab_id, want.generation)
        seal(first)
        system.write_at(journal, first.tobytes(), 0)
        system.sync(data)
        system.sync(journal)
        for epoch in (0, 1):
            empty = dataclasses.replace(want, epoch=epoch, journal_bytes=RECORD_BYTES)
            write_superblock(new, empty, system)
        system.replace(folder / NEW_SUPERBLOCK, folder / SUPERBLOCK)
    except OSError as error:
        for name in (JOURNAL, NEW_JOURNAL, DATA, TRUST, NEW_SUPERBLOCK):
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        if error.errno in NO_ROOM:
            raise too_full(folder, want, error) from error
        raise
    finally:
        for fd in fds:
            os.close(fd)


def too_full(folder: Path, want: Superblock, error: OSError) -> ConfigError:
    """Return the error for a disk without room for the slab."""
    return _too_full(folder, want.slot_bytes * want.num_slots, error.strerror or "it is too full")


def check_free(folder: Path, capacity_bytes: int, has_bytes: int) -> None:
    """Raise ``ConfigError`` if the file system of ``folder`` has no room for a slab.

    has_bytes: allocated by the slab already.
    """
    if capacity_bytes - has_bytes > spare_bytes(os.statvfs(folder)):
        raise _too_full(folder, capacity_bytes, os.strerror(errno.ENOSPC))


def _too_full(folder: Path, capacity_bytes: int, reason: str) -> ConfigError:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    return ConfigError(
        f"disk tier: a capacity of {capacity_bytes / 2**30:.2f} GiB does not fit into {folder}: "
        f"{reason} ({free / 2**30:.2f} GiB are free, of which {spare_bytes(found) / 2**30:.2f} GiB "
        "may be taken); lower disk_capacity or choose another path"
    )
