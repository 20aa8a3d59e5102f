"""SGLang's `HiCacheFile`: a file per page, through the page cache.

Its controller calls ``batch_set`` and ``batch_get``, which take one page after the other. Pages are
read directly into place here; SGLang itself reads into a buffer and copies. With more than one
thread, the pages of a batch are distributed over them, which SGLang does not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.micro.index_worker import stand_in_for_torchvision
from benchmarks.peers.store import Arena, Store, key_of

stand_in_for_torchvision()

from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402  its imports need the stand-in
    HiCacheFile,
    HiCacheStorageConfig,
)


class SglangFile(Store):
    """One rank of one model, no limit on the disk's use."""

    version = metadata.version("sglang")

    def __init__(self, arena: Arena, folder: Path, num_blocks: int, num_threads: int) -> None:
        super().__init__(arena, folder, num_blocks)
        torch.set_num_threads(1)
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="model",
        )
        self._files = HiCacheFile(config, file_path=str(folder))
        self._pages = [torch.from_numpy(block) for block in arena.blocks]
        self._pool = ThreadPoolExecutor(num_threads) if num_threads > 1 else None

    def store(self, numbers: Sequence[int]) -> None:
        keys, pages = self._keys(numbers), self._pages[: len(numbers)]
        if self._pool:
            done = all(self._pool.map(self._files.set, keys, pages))
        else:
            done = self._files.batch_set(keys, pages)
        assert done, "a page was not stored"

    def load(self, numbers: Sequence[int]) -> None:
        keys, pages = self._keys(numbers), self._pages[: len(numbers)]
        if self._pool:
            found = list(self._pool.map(self._files.get, keys, pages))
        else:
            found = self._files.batch_get(keys, pages)
        assert all(page is not None for page in found), "a page was not found"

    def files(self, numbers: Sequence[int]) -> list[Path]:
        names = [self._files._get_suffixed_key(key) for key in self._keys(numbers)]
        return [self.folder / f"{name}.bin" for name in names]

    def forget(self, numbers: Sequence[int]) -> None:
        for path in self.files(numbers):
            path.unlink()

    def _keys(self, numbers: Sequence[int]) -> list[str]:
        return [key_of(number).hex() for number in numbers]


open_store = SglangFile
