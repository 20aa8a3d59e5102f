"""Probes: small reads of blocks that are computed, to renew the estimate of their tier.

A tier that was slow for a moment is not read any more, so its estimate would stay wrong. While
blocks that a tier has are computed, a few of them are read now and then, and no request waits for
them.
"""

from __future__ import annotations

PROBE_S = 0.25
"""Pause between a tier's last read and a probe: a few probes renew an estimate in a second."""
MAX_PROBE_PAUSE_S = 1.0
"""Longest pause, also for a tier that stays slow."""
PROBE_BYTES = 4 << 20
"""Bytes of a probe, at least one block; as many as idle storage verifies each second."""


def num_to_probe(num_declined: int, block_bytes: int, quiet_s: float, last_s: float = 0.0) -> int:
    """Return how many of the blocks that are computed to read as a probe.

    Args:
        num_declined: number of blocks that are computed although the tier has them.
        block_bytes: bytes per block.
        quiet_s: seconds since the last read of the tier began or ended.
        last_s: expected duration of a probe. A slow tier is left alone for longer.
    """
    if quiet_s < min(MAX_PROBE_PAUSE_S, max(PROBE_S, 3 * last_s)):
        return 0
    return min(num_declined, max(1, PROBE_BYTES // max(1, block_bytes)))
