"""LMCache's `fs_native` adapter, the disk back end of its server: C++ threads, a file per chunk.

The adapter is called as by the server's controllers: one task per batch, and a descriptor that is
readable when the task is done. The controllers are left out.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.platform.event_notifier import consume_fd

from benchmarks.peers.store import Arena, Store, key_of

DEADLINE_MS = 60_000
NUM_THREADS = 8
"""LMCache's default is 4."""


class LmcacheFsNative(Store):
    """One rank of one model, with no limit on the disk's use. The arena is its memory tier."""

    version = metadata.version("lmcache")

    def __init__(self, arena: Arena, folder: Path, num_blocks: int, direct: bool) -> None:
        super().__init__(arena, folder, num_blocks)
        config = FSNativeL2AdapterConfig.from_dict(
            {"base_path": str(folder), "num_workers": NUM_THREADS, "use_odirect": direct}
        )
        self._adapter = create_l2_adapter_from_registry(config)
        staging = TensorMemoryAllocator(torch.from_numpy(arena.blocks))
        shape = torch.Size([arena.block_bytes])
        self._chunks = [staging.allocate(shape, torch.uint8) for _ in range(arena.batch)]
        for block, chunk in zip(arena.blocks, self._chunks, strict=True):
            assert chunk.raw_data.data_ptr() == block.ctypes.data, "the chunk lies elsewhere"
        self._stored, self._found = select.poll(), select.poll()
        self._stored.register(self._adapter.get_store_event_fd(), select.POLLIN)
        self._found.register(self._adapter.get_load_event_fd(), select.POLLIN)

    def store(self, numbers: Sequence[int]) -> None:
        task = self._adapter.submit_store_task(keys_of(numbers), self._chunks[: len(numbers)])
        _wait(self._stored)
        result = self._adapter.pop_completed_store_tasks()[task]
        assert result.is_successful(), "a chunk was not stored"

    def load(self, numbers: Sequence[int]) -> None:
        task = self._adapter.submit_load_task(keys_of(numbers), self._chunks[: len(numbers)])
        _wait(self._found)
        found = self._adapter.query_load_result(task)
        assert found is not None
        assert found.popcount() == len(numbers), "a chunk was not loaded"

    def forget(self, numbers: Sequence[int]) -> None:
        self._adapter.delete(keys_of(numbers))

    def files(self, numbers: Sequence[int]) -> list[Path]:
        return [
            self.folder / f"{key.model_name}@{key.kv_rank:#010x}@0@{key.chunk_hash.hex()}.data"
            for key in keys_of(numbers)
        ]

    def close(self) -> None:
        self._adapter.close()


def _wait(poll: select.poll) -> None:
    ready = poll.poll(DEADLINE_MS)
    assert ready, "the adapter did not answer"
    consume_fd(ready[0][0])


def keys_of(numbers: Sequence[int]) -> list[ObjectKey]:
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    return [ObjectKey(key_of(number), "model", rank) for number in numbers]


open_store = LmcacheFsNative
