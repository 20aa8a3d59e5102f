"""Where blocks are in host memory: what the scheduler's side tells a rank about a copy."""

from __future__ import annotations

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec


class HostSlots(BlockIDsLoadStoreSpec):
    """Slots of the host tier, one per block, in the order of the keys that were asked for."""
