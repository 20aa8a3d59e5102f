"""Identity of a partition, which users know as a room, and its name on disk."""

from __future__ import annotations

import re
from dataclasses import dataclass

from blake3 import blake3

from kvtier.core.errors import ConfigError
from kvtier.node.config import DEFAULT_TENANT, check_tenant
from kvtier.node.wire.protocol import MAX_KEY_BYTES

FOLDER = re.compile(r"(.+)-((?:[0-9a-f]{2})+)-([0-9]+)-([0-9]+)(?:\+([0-9]+))?")
MAX_SCOPE_BYTES = 64
SCOPE_BYTES = 32
"""Bytes of the scopes of kvtier's engines."""
OTHER_SCOPES = "kvtier room whose scope has another length"
"""Context of digests, which sets them apart from all others."""


@dataclass(frozen=True, slots=True)
class PartitionKey:
    """Identity of a partition.

    Attributes:
        tenant: whose quota counts.
        scope: digest of the namespace.
        block_bytes: bytes of a block.
        key_bytes: length of the engines' keys.
        group_bytes: bytes at the end of a key that name its KV group; 0 for a model with one group.
    """

    tenant: str
    scope: bytes
    block_bytes: int
    key_bytes: int
    group_bytes: int = 0

    def check(self) -> None:
        """Raise ``ConfigError`` for a key that no partition can have."""
        check_tenant(self.tenant)
        if self.block_bytes < 1:
            raise ConfigError(f"a room can't have blocks of {self.block_bytes} bytes")
        for what, num in ("scope", len(self.scope)), ("keys", self.key_bytes):
            limit = MAX_SCOPE_BYTES if what == "scope" else MAX_KEY_BYTES
            if not 1 <= num <= limit:
                raise ConfigError(f"{what} of {num} bytes: a room can have 1 to {limit}")
        if not 0 <= self.group_bytes < self.key_bytes:
            raise ConfigError(
                f"keys of {self.key_bytes} bytes can't name their KV group in {self.group_bytes}"
            )

    @property
    def namespace(self) -> bytes:
        """Digest of everything but the key that decides on a block's bytes, and of the tenant.

        It has 32 bytes, and so have the scopes of engines: those of the default tenant are it. A
        scope of another length is hashed with its length, or it could begin another tenant's name.
        """
        tenant = self.tenant.encode()
        if len(self.scope) != SCOPE_BYTES:
            text = bytes([len(self.scope)]) + self.scope + tenant
            return blake3(text, derive_key_context=OTHER_SCOPES).digest()
        return self.scope if self.tenant == DEFAULT_TENANT else blake3(self.scope + tenant).digest()

    @property
    def folder(self) -> str:
        """Name of the partition's folder on disk, from which ``of_folder`` makes the key again."""
        groups = f"+{self.group_bytes}" if self.group_bytes else ""
        return f"{self.tenant}-{self.scope.hex()}-{self.block_bytes}-{self.key_bytes}{groups}"

    @classmethod
    def of_folder(cls, folder: str) -> PartitionKey | None:
        """Return the key of a folder's name; None for a name that no partition's folder has."""
        found = FOLDER.fullmatch(folder)
        if found is None:
            return None
        block_bytes, key_bytes, group_bytes = (int(num or 0) for num in found.groups()[2:])
        key = cls(found[1], bytes.fromhex(found[2]), block_bytes, key_bytes, group_bytes)
        try:
            key.check()
        except ConfigError:
            return None
        return key if key.folder == folder else None

    @property
    def name(self) -> str:
        """Short name, for people, metrics and stores: the tenant and 16 hexadecimal digits."""
        return f"{self.tenant}-{blake3(self.folder.encode()).hexdigest()[:16]}"
