"""Keys of blocks in a recorded trace: a salted hash of the prompt up to the block's end.

    key[-1] = BLAKE3(salt; tenant)       key[i] = BLAKE3(key[i-1] || tokens of block i)

cut to eight bytes. If the engine has its own hashes of prefixes, which include the tenant:

    key[i] = BLAKE3(salt; its hash of the prompt up to the end of block i)

Equal prefixes of one tenant have equal keys, which is all that a replay needs. Prompts cannot be
guessed from the keys without the salt, which is never written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier.core.errors import ConfigError
from kvtier.core.keys import next_keys, token_labels

SALT_VARIABLE = "KVTIER_RECORD_SALT"
"""Environment variable with the salt. Processes with the same value give equal prefixes equal
keys."""
LEAST_SALT = 16
"""Minimum length in characters: shorter ones can be guessed."""


class Chains:
    """Keys under one salt.

    salt: 32 secret bytes.
    block_tokens: tokens per key.
    """

    def __init__(self, salt: bytes, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens: {block_tokens} is below 1")
        self.block_tokens = block_tokens
        self._salt = salt

    @property
    def name(self) -> str:
        """Name of the salt: equal for equal salts, and reveals nothing else."""
        return blake3(b"kvtier record", key=self._salt).hexdigest(8)

    def keys(
        self, tokens: Sequence[int] | npt.NDArray[np.integer], tenant: str = ""
    ) -> npt.NDArray[np.uint64]:
        """Return uint64 [len(tokens) // block_tokens]: the keys of all full blocks.

        tenant: requests of different tenants share no key.
        Raises ``ConfigError`` for invalid token ids.
        """
        start = blake3(tenant.encode(), key=self._salt).digest()
        hashes = b"".join(
            key[:8] for key in next_keys(start, token_labels(tokens, self.block_tokens))
        )
        return np.frombuffer(hashes, "<u8").astype(np.uint64)

    def keys_of_hashes(self, hashes: Sequence[bytes]) -> npt.NDArray[np.uint64]:
        """Return uint64 [len(hashes)]: the keys of prefixes.

        hashes: an engine's own, each of a prefix that ends with a block of ``block_tokens``.
        """
        hasher = blake3(key=self._salt)
        found = []
        for hash_value in hashes:
            found.append(hasher.update(hash_value).digest(8))
            hasher.reset()
        return np.frombuffer(b"".join(found), "<u8").astype(np.uint64)


def salt_from_environment() -> bytes:
    """Return the salt of ``KVTIER_RECORD_SALT``, or a random one of this process."""
    text = os.environ.get(SALT_VARIABLE, "")
    if not text:
        return os.urandom(32)
    if len(text) < LEAST_SALT:
        raise ConfigError(
            f"{SALT_VARIABLE}: {len(text)} characters can be guessed; give {LEAST_SALT} or more, "
            "random ones"
        )
    return blake3(text.encode()).digest()
