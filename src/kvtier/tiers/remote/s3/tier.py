"""Storage tier over a bucket."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from kvtier.core.errors import ConfigError, TierError
from kvtier.core.types import BlockKey, BlockName, keys_of
from kvtier.devices.base import Finding
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.envelope import Envelope, as_keys
from kvtier.tiers.remote.errors import Refused, Unreachable, Unsound
from kvtier.tiers.remote.requests import RequestLoop
from kvtier.tiers.remote.s3.catalogue import Catalogue
from kvtier.tiers.remote.s3.manifest_sync import ManifestSync
from kvtier.tiers.remote.s3.objects import Missing, Objects
from kvtier.tiers.remote.s3.pack_reader import PackReader
from kvtier.tiers.remote.s3.packs import (
    PackCoding,
    PackName,
    PackShape,
    pack_name,
    pack_path,
)
from kvtier.tiers.remote.s3.upkeep import IN_USE, Upkeep
from kvtier.tiers.storage import Outcome, StorageFacts, StorageTier

logger = logging.getLogger(__name__)

DROP_S: Final = 1.0
CLOSE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Settings of the S3 tier.

    where: the store, for messages.
    num_requests: packs that a call moves concurrently.
    The others are options, see ``S3Options``.
    """

    where: str
    bucket: str
    prefix: str
    endpoint: str
    region: str
    sign_payload: bool
    poll_s: float
    publish_s: float
    max_age_s: float
    request_s: float
    num_readers: int
    num_writers: int
    num_requests: int


