"""A whole cache over a bucket: one replica loads what another one has computed."""

from __future__ import annotations

import time

import numpy as np

from kvtier.cache.tokens import Cache
from kvtier.core.config import CacheConfig
from kvtier.core.keys import Namespace, token_labels
from kvtier.core.types import LoadPolicy, PrefetchPolicy
from kvtier.devices import Memory, find_device
from kvtier.layout import DType, full_attention, named_layout, part_view
from kvtier.tiers import DeviceTier
from tests.tiers.remote.bucket import Bucket

BLOCK_SIZE = 16
GROUP = full_attention(4, 2, 64, DType.FLOAT32, BLOCK_SIZE)
PROMPT = list(range(1000, 1000 + 8 * BLOCK_SIZE))


class Replica:
    """Computes the KV of a token from its number, and compares all KV that it loads."""

    def __init__(self, bucket: Bucket) -> None:
        layout = named_layout("layer_first", GROUP, num_blocks=32)
        pool = np.zeros(layout.nbytes, np.uint8)
        memory = Memory(pool.ctypes.data, layout.nbytes, "cpu", pool)
        self.kv = part_view(pool, layout, 0).view(np.float32)
        location = bucket.location(poll_s=0.05, publish_s=0.05, pack_bytes=3 * layout.block_bytes)
        config = CacheConfig(
            host_capacity=32 * GROUP.bytes_per_block,
            storage=(f"far=s3:{location}",),
            load_policy=LoadPolicy.ALWAYS,
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        )
        self.cache = Cache(config, find_device("cpu"), DeviceTier(memory, layout))
        self.namespace = Namespace("model", "r1", "float32", GROUP.fingerprint, BLOCK_SIZE).digest

    def serve(self, prompt: list[int]) -> int:
        """Serve a prompt; return the number of tokens that were loaded."""
        labels = token_labels(prompt, BLOCK_SIZE)
        # One token more is requested than is cached: it is computed in any case.
        lease = self.cache.fetch(self.namespace, labels, len(prompt) + 1, len(labels) + 1)
        assert lease is not None
        while not lease.ready:
            self.cache.poll()
        num_reused = lease.num_shared * BLOCK_SIZE
        for at, token in enumerate(prompt):
            kv = self.kv[lease.slots[at // BLOCK_SIZE], :, at % BLOCK_SIZE]
            if at >= num_reused:
                kv[...] = token
            assert (kv == token).all()
        self.cache.commit(lease, len(labels))
        self.cache.release(lease)
        return num_reused


def test_what_one_replica_computed_another_one_loads(bucket: Bucket) -> None:
    one, other = Replica(bucket), Replica(bucket)
    assert one.serve(PROMPT) == 0
    one.cache.drain()
    end_s = time.monotonic() + 20
    while not any("8 blocks known" in each for each in found(other)):
        assert time.monotonic() < end_s, found(other)
        time.sleep(0.02)
    assert other.serve(PROMPT) == len(PROMPT)
    one.cache.close()
    other.cache.close()
    late = Replica(bucket)
    assert late.serve(PROMPT) == len(PROMPT)
    late.cache.close()


def found(replica: Replica) -> list[str]:
    return [finding.found for finding in replica.cache.findings()]
