"""Encrypted blocks in the slots of a slab.

A slot is one page larger than its block at most: it holds the frame of the block, which ends with a
tag. Blocks pass through a buffer of their own, in which they are encrypted and decrypted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey, Direct
from kvtier.layout import KVGroup
from kvtier.tiers.codecs.encryption import names_key, read_keyring
from kvtier.tiers.codecs.frame import MAX_OVERHEAD, BlockCoder, FrameHead
from kvtier.tiers.disk.bounce import ALIGNMENT, Bounce
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome

ENCRYPTED: Final = " encrypted"
"""End of the layout's name in the superblock of a slab whose blocks are encrypted."""

THERE, ABSENT, _, FAILED = Outcome
Positions = list[int]


def sealed_bytes(options: DiskOptions, block_bytes: int, num_parts: int) -> int:
    """Return the bytes of a block in its slots: its own size if nothing is encrypted.

    num_parts: slabs that a block is cut over.
    """
    if not names_key(options.encryption_key):
        return block_bytes
    step = ALIGNMENT * num_parts
    return -(-(block_bytes + MAX_OVERHEAD) // step) * step


def make_sealing(options: DiskOptions, group: KVGroup) -> Sealing | None:
    """Return the encryption of a slab's blocks; None if there is none.

    Raises ``ConfigError`` for keys that can't be used, and if blocks have to go directly from the
    disk to the engine's memory.
    """
    keyring = read_keyring(options.encryption_key)
    if keyring is None:
        return None
    if options.direct is Direct.ON:
        raise ConfigError(
            "disk_direct: on reads blocks past the processor, which has to decrypt them; leave "
            "disk_direct at auto, or encryption_key out"
        )
    place = f"{group.fingerprint} {options.rank}/{options.num_ranks}"
    coder = BlockCoder(group.bytes_per_block, keyring=keyring, place=place)
    num_bytes = sealed_bytes(options, group.bytes_per_block, options.num_paths)
    return Sealing(coder, num_bytes, options.bounce_bytes // num_bytes)


class Sealing:
    """Encrypts and decrypts the blocks of a slab. One thread stores, one loads.

    num_bytes: bytes of a block in its slots.
    num_rows: blocks that pass at a time.
    """

    def __init__(self, coder: BlockCoder, num_bytes: int, num_rows: int) -> None:
        self.coder = coder
        self._num_bytes = num_bytes
        self._there, self._back = (Bounce(num_rows, num_bytes) for _ in range(2))

    def store(
        self,
        keys: Sequence[BlockKey],
        blocks: Pieces,
        write: Callable[[Positions, Pieces], list[bool]],
    ) -> list[bool]:
        """Encrypt blocks, and have them written. Return which of them were.

        write: writes the blocks at some positions of the call from other memory.
        """
        stored: list[bool] = []
        rows = self._there.rows
        for first in range(0, len(keys), len(rows)):
            some = list(range(first, min(first + len(rows), len(keys))))
            for row, at in zip(rows, some, strict=False):
                self.coder.encode(keys[at], blocks.pick([at]), row)
            stored += write(some, self._pieces(self._there, len(some)))
        return stored

    def load(
        self,
        keys: Sequence[BlockKey],
        blocks: Pieces,
        read: Callable[[Positions, Pieces], list[Outcome]],
    ) -> list[Outcome]:
        """Have blocks read, and decrypt them. A block of another key is ``ABSENT``.

        read: reads the blocks at some positions of the call into other memory, and verifies them.
        """
        outcomes: list[Outcome] = []
        rows = self._back.rows
        for first in range(0, len(keys), len(rows)):
            some = list(range(first, min(first + len(rows), len(keys))))
            read_ones = read(some, self._pieces(self._back, len(some)))
            for row, at, outcome in zip(rows, some, read_ones, strict=False):
                is_there = outcome is THERE
                outcomes.append(
                    self.coder.decode(keys[at], row, blocks.pick([at])) if is_there else outcome
                )
        return outcomes

    def unknown_key(
        self, keys: Sequence[BlockKey], read: Callable[[Positions, Pieces], list[Outcome]]
    ) -> int | None:
        """Return the id of the key of some blocks if none of them can be decrypted; else None.

        read: see ``load``.
        """
        rows = self._back.rows
        some = list(range(min(len(keys), len(rows))))
        outcomes = read(some, self._pieces(self._back, len(some))) if some else []
        heads = [
            FrameHead.read(row)
            for row, outcome in zip(rows, outcomes, strict=False)
            if outcome is THERE
        ]
        found = [head for head in heads if head is not None]
        if not found or any(self.coder.can_read(head.codec, head.key_id) for head in found):
            return None
        return found[0].key_id

    def _pieces(self, buffer: Bounce, num: int) -> Pieces:
        return Pieces.whole(buffer.addresses[:num], self._num_bytes)
