"""Opening and creating slabs. An existing slab must match the configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kvtier.core.errors import ConfigError, TierError
from kvtier.core.system.private_files import open_file
from kvtier.layout import KVGroup
from kvtier.tiers.codecs.encryption import names_key
from kvtier.tiers.disk.arrays import Bools
from kvtier.tiers.disk.bounce import ALIGNMENT
from kvtier.tiers.disk.format.folder import (
    DATA,
    JOURNAL,
    LOCK,
    NEW_JOURNAL,
    NEW_SUPERBLOCK,
    SUPERBLOCK,
    TRUST,
    OwnerLock,
    in_use,
    make_folder,
    open_data,
    owner_of,
)
from kvtier.tiers.disk.format.journal import make_spare, max_journal_bytes
from kvtier.tiers.disk.format.limits import (
    BYTES_PER_SLOT,
    DELETE_OR_MOVE,
    as_far_as_data,
    check_memory,
    check_room,
    check_sequence,
    check_superblock,
)
from kvtier.tiers.disk.format.membership import check_members, enter, set_id_of
from kvtier.tiers.disk.format.records import RECORD_BYTES, header, seal
from kvtier.tiers.disk.format.rows import SlotRows
from kvtier.tiers.disk.format.superblock import (
    FORMAT_VERSION,
    HALF_BYTES,
    Membership,
    Superblock,
    decode_both,
    describe,
)
from kvtier.tiers.disk.format.trust import mark_of, read_trust, reserve_trust
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.recovery import SLAB_ID_BYTES, JournalFacts, recover
from kvtier.tiers.disk.sealing import ENCRYPTED, sealed_bytes
from kvtier.tiers.disk.slab import Slab, SlabFiles, write_superblock
from kvtier.tiers.disk.system import DiskSystem, read_at, spare_bytes

logger = logging.getLogger(__name__)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def wanted(options: DiskOptions, group: KVGroup, num_parts: int = 1) -> Superblock:
    """Return the superblock of the slab that these settings ask for.

    Args:
        options: settings of the disk tier.
        group: shape of the blocks.
        num_parts: number of equal parts that a block is cut into.

    Raises:
        ConfigError: the parts can't be equal, or the capacity is below one block.
    """
    num_bytes = sealed_bytes(options, group.bytes_per_block, num_parts)
    part_bytes, rest = divmod(num_bytes, num_parts)
    if rest:
        raise ConfigError(
            f"disk tier: a block of {group.bytes_per_block} bytes can't be cut into {num_parts} "
            "equal parts; give another number of directories, or another block_size"
        )
    slot_bytes = -(-part_bytes // ALIGNMENT) * ALIGNMENT
    num_slots = options.capacity_bytes // slot_bytes
    if num_slots < 1:
        raise ConfigError(
            f"disk tier: a capacity of {options.capacity_bytes} bytes is below one block "
            f"({slot_bytes} bytes); raise disk_capacity"
        )
    check_room(num_slots, slot_bytes)
    return Superblock(
        slot_bytes=slot_bytes,
        block_bytes=part_bytes,
        num_slots=num_slots,
        rank=options.rank,
        num_ranks=options.num_ranks,
        layout=group.fingerprint + (ENCRYPTED if names_key(options.encryption_key) else ""),
        description=describe(group),
        slab_id=secrets.token_bytes(SLAB_ID_BYTES),
        made_at=int(time.time()),
    )


def open_slabs(
    wanted: Sequence[tuple[Path, Superblock]],
    system: DiskSystem,
    clock: Callable[[], float] = time.time,
) -> list[Slab]:
    """Open the slabs of one set; each block is cut over all of them.

    If all folders are empty or missing, create the slabs. Nothing is created or changed before it
    is clear that the slabs belong together.

    Args:
        wanted: folder and expected superblock of each slab.
        system: calls to the operating system.
        clock: unix time, for records.

    Raises:
        ConfigError: another process owns a slab, a slab differs from the expected one, the slabs
            don't belong together, or a disk is too full.
        TierError: a system call failed.
    """
    with contextlib.ExitStack() as undo:
        held: dict[Path, OwnerLock] = {}
        for folder, _ in wanted:
            if not is_new(folder):
                held[folder] = _own(folder, undo)
        found = [read_superblock(folder) if folder in held else None for folder, _ in wanted]
        for (folder, want), each in zip(wanted, found, strict=True):
            if each is not None:
                _compare(folder, each[0], want)
        there = [each and each[0] for each in found]
        check_members([(folder, each) for (folder, _), each in zip(wanted, there, strict=True)])
        set_id = set_id_of(there)
        slabs: list[Slab] = []
        for folder, want in wanted:
            with _refusals_of(folder):
                if folder not in held:
                    held[folder] = _own(folder, undo)
                    _make(folder, dataclasses.replace(want, member=Membership(set_id)), system)
                current, num_whole = read_superblock(folder)
                slab = _recover(folder, held[folder], current, num_whole, want, system, clock)
                undo.callback(slab.close, clean=False)
                slabs.append(slab)
        with _refusals_of(wanted[0][0]):
            enter(slabs, set_id)
        undo.pop_all()
        return slabs


def check_folders(options: DiskOptions) -> None:
    """Raise ``ConfigError`` for a slab of another process, and for what no shape of blocks can use.

    Missing folders are made, unless the capacity is refused.
    """
    for part in options.each_part():
        folder = part.path
        with _refusals_of(folder):
            was_there = os.path.exists(folder)  # False, too, where this user may not look
            make_folder(folder)
            has_bytes = 0
            if not is_new(folder):
                if (owner := owner_of(folder)) is not None:
                    raise in_use(folder, owner)
                read_superblock(folder)
                has_bytes = (folder / DATA).lstat().st_blocks * 512
            if part.capacity_bytes - has_bytes > spare_bytes(os.statvfs(folder)):
                no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                refusal = _too_full(folder, part.capacity_bytes, no_space)
                if not was_there:
                    folder.rmdir()
                raise refusal


def open_slab(folder: Path, system: DiskSystem, clock: Callable[[], float] = time.time) -> Slab:
    """Open the slab in ``folder`` for repair, with as many slots as its data file has.

    Its set stays the same.

    Raises ``ConfigError`` if there is no slab, or another process owns it, and ``TierError`` if a
    system call fails.
    """
    read_superblock(folder)  # never make a directory where there is nothing to open
    with contextlib.ExitStack() as undo, _refusals_of(folder):
        owner = _own(folder, undo)
        current, num_whole = read_superblock(folder)
        want = as_far_as_data(folder, current)
        slab = _recover(folder, owner, current, num_whole, want, system, clock)
        undo.callback(slab.close, clean=False)
        slab.mark_open()
        undo.pop_all()
        return slab


@contextlib.contextmanager
def _refusals_of(folder: Path) -> Iterator[None]:
    """Turn ``OSError`` into ``TierError``."""
    try:
        yield
    except OSError as error:
        raise TierError("disk", f"open {folder}", str(error)) from error


def _own(folder: Path, undo: contextlib.ExitStack) -> OwnerLock:
    with _refusals_of(folder):
        make_folder(folder)
        owner = OwnerLock(folder)
    undo.callback(owner.close)
    return owner


# -- new slabs -------------------------------------------------------------------------------------


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


def _make(folder: Path, want: Superblock, system: DiskSystem) -> None:
    """Create the files of an empty slab, and allocate all space that it will ever need.

    The superblock is written last. Raises ``ConfigError`` if there is too little space. Created
    files are removed then.
    """
    if not is_new(folder):
        raise ConfigError(
            f"disk tier: another process created a slab in {folder} meanwhile; start again"
        )
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
            raise _too_full(folder, want.slot_bytes * want.num_slots, error) from error
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _too_full(folder: Path, capacity_bytes: int, error: OSError) -> ConfigError:
    """Return the error for a disk without room for the slab."""
    found = os.statvfs(folder)
    reason = error.strerror or "it is too full"
    free = found.f_bavail * found.f_frsize
    return ConfigError(
        f"disk tier: a capacity of {capacity_bytes / 2**30:.2f} GiB does not fit into {folder}: "
        f"{reason} ({free / 2**30:.2f} GiB are free, of which {spare_bytes(found) / 2**30:.2f} GiB "
        "may be taken); lower disk_capacity or choose another path"
    )


# -- existing slabs --------------------------------------------------------------------------------


def read_superblock(
    folder: Path, advice: str = "choose an empty directory or one that does not exist yet"
) -> tuple[Superblock, int]:
    """Return the current superblock, and how many of the two copies are whole.

    advice: end of the error message if there is no slab.

    Raises ``ConfigError`` if there is no superblock, its version is unknown, or its numbers are
    impossible.
    """
    try:
        fd = open_file(folder / SUPERBLOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.exists():
            raise ConfigError(f"disk tier: there is no directory {folder}; {advice}") from error
        raise ConfigError(
            f"disk tier: {folder} holds no slab (its file {SUPERBLOCK} is missing); {advice}"
        ) from error
    except OSError as error:
        raise TierError("disk", f"open {folder}", str(error)) from error
    try:
        current, num_whole = decode_both(read_at(fd, 2 * HALF_BYTES, 0))
    finally:
        os.close(fd)
    if current is None:
        raise ConfigError(
            f"disk tier: both superblocks of {folder} are damaged, so that its blocks can't be "
            f"identified; {DELETE_OR_MOVE}"
        )
    if current.version != FORMAT_VERSION:
        raise ConfigError(
            f"disk tier: the slab in {folder} has format version {current.version}, this kvtier "
            f"reads {FORMAT_VERSION}; {DELETE_OR_MOVE}"
        )
    check_superblock(folder, current)
    return current, num_whole


def _compare(folder: Path, found: Superblock, want: Superblock) -> None:
    if found.layout == want.layout + ENCRYPTED:
        raise ConfigError(
            f"disk tier: the slab in {folder} is encrypted, and no key is given; give "
            f"encryption_key, or {DELETE_OR_MOVE}"
        )
    if found.layout + ENCRYPTED == want.layout:
        raise ConfigError(
            f"disk tier: the slab in {folder} is not encrypted, and encryption_key is given; name "
            f"another folder, or {DELETE_OR_MOVE}"
        )
    different = [
        f"{name} is {theirs}, expected {ours}"
        for name, theirs, ours in (
            ("layout", found.layout, want.layout),
            ("bytes per block", found.block_bytes, want.block_bytes),
            ("bytes per slot", found.slot_bytes, want.slot_bytes),
            ("rank", f"{found.rank} of {found.num_ranks}", f"{want.rank} of {want.num_ranks}"),
        )
        if theirs != ours
    ]
    if different:
        layouts = "" if found.layout == want.layout else f" It holds {found.description}."
        raise ConfigError(
            f"disk tier: {folder} holds a different slab: {'; '.join(different)}.{layouts} "
            "Blocks differ with the model, its dtype, the block size (vLLM: --block-size, SGLang: "
            "--page-size) and the number of ranks: use the same ones again, "
            f"or {DELETE_OR_MOVE}"
        )


def _recover(
    folder: Path,
    owner: OwnerLock,
    current: Superblock,
    num_whole: int,
    want: Superblock,
    system: DiskSystem,
    clock: Callable[[], float],
) -> Slab:
    """Recover the slab from its files, with ``want.num_slots`` slots; do not mark it as open."""
    with contextlib.ExitStack() as undo:
        superblock_fd = open_file(folder / SUPERBLOCK, os.O_RDWR)
        undo.callback(os.close, superblock_fd)
        # The directory is locked; this lock still holds if the files are moved to another one.
        owner.hold(folder / SUPERBLOCK)
        data_fd, is_direct = open_data(folder / DATA, os.O_RDWR | os.O_CREAT)
        undo.callback(os.close, data_fd)
        journal_fd = open_file(folder / JOURNAL, os.O_RDWR | os.O_CREAT)
        undo.callback(os.close, journal_fd)

        check_memory(folder, want.num_slots * BYTES_PER_SLOT, "the table")
        most_slots = max(current.num_slots, want.num_slots)
        found, journal_bytes = recover(folder, journal_fd, most_slots, want.num_slots)
        check_same_slab(folder, current, found)
        check_sequence(folder, found.next_seq)
        data_was = os.fstat(data_fd)
        trusted = np.zeros(want.num_slots, bool)
        was_closed = (
            current.is_clean
            and num_whole == 2
            and found.num_invalid == 0
            and found.generation == current.generation
            and journal_bytes == current.journal_bytes
        )
        if was_closed:  # in order, and the journal is unchanged since
            is_cut = want.num_slots < current.num_slots
            rows = partial(_rows, folder, journal_fd, current.num_slots)
            was = rows if is_cut else lambda: found.rows
            trusted = _trusted(folder, current, want.num_slots, data_was, was)
        try:
            if data_was.st_size < want.slot_bytes * want.num_slots:  # also if it was cut short
                system.reserve(data_fd, want.slot_bytes * want.num_slots)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise _too_full(folder, want.slot_bytes * want.num_slots, error) from error
            raise
        whole = journal_bytes // RECORD_BYTES * RECORD_BYTES
        if whole != journal_bytes:
            system.truncate(journal_fd, whole)
        slab = Slab(
            folder,
            owner,
            dataclasses.replace(current, num_slots=want.num_slots),
            found,
            SlabFiles(data_fd, is_direct, superblock_fd, journal_fd, whole),
            trusted,
            system,
            clock,
        )
        undo.pop_all()
        undo.callback(slab.close, clean=False)
        slab.reserve()
        is_journal_whole = (
            not found.num_invalid and not found.num_beyond and found.generation is not None
        )
        if want.num_slots != current.num_slots or not is_journal_whole:
            # Damaged records, and those of removed slots, must not take effect again later.
            slab.compact()
        if data_was.st_size > want.num_slots * want.slot_bytes:
            system.truncate(data_fd, want.num_slots * want.slot_bytes)
        undo.pop_all()
    if found.num_invalid:
        logger.warning("journal had damaged records path=%s num=%d", folder, found.num_invalid)
    return slab


def _trusted(
    folder: Path,
    current: Superblock,
    num_slots: int,
    data: os.stat_result,
    was: Callable[[], SlotRows],
) -> Bools:
    """Return which slots can be trusted without verification: bool [num_slots].

    These are the slots that the last owner trusted, if the data file did not change since.

    was: returns the journal's rows of all slots that the slab has had. It is called last, because
    there may be many.
    """
    trusted = np.zeros(num_slots, bool)
    if mark_of(data) != current.data or data.st_size < current.slot_bytes * current.num_slots:
        return trusted
    left = read_trust(folder, was, current)
    if left is not None:
        trusted[: current.num_slots] = left[:num_slots]
    return trusted


def _rows(folder: Path, journal_fd: int, num_slots: int) -> SlotRows:
    """Replay the journal for all slots that the slab has had; return their rows."""
    check_memory(folder, num_slots * BYTES_PER_SLOT, "the table")
    return recover(folder, journal_fd, num_slots, num_slots)[0].rows


def check_same_slab(folder: Path, current: Superblock, found: JournalFacts) -> None:
    """Raise ``ConfigError`` if the journal belongs to another slab."""
    if found.slab_id is not None and found.slab_id != current.slab_id:
        raise ConfigError(
            f"disk tier: the journal in {folder} belongs to another slab "
            f"({found.slab_id.hex()}, superblock: {current.slab_id.hex()}); {DELETE_OR_MOVE}"
        )
