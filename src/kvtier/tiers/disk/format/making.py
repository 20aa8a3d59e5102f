"""Creation of a slab. Its superblock is written last."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.system.private_files import open_file
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
from kvtier.tiers.disk.system import DiskSystem

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_new(folder: Path) -> bool:
    """Return whether the folder is empty, missing, or has a slab whose creation was interrupted."""
    try:
        there = {each.name for each in folder.iterdir()} - {LOCK}
    except (FileNotFoundError, NotADirectoryError):
        return True
    return not there or (NEW_SUPERBLOCK in there and SUPERBLOCK not in there)


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
    return ConfigError(
        f"disk tier: a capacity of {want.slot_bytes * want.num_slots / 2**30:.2f} GiB does not fit "
        f"into {folder}: {error.strerror} ({shutil.disk_usage(folder).free / 2**30:.2f} GiB are "
        "free); lower capacity_bytes or choose another path"
    )
