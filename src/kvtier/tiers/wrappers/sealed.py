"""Encryption around a storage tier whose blocks all have the same size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from kvtier.devices.base import Finding
from kvtier.errors import ConfigError
from kvtier.layout import opaque
from kvtier.tiers.codecs.encryption import read_keyring
from kvtier.tiers.codecs.frame import BlockCoder
from kvtier.tiers.codecs.opening import AUTO, NONE, CodingOptions
from kvtier.tiers.pieces import HOST_KINDS, Pieces
from kvtier.tiers.storage import Outcome, StorageSite, StorageTier
from kvtier.tiers.wrappers.wrapper import StorageWrapper
from kvtier.types import BlockKey, BlockName, Direct

ROWS_BYTES: Final = 16 << 20
"""Bytes of the buffer of a call, for at least one block."""

THERE, ABSENT, DAMAGED, FAILED = Outcome


def make_sealed(
    site: StorageSite, coding: CodingOptions, make: Callable[[StorageSite], StorageTier]
) -> StorageTier:
    """Make a storage tier, and encrypt its blocks if ``coding`` names a key.

    make: makes the tier; with a key, for blocks of the size of a frame.

    Raises ``ConfigError`` for keys that can't be used, and for a codec.
    """
    if coding.codec not in (NONE, AUTO):
        raise ConfigError(
            f"storage: {site.name}: codec={coding.codec} needs a store that keeps blocks of any "
            'size, which is Valkey; write "?codec=none" for this one'
        )
    keyring = read_keyring(coding.encryption_key)
    if keyring is None:
        return make(site)
    coder = BlockCoder(site.group.bytes_per_block, keyring=keyring)
    num_blocks = site.capacity_bytes // coder.block_bytes
    inner = replace(
        site,
        group=opaque(coder.most_bytes),
        capacity_bytes=num_blocks * coder.most_bytes,
        arena=None,
    )
    return SealedTier(make(inner), coder)


class SealedTier(StorageWrapper):
    """Encrypts blocks on their way into ``inner``, and decrypts them on their way back.

    A block whose key is not known here is found, and ``ABSENT`` when it is read.
    """

    def __init__(self, inner: StorageTier, coder: BlockCoder) -> None:
        super().__init__(inner)
        self.bytes_per_block = coder.block_bytes
        self.facts = replace(
            inner.facts, reaches=HOST_KINDS, writes_from=HOST_KINDS, direct=Direct.OFF
        )
        self._coder = coder

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        ends_at = time.monotonic() + timeout_s
        outcomes: list[Outcome] = []
        rows, places = self._buffer(len(names))
        for first in range(0, len(names), len(rows)):
            some = names[first : first + len(rows)]
            for at, name in enumerate(some):
                self._coder.encode(name.key, blocks.pick([first + at]), rows[at])
            left_s = max(0.0, ends_at - time.monotonic())
            outcomes += super().put(some, places.pick(slice(0, len(some))), left_s)
        return outcomes

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        ends_at = time.monotonic() + timeout_s
        outcomes: list[Outcome] = []
        rows, places = self._buffer(len(keys))
        for first in range(0, len(keys), len(rows)):
            some = keys[first : first + len(rows)]
            left_s = max(0.0, ends_at - time.monotonic())
            found = super().get(some, places.pick(slice(0, len(some))), left_s)
            for at, outcome in enumerate(found):
                if outcome is THERE:
                    outcome = self._coder.decode(some[at], rows[at], blocks.pick([first + at]))
                outcomes.append(outcome)
        damaged = [key for key, each in zip(keys, outcomes, strict=True) if each is DAMAGED]
        if damaged:
            self.inner.drop(damaged)
        return outcomes

    def _buffer(
        self, num_blocks: int
    ) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.uint8]], Pieces]:
        """Return memory for frames: uint8 [num_rows, most_bytes], and where its rows are."""
        num_bytes = self._coder.most_bytes
        num = max(1, min(num_blocks, ROWS_BYTES // num_bytes))
        rows = np.empty((num, num_bytes), np.uint8)
        begins = rows.ctypes.data + num_bytes * np.arange(num, dtype=np.uint64)
        return rows, Pieces.whole(begins, num_bytes)

    def findings(self) -> list[Finding]:
        return [*super().findings(), Finding(f"{self.name} encryption", "AES-256-GCM")]
