"""What blocks are called outside the process: on disk, and by other processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.connectors.vllm.identity import block_key, namespace
from kvtier.connectors.vllm.weights import Source, identify
from kvtier.identity import Identification, Identity, unknown
from kvtier.types import BlockKey

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger(__name__)


class Names:
    """Of the blocks of one engine. The scheduler's process alone knows them, and tells the ranks.

    bytes_per_block: of all ranks that keep a block together, or on one rank. salt: the user's
    ``namespace``. Nothing has a name before ``settle`` was called and all bytes of the weights were
    read: what was stored under a wrong name could not be called back from vLLM's own memory.
    """

    def __init__(
        self, config: OffloadingConfig, bytes_per_block: int, engine: str, salt: str = ""
    ) -> None:
        self._config = config
        self._bytes_per_block = bytes_per_block
        self._engine = engine
        self._salt = salt
        self._traits = ""
        self._weights: Identification | None = None
        self._found: Identity | None = None
        self._digest = b""

    def settle(self, sources: Sequence[Source], traits: str = "") -> None:
        """Small weights are read at once, large ones in the background.

        traits: of the model, what the offloading config does not say.
        """
        self._traits = traits
        found = identify(sources, self._salt)
        if isinstance(found, Identity):
            self._found = found
        elif found.is_small:
            self._found = found.read()
        else:
            self._weights = found
            logger.info("KV on disk is used once the weights were read bytes=%d", found.num_bytes)
            found.check(self._hear)

    @property
    def digest(self) -> bytes:
        """Of the namespace, 32 bytes; none while the weights are being read."""
        if not self._digest and self._found is not None:
            self._digest = namespace(
                self._config,
                self._bytes_per_block,
                self._engine,
                self._found.digest,
                self._traits,
                self._salt,
            ).digest
        return self._digest

    def disown(self) -> None:
        """From now on blocks have names that no other process knows: the weights in memory may be
        others than those in the files."""
        self.close()
        self._found = unknown("its cache was reset, as it is when weights are replaced in memory")
        self._digest = b""

    def close(self) -> None:
        """Read no further."""
        if self._weights is not None:
            self._weights.stop()
            self._weights = None

    def __call__(self, key: bytes) -> BlockKey:
        assert self.digest, "nobody knows yet what the blocks belong to"
        return block_key(self.digest, key)

    def _hear(self, found: Identity) -> None:
        self._found = found
