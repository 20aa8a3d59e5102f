"""A disk that is slow under kvtier, in each process of a server: ``KVTIER_BENCH_BYTES_PER_S``."""

from __future__ import annotations

import os


def register() -> None:
    """SGLang calls it in each of its processes."""
    rate = os.environ.get("KVTIER_BENCH_BYTES_PER_S")
    if not rate:
        return
    from kvtier.connectors.common import opening
    from kvtier.tiers.disk import DiskTier
    from kvtier.tiers.wrappers import ThrottledTier

    def slow(options: object, group: object, memory: object) -> ThrottledTier:
        return ThrottledTier(DiskTier(options, group, memory), int(rate))  # type: ignore[arg-type]

    opening.DiskTier = slow  # type: ignore[misc,assignment]
