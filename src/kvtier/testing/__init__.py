"""Conformance suites and fault-injecting wrappers, for kvtier's tests and authors of plug-ins.

Subclass a suite in a test file, implement its factory method, and run pytest:

    class TestMyPolicy(PolicySuite):
        def make_policy(self) -> EvictionPolicy:
            return MyPolicy()

The package requires pytest.
"""

from __future__ import annotations

from kvtier.testing.block_cache_suite import BlockCacheHarness, BlockCacheSuite
from kvtier.testing.codec_suite import CodecSuite
from kvtier.testing.device_suite import DeviceSuite
from kvtier.testing.faulty import FaultyDevice
from kvtier.testing.faulty_storage import FaultyStorage
from kvtier.testing.lossy_codec_suite import LossyCodecSuite
from kvtier.testing.memory import BlockBytes, host_memory, memory_bytes
from kvtier.testing.policy_suite import PolicySuite
from kvtier.testing.storage import MemoryStorage, StoredBlocks
from kvtier.testing.storage_suite import StorageSuite
from kvtier.testing.tier_suite import AllocatorSuite, MemoryTierSuite

__all__ = [
    "AllocatorSuite",
    "BlockBytes",
    "BlockCacheHarness",
    "BlockCacheSuite",
    "CodecSuite",
    "DeviceSuite",
    "FaultyDevice",
    "FaultyStorage",
    "LossyCodecSuite",
    "MemoryStorage",
    "MemoryTierSuite",
    "PolicySuite",
    "StorageSuite",
    "StoredBlocks",
    "host_memory",
    "memory_bytes",
]
