"""Export of a store's blocks into a pack file, and import of a pack file into a tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import quote

from kvtier.core.config import CodingConfig
from kvtier.core.errors import CacheError, ConfigError, printable
from kvtier.core.types import DISK
from kvtier.tiers.disk import DiskOptions
from kvtier.tiers.disk.opening import is_new, read_superblock, wanted
from kvtier.tiers.remote.bucket.opening import PACK_FILE, make_pack_file
from kvtier.tiers.remote.bucket.pack_file import (
    KVIdentity,
    Note,
    PackFile,
    PackFileIndex,
    refuse_existing,
    write_pack_file,
)
from kvtier.tiers.remote.bucket.pack_objects import open_pack_file
from kvtier.tiers.remote.bucket.signing import Signer
from kvtier.tiers.remote.migration import Migrated, StoreAccess, migrate
from kvtier.tiers.row import split_storage

SLOT_OVERHEAD: Final = 8192
"""Bytes that a slot of a slab has more than its block, at most."""


@contextmanager
def scratch_store(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the URL and the folder of an empty ``dir://`` store beside a file.

    It is removed at the end. Raises ``ConfigError`` if the folder of the file can't be written.
    """
    try:
        with TemporaryDirectory(prefix=".kvtier-export-", dir=path.parent) as name:
            folder = Path(name) / "kv"
            yield f"dir://{quote(str(folder.absolute()))}?poll_s=0", folder
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"pack file {path}: {error.strerror}; name another folder") from error


def url_of(path: Path, public_key: str = "") -> str:
    """Return the URL of a pack file. public_key: file with the key that must have signed it."""
    options = f"?public_key={quote(str(Path(public_key).absolute()))}" if public_key else ""
    return f"{PACK_FILE}://{quote(str(path.absolute()))}{options}"


def check_pack_files(stores: Sequence[str], identity: KVIdentity | None = None) -> None:
    """Raise ``ConfigError`` if a pack file among an engine's stores can't be used.

    identity: of the engine; None before it is known.
    """
    for store in stores:
        _, scheme, rest = split_storage(store)
        if scheme == PACK_FILE:
            file = open_pack_file(*make_pack_file.read(rest))
            if identity is not None:
                check_identity(file, identity)


def check_identity(file: PackFile, identity: KVIdentity) -> None:
    """Raise ``ConfigError`` if a pack file says that it has KV of something else."""
    if file.index.identity is not None:
        identity.check(file.index.identity, f"pack file {printable(str(file.path))}")


def import_pack_file(
    source: StoreAccess,
    target: StoreAccess,
    note: Note,
    identity: KVIdentity | None = None,
    disk_capacity: int = 0,
) -> Migrated:
    """Copy a pack file into a store, or into the slab of an engine that does not run.

    All of the file is verified before anything is written.

    Args:
        source: the file, by ``url_of``, and the keys of its blocks.
        target: store, or "disk:" and a directory.
        note: called as blocks are done.
        identity: of an engine that is to use it.
        disk_capacity: of a slab that does not exist yet.

    Raises ``ConfigError`` for a file or a target that can't be used, and ``CacheError`` if the
    target stops answering.
    """
    file = open_pack_file(*make_pack_file.read(split_storage(source.url)[2]))
    if identity is not None:
        check_identity(file, identity)
    file.verify(note)
    if split_storage(target.url)[1] == DISK:
        return _import_to_disk(source, target, file, note, disk_capacity)
    return migrate(source, target, note)


def _import_to_disk(
    source: StoreAccess, target: StoreAccess, file: PackFile, note: Note, capacity: int
) -> Migrated:
    identity, index = file.index.identity, file.index
    if identity is None:
        raise ConfigError(
            f"pack file {file.path}: was made from a store, and does not tell what a slab is "
            "identified by; import it into a store, such as dir:///var/kv"
        )
    folder, group = Path(split_storage(target.url)[2]), identity.group
    if not is_new(folder):
        found, _ = read_superblock(folder)
        capacity = found.num_slots * found.slot_bytes
    num_blocks = sum(index.blocks.values())
    options = DiskOptions(
        folder,
        num_blocks * (group.bytes_per_block + SLOT_OVERHEAD),
        encryption_key=target.coding.encryption_key,
    )
    needed = num_blocks * wanted(options, group).slot_bytes
    if capacity < needed:
        raise ConfigError(
            f"disk: {folder} has a capacity of {capacity:,} bytes, and the blocks of "
            f"{file.path} take {needed:,}; give a larger --disk-capacity"
        )
    target = replace(target, group=group, namespace=identity.namespace, capacity_bytes=capacity)
    return migrate(source, target, note)


def export_store(
    source: StoreAccess,
    path: Path,
    coding: CodingConfig,
    note: Note,
    max_bytes: int,
    *,
    about: str = "",
    signer: Signer | None = None,
) -> PackFileIndex:
    """Write the blocks of a store into a pack file, the hottest ones if they are too many.

    Blocks are verified on their way. If one is damaged or can't be read, there is no file.
    """
    refuse_existing(path)
    with scratch_store(path) as (url, folder):
        done = migrate(source, StoreAccess(url, coding), note, max_bytes=max_bytes)
        if num_bad := done.num_damaged + done.num_unreadable:
            raise CacheError(
                f"{num_bad:,} of {done.num_blocks:,} blocks of the store are damaged, or of "
                "another key, secret or codec; nothing was exported: give --from-encryption-key, "
                "or remove them with kvtier remote prune"
            )
        return write_pack_file(path, folder, about=about, signer=signer)
