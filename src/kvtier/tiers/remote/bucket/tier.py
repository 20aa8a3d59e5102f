"""Storage tier over a bucket."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from kvtier.core.errors import TierError
from kvtier.core.types import BlockKey
from kvtier.devices.base import Finding
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.bucket.catalogue import Catalogue
from kvtier.tiers.remote.bucket.manifest_sync import ManifestSync
from kvtier.tiers.remote.bucket.object_store import Missing, make_objects
from kvtier.tiers.remote.bucket.opening import PackFileOptions, PackOptions
from kvtier.tiers.remote.bucket.pack_reader import PackReader
from kvtier.tiers.remote.bucket.packs import PackCoding, PackShape, pack_name, pack_path
from kvtier.tiers.remote.bucket.upkeep import IN_USE, Upkeep
from kvtier.tiers.remote.envelope import as_keys
from kvtier.tiers.remote.errors import Refused, Unreachable, Unsound, Unwritable
from kvtier.tiers.remote.location import Location
from kvtier.tiers.remote.requests import RequestLoop
from kvtier.tiers.remote.store_tier import ABSENT, DAMAGED, FAILED, THERE, StoreTier
from kvtier.tiers.storage import Outcome, StorageSite

logger = logging.getLogger(__name__)

CLOSE_S: Final = 3.0


class NoRoom(Exception):  # noqa: N818 - an outcome
    """A pack is not written, because others have to be deleted first."""


class BucketTier(StoreTier):
    """Storage tier over a bucket; blocks are stored in packs.

    The location of each block is known locally, from this process's writes and the manifests of
    others, so a look-up makes no request.

    The calling threads copy: requests never access a caller's memory.
    """

    def __init__(self, site: StorageSite, location: Location, options: PackOptions) -> None:
        super().__init__(site, location, options)
        self._shape = PackShape(self.bytes_per_block, options.pack_bytes)
        self._catalogue = Catalogue(self._num_blocks)
        self._objects = make_objects(location, options)
        self._exchange = ManifestSync(
            self._objects,
            self._catalogue,
            self.bytes_per_block,
            int(options.max_age_s * 1e9),
            can_read=self._envelope.coder.can_read,
        )
        self._reader = PackReader(self._objects, self._shape, self._envelope)
        self._loop = RequestLoop(f"kvtier {self.name}", options.requests)
        self._upkeep = Upkeep(location, self._objects, self._exchange, options)
        try:
            self._upkeep.open(self._loop)
        except BaseException:
            self._loop.close(CLOSE_S)
            raise
        request_s = max(options.request_s, self._upkeep.request_s)
        takes_writes = not isinstance(options, PackFileOptions)
        self.facts = replace(
            self.facts, finds_at_once=True, request_s=request_s, takes_writes=takes_writes
        )

    @property
    def last_error(self) -> str:
        return "" if self._upkeep.state == IN_USE else self._upkeep.state

    # -- blocks ------------------------------------------------------------------------------------

    def _find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        del timeout_s
        are_known = self._catalogue.have(keys, self._exchange.since)
        return [THERE if is_known else ABSENT for is_known in are_known]

    def num_known(self, keys: Sequence[BlockKey]) -> int | None:
        are_known = self._catalogue.have(keys, self._exchange.since)
        return next((at for at, is_known in enumerate(are_known) if not is_known), len(keys))

    def _is_others(self, key: BlockKey) -> bool:
        """Return False: a block of another secret lies in a pack, which is written anew."""
        del key
        return False

    def _write(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        end_s, outcomes = time.monotonic() + timeout_s, [FAILED] * len(keys)
        if not self._upkeep.takes_writes:
            return outcomes
        num = self._shape.num_blocks
        parts = [slice(at, at + num) for at in range(0, len(keys), num)]
        writes = [partial(self._write_pack, keys[part], blocks.pick(part)) for part in parts]
        for at, result in self._loop.each(writes, end_s):
            if isinstance(result, BaseException):
                self._note_failure(result)
                continue
            written = keys[parts[at]]
            self._exchange.add(as_keys(written), result)
            outcomes[parts[at]] = [THERE] * len(written)
            self._upkeep.note_write("")
        return outcomes

    def _write_pack(
        self, keys: Sequence[BlockKey], blocks: Pieces
    ) -> Coroutine[Any, Any, PackCoding | None]:
        """Copy the blocks at once, on the caller's thread. Return the coroutine that writes."""
        content, coding = self._shape.build(keys, blocks, self._envelope)
        has_room = self._upkeep.reserve(len(content))
        path = pack_path(pack_name(as_keys(keys), coding))

        async def write() -> PackCoding | None:
            if not has_room:
                raise NoRoom
            await self._objects.put(path, content)
            return coding

        return write()

    def _read(
        self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float
    ) -> tuple[list[Outcome], int]:
        end_s, num_read = time.monotonic() + timeout_s, 0
        wanted = as_keys(keys)
        places = self._catalogue.places(wanted, self._exchange.since)
        outcomes = np.full(len(keys), ABSENT, object)
        for place in places:
            outcomes[place.numbers] = FAILED
        parts = self._reader.parts(places)
        reads: list[Callable[[], Coroutine[Any, Any, memoryview]]] = [
            partial(self._reader.read, *part) for part in parts
        ]
        for at, result in self._loop.each(reads, end_s):
            asked, part = parts[at]
            if isinstance(result, Missing):
                numbers = asked.place.numbers
                self._catalogue.lose(keys[numbers[0]], asked.place.pack)
                outcomes[numbers[outcomes[numbers] == FAILED]] = ABSENT
            elif isinstance(result, BaseException):
                self._note_failure(result)
            else:
                num_read += len(result)
                there, damaged = self._reader.take(asked, part, result, wanted, blocks)
                outcomes[there] = THERE
                outcomes[damaged] = DAMAGED
                damaged_keys = [keys[number] for number in damaged.tolist()]
                self._catalogue.forget(damaged_keys, asked.place.pack)
            del result  # so that the next response can use its memory
        return outcomes.tolist(), num_read

    def _remove(self, keys: Sequence[BlockKey], timeout_s: float) -> None:
        """Publish tombstones of the blocks, and delete packs that are empty now.

        A deletion may fail. It is waited for: if the same blocks are written again, their pack has
        the same name, and a late deletion would remove it.
        """
        ends_at = time.monotonic() + timeout_s
        empty = [pack_path(name) for name in self._exchange.apply_tombstones(keys)]
        self._loop.run(self._exchange.publish, timeout_s)
        if empty:
            with suppress(Exception):
                self._loop.run(partial(self._objects.delete, empty), ends_at - time.monotonic())

    def _forget(self, damaged: Sequence[BlockKey]) -> None:
        """Do nothing more: ``_read`` has forgotten them. Other processes have other packs."""

    def _note_failure(self, error: BaseException) -> None:
        logger.debug("a request failed store=%s reason=%r", self._location, str(error))
        if isinstance(error, Unwritable):
            self._upkeep.note_write(str(error))
        elif isinstance(error, Unreachable | Refused | Unsound):
            self._upkeep.note(str(error))

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        """Drop blocks. A permanent deletion is announced to other processes.

        From a pack file, blocks are dropped for this process only.
        """
        if not for_good or not self.facts.takes_writes:
            self._catalogue.forget(keys)
        if self.facts.takes_writes:  # callers report the others by ``undeletable``
            super().drop(keys, for_good)

    # -- upkeep ------------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        catalogue, unread = self._catalogue, self._exchange.num_unread
        found = f"{len(catalogue)} blocks known in {catalogue.num_packs} packs"
        note = f"{unread} manifests of other formats or sizes of blocks" if unread else ""
        request = f"{self._upkeep.request_s * 1e3:.1f} ms a request"
        return [
            Finding(f"{self.name} tier", f"{self._location}: {found}", note),
            Finding(f"{self.name} store", self._upkeep.state, request),
            *([Finding(f"{self.name} capacity", usage)] if (usage := self._upkeep.usage) else []),
        ]

    def exchange(self, timeout_s: float) -> None:
        """Publish what was written, and read what others have published, now.

        Raises ``TierError`` if that fails.
        """

        async def both() -> None:
            await self._exchange.publish()
            async with self._upkeep.polling:
                await self._exchange.read_all()

        try:
            self._loop.run(both, timeout_s)
        except Exception as error:
            raise TierError(self.name, "exchange", str(error) or "no answer") from None

    def check_invariants(self) -> None:
        """Raise AssertionError if the structures are inconsistent."""
        self._catalogue.check_invariants()

    def close(self) -> None:
        """Publish the last writes, for at most ``CLOSE_S``, and close."""
        if self._exchange.num_pending and self._upkeep.is_sound:
            try:
                self._loop.run(self._exchange.publish, CLOSE_S)
            except Exception as error:
                logger.warning(
                    "manifest not published store=%s num_packs=%d reason=%r",
                    self._location,
                    self._exchange.num_pending,
                    str(error) or "no answer",
                )
        self.abandon()

    def abandon(self) -> None:
        """Close without publishing, as if the process were killed."""
        self._loop.close(CLOSE_S)
