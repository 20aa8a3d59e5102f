"""Names of blocks outside the process: on disk, and in other processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from blake3 import blake3

from kvtier.connectors.common.weights import Source, identify
from kvtier.core.keys import next_key
from kvtier.core.types import BlockKey
from kvtier.identity import Identification, Identity, unknown

logger = logging.getLogger(__name__)


class BlockNames:
    """Names of the blocks of one engine, in a namespace that depends on its weights.

    Blocks have no names before ``settle`` was called and all bytes of the weights were read: a
    wrong name could not be revoked, since the engine's own memory may keep the block.

    digest_of: return the digest of the namespace, 32 bytes, from that of the weights. salt: the
    user's ``namespace``.
    """

    def __init__(self, digest_of: Callable[[str], bytes], salt: str = "") -> None:
        self._digest_of = digest_of
        self._salt = salt
        self._weights: Identification | None = None
        self._found: Identity | None = None
        self._digest = b""

    def settle(self, sources: Sequence[Source]) -> None:
        """Identify the weights. Small ones are read at once, large ones in the background."""
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
        """Digest of the namespace, 32 bytes; b"" while the weights are being read."""
        if not self._digest and self._found is not None:
            self._digest = self._digest_of(self._found.digest)
        return self._digest

    def digest_of_part(self, facts: bytes) -> Callable[[], bytes]:
        """Return a function that returns the digest of a part's blocks, such as those of one pool.

        It returns b"" while ``digest`` is empty.

        facts: everything that decides on the bytes of these blocks besides the engine.
        """
        known = (b"", b"")

        def digest() -> bytes:
            nonlocal known
            if self.digest != known[0]:
                known = self.digest, blake3(self.digest + facts).digest() if self.digest else b""
            return known[1]

        return digest

    def forget(self) -> None:
        """Give blocks no names until ``disown`` is called."""
        self.close()
        self._found, self._digest = None, b""

    def disown(self, reason: str) -> None:
        """Give blocks names from now on that no other process uses.

        The weights in memory may differ from those in the files.
        """
        self.close()
        self._found = unknown(reason)
        self._digest = b""

    def close(self) -> None:
        """Stop reading the weights."""
        if self._weights is not None:
            self._weights.stop()
            self._weights = None

    def __call__(self, key: bytes) -> BlockKey:
        assert self.digest, "the namespace of the blocks is not known yet"
        return block_key(self.digest, key)

    def _hear(self, found: Identity) -> None:
        self._found = found


def block_key(digest: bytes, key: bytes) -> BlockKey:
    """Return the name of a block outside the process.

    digest: digest of its namespace. key: the engine's key.
    """
    return next_key(digest, key)
