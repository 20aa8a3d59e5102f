"""Chained keys, one hash after the other."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

MOST_BYTES = 1024
"""Of a label and the key in front of it: the native core hashes no more."""


def chain_keys(previous: bytes, labels: Iterable[bytes]) -> list[bytes] | None:
    """The keys of the blocks ``labels``, each below the one before it, the first below what
    ``previous`` names. None where that would be more than ``MOST_BYTES`` at once."""
    keys = []
    for label in labels:
        if len(previous) + len(label) > MOST_BYTES:
            return None
        keys.append(previous := blake3(previous + label).digest())
    return keys
