"""Plug-in that limits kvtier's disk to ``KVTIER_BENCH_BYTES_PER_S``, in each server process."""

from __future__ import annotations

import os


def register() -> None:
    """Install the limit. SGLang calls this in each of its processes."""
    rate = os.environ.get("KVTIER_BENCH_BYTES_PER_S")
    if not rate:
        return
    from kvtier.connectors.common import opening
    from kvtier.tiers.disk import DiskTier
    from kvtier.tiers.wrappers import ThrottledTier

    def slow(options: object, group: object, memory: object) -> ThrottledTier:
        return ThrottledTier(DiskTier(options, group, memory), int(rate))  # type: ignore[arg-type]

    opening.DiskTier = slow  # type: ignore[misc,assignment]
