"""What chunks are called outside the process: on disk, and by other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.connectors.vllm.identity import chunk_key, namespace
from kvtier.types import BlockKey

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig


class Names:
    """Of the chunks of one engine; the same in the scheduler's process and in every rank.

    digest: of the namespace, 32 bytes; there once ``settle`` was called. chunk_bytes: on one rank.
    """

    def __init__(self, config: OffloadingConfig, chunk_bytes: int, engine: str) -> None:
        self._config = config
        self._chunk_bytes = chunk_bytes
        self._engine = engine
        self.digest = b""

    def settle(self, traits: str) -> None:
        """traits: of the model, what the offloading config does not say."""
        self.digest = namespace(self._config, self._chunk_bytes, self._engine, traits).digest

    def __call__(self, key: bytes) -> BlockKey:
        assert self.digest, "nobody said what the chunks belong to"
        return chunk_key(self.digest, key)
