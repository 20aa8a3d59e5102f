"""The façade in one page: an engine of your own over kvtier, with numpy and no accelerator.

    python examples/facade.py

The "engine" here computes the KV of a token from the token's number, so that what comes back can be
checked. A real one gives its own pool, its own device, and computes attention.
"""

from __future__ import annotations

import numpy as np

from kvtier.cache import Cache
from kvtier.config import CacheConfig
from kvtier.devices import Memory, find_device
from kvtier.keys import Namespace, token_labels
from kvtier.layout import DType, full_attention, named_layout, part_view
from kvtier.tiers import DeviceTier

BLOCK_SIZE = 16
GROUP = full_attention(
    num_layers=4, num_kv_heads=2, head_dim=64, dtype=DType.FLOAT32, block_size=BLOCK_SIZE
)


def main() -> None:
    # Your KV memory, and how it is arranged: 64 blocks, one layer after the other.
    layout = named_layout("layer_first", GROUP, num_blocks=64)
    pool = np.zeros(layout.nbytes, np.uint8)
    memory = Memory(pool.ctypes.data, layout.nbytes, "cpu", pool)
    keys = part_view(pool, layout, 0).view(np.float32)  # [slot, layer, token, head, dim]

    config = CacheConfig(host_capacity=256 * GROUP.bytes_per_block)
    cache = Cache(config, find_device("cpu"), DeviceTier(memory, layout))
    namespace = Namespace("my-model", "r1", "float32", GROUP.fingerprint, BLOCK_SIZE)

    def serve(prompt: list[int]) -> int:
        """Have the KV of ``prompt`` in the pool. Returns how many tokens were not computed."""
        labels = token_labels(prompt, BLOCK_SIZE)
        num_blocks = -(-len(prompt) // BLOCK_SIZE)
        lease = cache.fetch(namespace.digest, labels, len(prompt), num_blocks)
        assert lease is not None, "no room now: wait for another request to end"
        while not lease.ready:
            cache.poll()
        num_reused = lease.num_shared * BLOCK_SIZE
        for at in range(num_reused, len(prompt)):  # "compute" the rest
            keys[lease.slots[at // BLOCK_SIZE], :, at % BLOCK_SIZE] = prompt[at]
        cache.commit(lease, len(labels))
        for at, token in enumerate(prompt):  # "attend" to all of it
            assert (keys[lease.slots[at // BLOCK_SIZE], :, at % BLOCK_SIZE] == token).all()
        cache.release(lease)
        return num_reused

    prompt = list(range(1000, 1100))
    print("first time:          ", serve(prompt), "of", len(prompt), "tokens reused")
    print("again, from device:  ", serve(prompt), "of", len(prompt), "tokens reused")
    cache.drain()
    cache.clear("device")
    print("again, from host:    ", serve(prompt), "of", len(prompt), "tokens reused")
    print("with another ending: ", serve([*prompt[:50], *range(50)]), "of 100 tokens reused")
    cache.close()


if __name__ == "__main__":
    main()
