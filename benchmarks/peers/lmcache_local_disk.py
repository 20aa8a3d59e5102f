"""LMCache's `LocalDiskBackend`: a file per chunk, a thread pool of its own; O_DIRECT as an option.

LMCache's own allocator hands out the arena as staging memory. The arena has huge pages, unlike
LMCache's default.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from benchmarks.peers.store import Arena, Bytes, Store

NUM_THREADS = 8
"""LMCache's default is 4."""
NO_LIMIT_GIB = 1 << 20
"""LMCache does not subtract what was removed, so any limit would be reached."""
HIDDEN = 1024
TOKENS = 16


class LmcacheLocalDisk(Store):
    """One worker of one model, with room for everything."""

    version = metadata.version("lmcache")

    def __init__(self, arena: Arena, folder: Path, num_blocks: int, direct: bool) -> None:
        super().__init__(arena, folder, num_blocks)
        torch.set_num_threads(1)
        num_layers, rest = divmod(arena.block_bytes, 2 * TOKENS * HIDDEN * 2)
        assert not rest, "a block has whole layers of 64 KiB"
        self._shape = torch.Size([2, num_layers, TOKENS, HIDDEN])
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            lmcache_instance_id="benchmark",
            local_cpu=False,
            local_disk=str(folder),
            max_local_disk_size=NO_LIMIT_GIB,
            extra_config={"use_odirect": direct, "disk_io_threads": NUM_THREADS},
        )
        facts = LMCacheMetadata(
            model_name="model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(num_layers, 2, TOKENS, HIDDEN // 128, 128),
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        staging = TensorMemoryAllocator(torch.from_numpy(arena.blocks))
        self._cpu = LocalCPUBackend(
            config, metadata=facts, dst_device="cpu", memory_allocator=staging
        )
        self._disk = LocalDiskBackend(config, self._loop, self._cpu, "cpu", None, facts)
        assert self._disk.use_odirect is direct
        self._chunks: list[MemoryObj] = []

    def prepare(self, numbers: Sequence[int]) -> None:
        """Allocate chunks over the blocks, which are in place already."""
        for block, _ in zip(self.arena.blocks, numbers, strict=False):
            chunk = self._cpu.allocate(self._shape, torch.bfloat16, MemoryFormat.KV_2LTD)
            assert chunk is not None
            assert chunk.raw_data.data_ptr() == block.ctypes.data, "the chunk lies elsewhere"
            self._chunks.append(chunk)

    def store(self, numbers: Sequence[int]) -> None:
        left = threading.Semaphore(0)
        self._disk.batched_submit_put_task(
            self._keys(numbers), self._chunks, on_complete_callback=lambda _: left.release()
        )
        for _ in numbers:
            left.acquire()
        self.release()

    def load(self, numbers: Sequence[int]) -> None:
        chunks = self._disk.batched_get_blocking(self._keys(numbers))
        self._chunks = [chunk for chunk in chunks if chunk is not None]
        assert len(self._chunks) == len(numbers), "a chunk was not loaded"

    def loaded(self, place: int) -> Bytes:
        return self._chunks[place].raw_data.numpy()

    def release(self) -> None:
        while self._chunks:
            self._chunks.pop().ref_count_down()

    def files(self, numbers: Sequence[int]) -> list[Path]:
        return [Path(self._disk._key_to_path(key)) for key in self._keys(numbers)]

    def forget(self, numbers: Sequence[int]) -> None:
        for key in self._keys(numbers):
            assert self._disk.remove(key)

    def close(self) -> None:
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _keys(self, numbers: Sequence[int]) -> list[CacheEngineKey]:
        return [CacheEngineKey("model", 1, 0, number + 1, torch.bfloat16) for number in numbers]


open_store = LmcacheLocalDisk
