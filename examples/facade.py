"""An engine of your own over kvtier, in one page: numpy, no accelerator, any thread.

    python examples/facade.py

The "engine" computes the KV of a token from the token's number, so that what comes back can be
checked. A real one computes attention, and gives a tensor on its device.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import numpy as np

import kvtier

BLOCK_SIZE = 16


class Engine:
    """Has the KV of prompts in its own memory, wherever it comes from."""

    def __init__(self, folder: str) -> None:
        # [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]
        self.kv = np.zeros((4, 2, 64, BLOCK_SIZE, 2, 64), np.float32)
        below = kvtier.CacheConfig("16MiB", disk_path=folder, disk_capacity="64MiB")
        self.cache = kvtier.open_cache(self.kv, "my-model, revision 1", below)

    def serve(self, tokens: list[int]) -> str:
        """Have the KV of ``tokens``. Say how many were not computed."""
        prompt = self.cache.prompt(tokens)
        lease = self.cache.fetch(prompt, wait_s=60)
        assert lease is not None, "no room for a minute: let fewer requests run"
        num_reused = lease.num_shared * BLOCK_SIZE
        for at, token in enumerate(tokens):
            place = self.kv[:, :, lease.slots[at // BLOCK_SIZE], at % BLOCK_SIZE]
            if at >= num_reused:
                place[:] = token  # "compute" it
            assert (place == token).all()  # "attend" to it
        self.cache.finish(lease)
        return f"{num_reused} of {len(tokens)} tokens reused"


def main() -> None:
    prompt = list(range(1000, 1100))
    with TemporaryDirectory() as folder:
        engine = Engine(folder)
        print("first time:          ", engine.serve(prompt))
        print("again, from memory:  ", engine.serve(prompt))
        stored = engine.cache.stored(engine.cache.prompt(prompt))
        print("a crash may come:    ", stored.result(timeout=60), "tokens are on disk")
        engine.cache.close()
        engine = Engine(folder)
        print("after a restart:     ", engine.serve(prompt))
        print("with another ending: ", engine.serve([*prompt[:50], *range(50)]))
        engine.cache.close()


if __name__ == "__main__":
    main()
