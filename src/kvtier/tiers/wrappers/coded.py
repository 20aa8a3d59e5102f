"""Codec and encryption around a storage tier that knows of neither."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock, local
from typing import Final

import numpy as np

from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey, BlockName, Direct
from kvtier.layout import opaque
from kvtier.tiers.codecs import BlockCoder, make_coder
from kvtier.tiers.codecs.codec import Uint8s
from kvtier.tiers.codecs.frame import FrameHead
from kvtier.tiers.pieces import HOST_KINDS, Pieces
from kvtier.tiers.storage import Outcome, StorageSite, StorageTier
from kvtier.tiers.wrappers.wrapper import StorageWrapper

logger = logging.getLogger(__name__)

BATCH_BYTES: Final = 4 << 20
"""Bytes of frames in memory, per reading or writing thread; at least one frame."""
MAX_FOREIGN: Final = 1 << 16
"""Keys of blocks of another codec or key that are remembered."""

THERE, ABSENT, DAMAGED, FAILED = Outcome


class CodedTier(StorageWrapper):
    """Encodes blocks on their way to ``inner``, and decodes and verifies them on their way back.

    What ``inner`` stores is a frame (``codecs.frame``), also of a block that no codec makes smaller
    and no key encrypts. If its sizes don't vary, frames are filled up with zeros.

    inner: its blocks have ``coder.most_bytes``. It is dropped from when a frame is damaged.
    coder: frames every block.
    """

    def __init__(self, inner: StorageTier, coder: BlockCoder) -> None:
        super().__init__(inner)
        assert inner.bytes_per_block == coder.most_bytes, "there is room for every frame"
        self.bytes_per_block = coder.block_bytes
        self.facts = replace(
            inner.facts, reaches=HOST_KINDS, writes_from=None, direct=Direct.OFF, sizes_vary=False
        )
        self.coder = coder
        self._own = local()
        # ``inner`` is looked up and dropped from by one thread at a time. Readers drop, too.
        self._lock = Lock()
        self._foreign: dict[BlockKey, None] = {}  # oldest first

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        with self._lock:
            outcomes = super().find(keys, timeout_s)
            return [
                ABSENT if key in self._foreign else outcome
                for key, outcome in zip(keys, outcomes, strict=True)
            ]

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        ends_at = time.monotonic() + timeout_s
        outcomes = [FAILED] * len(names)
        rows = self._rows()
        for start in range(0, len(names), len(rows)):
            part = [*range(start, min(start + len(rows), len(names)))]
            if time.monotonic() >= ends_at or not self._make_way([names[at].key for at in part]):
                break
            sizes = [
                self._encode(names[at].key, blocks.pick([at]), row)
                for at, row in zip(part, rows, strict=False)
            ]
            # The blocks of a call have one size.
            for size in sorted(set(sizes)):
                places = [place for place, its_size in enumerate(sizes) if its_size == size]
                frames = Pieces.whole([rows[place].ctypes.data for place in places], size)
                some = [names[part[place]] for place in places]
                put = super().put(some, frames, max(0.0, ends_at - time.monotonic()))
                for place, outcome in zip(places, put, strict=True):
                    outcomes[part[place]] = outcome
        return outcomes

    def _encode(self, key: BlockKey, block: Pieces, row: Uint8s) -> int:
        """Write the frame of a block, and return the bytes to store."""
        head = self.coder.encode(key, block, row)
        assert head is not None, "the coder frames every block"
        if self.inner.facts.sizes_vary:
            return head.num_bytes
        row[head.num_bytes :] = 0
        return len(row)

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        ends_at = time.monotonic() + timeout_s
        outcomes = [FAILED] * len(keys)
        rows = self._rows()
        for start in range(0, len(keys), len(rows)):
            some = keys[start : start + len(rows)]
            began = time.monotonic()
            if began >= ends_at:
                break
            frames = Pieces.whole([row.ctypes.data for row in rows[: len(some)]], rows.shape[1])
            read = super().get(some, frames, ends_at - began)
            heads = [
                FrameHead.read(row) if outcome is THERE else None
                for row, outcome in zip(rows, read, strict=False)
            ]
            num_read = sum(head.num_bytes for head in heads if head is not None)
            self.coder.choice.note_transfer(num_read, time.monotonic() - began)
            for at, (key, outcome) in enumerate(zip(some, read, strict=True)):
                if outcome is THERE:
                    outcome = self.coder.decode(key, rows[at], blocks.pick([start + at]))
                    if outcome is not THERE:
                        self._reject(key, outcome)
                outcomes[start + at] = outcome
        return outcomes

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        with self._lock:
            super().drop(keys, for_good)

    def _reject(self, key: BlockKey, outcome: Outcome) -> None:
        """Drop a block that can't be decoded, or note it if others may be able to.

        A noted block is not found, and replaced when it is put.
        """
        with self._lock:
            try:
                if outcome is DAMAGED or not self.facts.is_shared:
                    self.inner.drop([key], for_good=True)
                    return
            except Exception as error:
                logger.debug("not dropped tier=%s reason=%r", self.name, str(error))
            self._foreign[key] = None
            if len(self._foreign) > MAX_FOREIGN:
                del self._foreign[next(iter(self._foreign))]

    def _make_way(self, keys: Sequence[BlockKey]) -> bool:
        """Drop noted blocks among ``keys``. Return whether that was possible."""
        with self._lock:
            foreign = [key for key in keys if key in self._foreign]
            try:
                if foreign:
                    self.inner.drop(foreign, for_good=True)
            except Exception as error:
                logger.debug("not dropped tier=%s reason=%r", self.name, str(error))
                return False
            for key in foreign:
                del self._foreign[key]
            return True

    def _rows(self) -> Uint8s:
        """Return memory of this thread for frames: uint8 [num_frames, most_bytes]."""
        found: Uint8s | None = getattr(self._own, "rows", None)
        if found is None:
            num_bytes = self.coder.most_bytes
            found = np.empty((max(1, BATCH_BYTES // num_bytes), num_bytes), np.uint8)
            self._own.rows = found
        return found


def open_coded(plugin: Callable[[StorageSite], object], site: StorageSite) -> object:
    """Make a tier by a plug-in that neither compresses nor encrypts, in a ``CodedTier``.

    Raises ``ConfigError`` for a codec if the tier keeps all blocks at one size.
    """
    coder = make_coder(site.coding, site.group, is_framing=True)
    if not coder.changes_blocks:
        return plugin(site)
    group = opaque(coder.most_bytes)
    inner = plugin(replace(site, group=group, sizes_vary=True))
    if not isinstance(inner, StorageTier):
        return inner
    if coder.is_compressing and not inner.facts.sizes_vary:
        inner.close()
        raise ConfigError(
            f"codec: {site.coding.codec} would save nothing in the storage {site.name}: it keeps "
            "all blocks at one size; use codec=none"
        )
    return CodedTier(inner, coder)
