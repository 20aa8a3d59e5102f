"""LMCache's `fs_native` adapter, the disk back end of its server: C++ threads, a file per chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig

from benchmarks.peers.lmcache_adapter import LmcacheAdapter, keys_of
from benchmarks.peers.store import Arena

NUM_THREADS = 8
"""Its default is 4."""


class LmcacheFsNative(LmcacheAdapter):
    """No limit on the disk's use."""

    def __init__(self, arena: Arena, folder: Path, num_blocks: int, direct: bool) -> None:
        config = FSNativeL2AdapterConfig.from_dict(
            {"base_path": str(folder), "num_workers": NUM_THREADS, "use_odirect": direct}
        )
        super().__init__(arena, folder, num_blocks, config)

    def files(self, numbers: Sequence[int]) -> list[Path]:
        return [
            self.folder / f"{key.model_name}@{key.kv_rank:#010x}@0@{key.chunk_hash.hex()}.data"
            for key in keys_of(numbers)
        ]


open_store = LmcacheFsNative
