"""Base of the tiers over stores: facts, blocks of other secrets, and damage."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvtier.core.errors import TierError
from kvtier.core.types import BlockKey, BlockName, keys_of
from kvtier.tiers.codecs import make_coder
from kvtier.tiers.pieces import HOST_KINDS, Pieces
from kvtier.tiers.remote.envelope import Envelope
from kvtier.tiers.remote.location import Location, StoreOptions
from kvtier.tiers.storage import Outcome, StorageFacts, StorageSite, StorageTier

logger = logging.getLogger(__name__)

REMOVE_S: Final = 1.0
"""Time limit of a removal. Its caller waits, possibly the scheduler."""

THERE, ABSENT, DAMAGED, FAILED = Outcome


class StoreTier(StorageTier):
    """Blocks in a store that processes share: a block is the same whichever process wrote it.

    The store evicts by itself. Only damaged and deleted blocks are removed. A
    store that cannot be reached is tried again by a later call.
    """

    def __init__(self, site: StorageSite, location: Location, options: StoreOptions) -> None:
        self.name = site.name
        self.bytes_per_block = site.group.bytes_per_block
        self.facts = StorageFacts(
            reaches=HOST_KINDS,
            evicts=True,
            is_shared=True,
            request_s=options.request_s,
            num_readers=options.readers,
            num_writers=options.writers,
        )
        self._location = location
        self._num_blocks = site.capacity_bytes // self.bytes_per_block
        coder = make_coder(site.coding, site.group)
        self._envelope = Envelope(self.bytes_per_block, options.secret(), coder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._location})"

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    # -- calls of the store ------------------------------------------------------------------------

    @abstractmethod
    def _find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        """Return which keys have a value that can be read here."""

    @abstractmethod
    def _read(
        self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float
    ) -> tuple[list[Outcome], int]:
        """Read blocks, and verify them. Return also the number of stored bytes that were read."""

    @abstractmethod
    def _write(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        """Write blocks. Return ``THERE`` or ``FAILED`` for each."""

    @abstractmethod
    def _remove(self, keys: Sequence[BlockKey], timeout_s: float) -> None:
        """Remove values. Raises an error, whose text has no secret, if that fails."""

    # -- blocks ------------------------------------------------------------------------------------

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        found = self._find(keys, timeout_s) if keys else []
        return [
            ABSENT if outcome is THERE and self._is_others(key) else outcome
            for key, outcome in zip(keys, found, strict=True)
        ]

    def _is_others(self, key: BlockKey) -> bool:
        """Return whether replicas with another secret use the value: it must stay."""
        return self._envelope.is_others(key)

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        ends_at = time.monotonic() + timeout_s
        keys = keys_of(names)
        outcomes = self.find(keys, timeout_s)
        new = [
            at
            for at, outcome in enumerate(outcomes)
            if outcome is ABSENT and not self._is_others(keys[at])
        ]
        outcomes = [THERE if outcome is THERE else FAILED for outcome in outcomes]
        if new:
            some = [keys[at] for at in new]
            written = self._write(some, blocks.pick(new), ends_at - time.monotonic())
            for at, outcome in zip(new, written, strict=True):
                outcomes[at] = outcome
        return outcomes

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        coder = self._envelope.coder
        began, decoded_s = time.monotonic(), coder.counts.decode_s
        outcomes, num_read = self._read(keys, blocks, timeout_s)
        took_s = time.monotonic() - began - (coder.counts.decode_s - decoded_s)
        coder.choice.note_transfer(num_read, took_s)
        damaged = [
            key
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome is DAMAGED and not self._is_others(key)
        ]
        if damaged:
            logger.warning("wrong bytes store=%s num_blocks=%d", self._location, len(damaged))
            self._forget(damaged)
        return outcomes

    def _forget(self, damaged: Sequence[BlockKey]) -> None:
        """Remove damaged blocks from the store, so that intact ones can be written."""
        with suppress(Exception):  # it is damaged for the next reader, too
            self._remove(damaged, REMOVE_S)

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        if not for_good:
            return  # other processes may still use it, and the store evicts by itself
        # A cache also drops for good what it could not use.
        keys = [key for key in keys if not self._is_others(key)]
        if not keys:
            return
        try:
            self._remove(keys, REMOVE_S)
        except Exception as error:
            raise TierError(self.name, "drop", str(error) or "no answer") from None