class S3Tier(StorageTier):
    """Storage tier over a bucket; blocks are stored in packs.

    The location of each block is known locally, from this process's writes and the manifests of
    others, so a look-up makes no request.

    The calling threads copy: requests never access a caller's memory.
    """

    def __init__(
        self,
        name: str,
        settings: S3Settings,
        shape: PackShape,
        num_blocks: int,
        envelope: Envelope,
    ) -> None:
        self.name = name
        self.bytes_per_block = shape.block_bytes
        self.settings = settings
        self._shape = shape
        self._num_blocks = num_blocks
        self._envelope = envelope
        self._catalogue = Catalogue(num_blocks)
        try:
            self._objects = Objects(
                settings.bucket,
                settings.prefix,
                settings.endpoint,
                settings.region,
                settings.sign_payload,
            )
        except Exception as error:
            raise ConfigError(
                f"storage: {settings.where}: the client refuses its settings "
                f"({type(error).__name__}); see the environment's AWS_ variables"
            ) from None
        max_age_ns = int(settings.max_age_s * 1e9)
        self._exchange = ManifestSync(
            self._objects,
            self._catalogue,
            shape.block_bytes,
            max_age_ns,
            can_read=envelope.coder.can_read,
        )
        self._reader = PackReader(self._objects, shape, envelope)
        self._loop = RequestLoop(f"kvtier {name}", settings.num_requests)
        self._upkeep = Upkeep(
            settings.where, settings.bucket, self._objects, self._exchange, settings.poll_s
        )
        try:
            self._upkeep.open(self._loop, settings.publish_s)
        except BaseException:
            self._loop.close(CLOSE_S)
            raise
        self.facts = StorageFacts(
            reaches=frozenset({"host", "cpu"}),
            evicts=True,
            is_shared=True,
            finds_at_once=True,
            request_s=max(settings.request_s, self._upkeep.request_s),
            num_readers=settings.num_readers,
            num_writers=settings.num_writers,
        )

    @property
    def last_error(self) -> str:
        return "" if self._upkeep.state == IN_USE else self._upkeep.state

    # -- blocks ------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        del timeout_s
        return [
            Outcome.THERE if is_known else Outcome.ABSENT
            for is_known in self._catalogue.have(keys, self._exchange.since)
        ]

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        end_s = time.monotonic() + timeout_s
        keys = keys_of(names)
        known = self._catalogue.have(keys, self._exchange.since)
        outcomes = [Outcome.THERE if each else Outcome.FAILED for each in known]
        new = [at for at, each in enumerate(known) if not each]
        if not new or not self._upkeep.is_sound:
            return outcomes
        num = self._shape.num_blocks
        cuts = [new[at : at + num] for at in range(0, len(new), num)]
        writes = [
            partial(self._write, [keys[at] for at in numbers], blocks.pick(numbers))
            for numbers in cuts
        ]
        for at, result in self._loop.each(writes, end_s):
            if isinstance(result, BaseException):
                self._note_failure(result)
                continue
            self._exchange.add(as_keys([keys[each] for each in cuts[at]]), result)
            for each in cuts[at]:
                outcomes[each] = Outcome.THERE
        return outcomes

    def _write(
        self, keys: Sequence[BlockKey], blocks: Pieces
    ) -> Coroutine[Any, Any, PackCoding | None]:
        """Copy the blocks at once, on the caller's thread. Return the coroutine that writes."""
        content, coding = self._shape.build(keys, blocks, self._envelope)
        path = pack_path(pack_name(as_keys(keys), coding))

        async def write() -> PackCoding | None:
            await self._objects.put(path, content)
            return coding

        return write()

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        end_s = time.monotonic() + timeout_s
        coder, num_read = self._envelope.coder, 0
        began, decoded_s = time.monotonic(), coder.counts.decode_s
        wanted = as_keys(keys)
        places = self._catalogue.places(wanted, self._exchange.since)
        outcomes = np.full(len(keys), Outcome.ABSENT, object)
        for place in places:
            outcomes[place.numbers] = Outcome.FAILED
        parts = self._reader.parts(places)
        reads: list[Callable[[], Coroutine[Any, Any, memoryview]]] = [
            partial(self._reader.read, *part) for part in parts
        ]
        for at, result in self._loop.each(reads, end_s):
            asked, part = parts[at]
            if isinstance(result, Missing):
                numbers = asked.place.numbers
                self._catalogue.lose(keys[numbers[0]], asked.place.pack)
                outcomes[numbers[outcomes[numbers] == Outcome.FAILED]] = Outcome.ABSENT
            elif isinstance(result, BaseException):
                self._note_failure(result)
            else:
                num_read += len(result)
                there, damaged = self._reader.take(asked, part, result, wanted, blocks)
                outcomes[there] = Outcome.THERE
                outcomes[damaged] = Outcome.DAMAGED
                self._forget(asked.place.pack, [keys[number] for number in damaged.tolist()])
            del result  # so that the next response can use its memory
        took_s = time.monotonic() - began - (coder.counts.decode_s - decoded_s)
        coder.choice.note_transfer(num_read, took_s)
        told: list[Outcome] = outcomes.tolist()
        return told

    def _forget(self, pack: PackName, damaged: Sequence[BlockKey]) -> None:
        if damaged:
            logger.warning(
                "wrong bytes store=%s pack=%s num_blocks=%d",
                self.settings.where,
                pack_path(pack),
                len(damaged),
            )
            self._catalogue.forget(damaged, pack)

    def _note_failure(self, error: BaseException) -> None:
        logger.debug("a request failed store=%s reason=%r", self.settings.where, str(error))
        if isinstance(error, Unreachable | Refused | Unsound):
            self._upkeep.note(str(error))

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        """Drop blocks. If permanent, other processes are notified and empty packs deleted.

        Their deletion is in the background and may not happen.
        """
        if not for_good:
            self._catalogue.forget(keys)
            return
        if not keys:
            return
        empty = self._exchange.apply_tombstones(keys)
        try:
            self._loop.run(self._exchange.publish, DROP_S)
        except Exception as error:
            raise TierError(self.name, "drop", str(error) or "no answer") from None
        if empty:
            self._loop.begin(partial(self._objects.delete, [pack_path(each) for each in empty]))

    # -- upkeep ------------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        catalogue, unread = self._catalogue, self._exchange.num_unread
        found = f"{len(catalogue)} blocks known in {catalogue.num_packs} packs"
        note = f"{unread} manifests of other formats or sizes of blocks" if unread else ""
        request = f"{self._upkeep.request_s * 1e3:.1f} ms a request"
        return [
            Finding(f"{self.name} tier", f"{self.settings.where}: {found}", note),
            Finding(f"{self.name} store", self._upkeep.state, request),
        ]

    def exchange(self, timeout_s: float) -> None:
        """Publish what was written, and read what others have published, now.

        Raises ``TierError`` if that fails.
        """

        async def both() -> None:
            await self._exchange.publish()
            await self._exchange.poll()

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
                    self.settings.where,
                    self._exchange.num_pending,
                    str(error) or "no answer",
                )
        self.abandon()

    def abandon(self) -> None:
        """Close without publishing, as if the process were killed."""
        self._loop.close(CLOSE_S)
