"""Background work of a bucket: the self-test, polling for others' manifests, and own manifests."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvtier.errors import ConfigError
from kvtier.tiers.remote.errors import Refused, Unsound
from kvtier.tiers.remote.requests import RequestLoop
from kvtier.tiers.remote.s3.manifest_sync import ManifestSync
from kvtier.tiers.remote.s3.objects import Objects
from kvtier.tiers.remote.s3.self_test import self_test

logger = logging.getLogger(__name__)

IN_USE: Final = "in use"
OPEN_S: Final = 5.0
"""So long a process waits at its start; what is not read by then is read in the background."""
FIRST_S: Final = 10.0
"""For the self-test and the first look."""
BACKGROUND_S: Final = 30.0
"""For a look at what others have written, and for telling them."""
RETRY_S: Final = 5.0
"""Between attempts to reach a store that could not be reached at the start."""


class Upkeep:
    """Background work of one bucket.

    where: the store, for people. poll_s: between polls for what others have written; 0 for only the
    first.

    is_sound: the store has passed its self-test. request_s: what a request cost then.
    """

    def __init__(
        self, where: str, bucket: str, objects: Objects, exchange: ManifestSync, poll_s: float
    ) -> None:
        self.is_sound = False
        self.request_s = 0.0
        self._where = where
        self._bucket = bucket
        self._objects = objects
        self._exchange = exchange
        self._poll_s = poll_s
        self._was_polled = False
        self._looking = asyncio.Lock()
        self._refusal = ""
        self._trouble = ""

    @property
    def state(self) -> str:
        """Describe the state of the bucket for people."""
        return f"not used: {self._refusal}" if self._refusal else self._trouble or IN_USE

    def open(self, loop: RequestLoop, publish_s: float) -> None:
        """Begin.

        Raises ``ConfigError`` for a store that is not fit for use; one that can't be reached may
        come later.
        """
        try:
            loop.begin(self.look).result(OPEN_S)
        except TimeoutError:
            self.note("no answer")
        if self._refusal:
            raise ConfigError(f"storage: {self._where}: {self._refusal}")
        loop.begin(self._keep_looking)
        loop.begin(lambda: self._keep_publishing(publish_s))

    async def _keep_looking(self) -> None:
        while not self._refusal:
            await asyncio.sleep(self._poll_s or RETRY_S)
            if self._poll_s or not self._was_polled:
                await self.look()

    async def look(self) -> None:
        """Whether the store is fit for use, and what others have written. Raises nothing."""
        try:
            time_s = BACKGROUND_S if self.is_sound else FIRST_S
            async with self._looking, asyncio.timeout(time_s):
                if not self.is_sound:
                    self.request_s = await self_test(self._objects)
                    self.is_sound = True
                await self._exchange.poll()
                self._was_polled = True
                self.note("")
        except (Refused, Unsound) as error:
            if self.is_sound:  # it did work; credentials may come back
                self.note(str(error))
            else:
                self._refusal = refusal(error, self._bucket)
                logger.error("not used store=%s reason=%r", self._where, self._refusal)
        except TimeoutError:
            self.note("no answer")
        except Exception as error:
            self.note(str(error))

    async def _keep_publishing(self, publish_s: float) -> None:
        while True:
            await asyncio.sleep(publish_s)
            await self._publish()

    async def _publish(self) -> None:
        if not self.is_sound or not self._exchange.num_pending:
            return
        try:
            async with asyncio.timeout(BACKGROUND_S):
                await self._exchange.publish()
                await self._exchange.merge()
                self.note("")
        except TimeoutError:
            self.note("no answer")
        except Exception as error:
            self.note(str(error))

    def note(self, reason: str) -> None:
        """Note what is wrong; "" for nothing. It is logged when it begins and when it ends."""
        if reason and not self._trouble:
            logger.warning("the store does not answer store=%s reason=%r", self._where, reason)
        elif self._trouble and not reason:
            logger.info("the store is in use again store=%s", self._where)
        self._trouble = reason


def refusal(error: Refused | Unsound, bucket: str) -> str:
    """Why a store is not used, and what to do."""
    if isinstance(error, Unsound):
        return f"this store can't be used: {error}"
    if str(error) == "NoSuchBucket":
        return f"there is no bucket {bucket!r}; make it, or name another"
    return f"access was refused ({error}); see the credentials and the bucket's rules"
