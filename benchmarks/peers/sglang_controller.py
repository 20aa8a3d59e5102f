"""A storage back end of SGLang, behind SGLang's own controller and a host pool.

The timed part is the work of ``HiCacheController`` in a prefetch or a backup, in batches of 128
pages. Pages are copied through tensors of their own (`file`) or directly into the pool, as SGLang
chooses by the back end. The controller's threads and queues and the agreement between ranks are
left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from mmap import mmap
from pathlib import Path
from queue import SimpleQueue

import torch

from benchmarks.peers import ROOT
from benchmarks.peers.store import Arena, Bytes, Store, key_of

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.path.append(str(ROOT / "tests" / "sglang" / "stand_ins"))

from sglang.srt.managers import cache_controller
from sglang.srt.managers.cache_controller import (
    HiCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE, HEADS, HEAD_DIM = 64, 2, 128
LAYER_BYTES = 2 * PAGE * HEADS * HEAD_DIM * 2
"""Bytes of a page in a layer: K and V in two bytes each, of a rank that has two heads."""
FOLDERS = ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR")
KEPT = 4
"""Batches that a back end with limited capacity can hold beyond the stored blocks."""
OURS = {
    "backend_name": "kvtier",
    "module_path": "kvtier.connectors.sglang.entry",
    "class_name": "KvtierStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
    "namespace": "benchmark",
    "load_policy": "always",
}


class SglangController(Store):
    """One rank of one model. A batch is one operation of the controller.

    Args:
        arena: memory of one batch.
        folder: of the back end's files.
        num_blocks: stored blocks.
        backend: SGLang's name of the back end.
        package: package whose version is reported.
        extra: settings of the back end.
        memory: file for the host pool's pages, the same one for all contestants.
    """

    def __init__(
        self,
        arena: Arena,
        folder: Path,
        num_blocks: int,
        backend: str,
        package: str,
        extra: Mapping[str, object],
        memory: str,
    ) -> None:
        super().__init__(arena, folder, num_blocks)
        self.version = metadata.version(package)
        torch.set_num_threads(1)
        os.environ.update(dict.fromkeys(FOLDERS, str(folder)))
        settings = dict(extra)
        if backend == "dynamic":
            capacity = (num_blocks + KEPT * arena.batch) * arena.block_bytes
            settings = {**OURS, "disk_path": str(folder), "disk_capacity": capacity, **settings}
        self._is_ours = backend == "dynamic"
        self._pool = host_pool(arena.block_bytes, arena.batch)
        self._pool.kv_buffer = mapped(Path(memory), self._pool.kv_buffer)
        slots = self._pool.alloc(arena.batch * PAGE)
        assert slots is not None, "the pool has room for a batch"
        order = torch.randperm(arena.batch, generator=torch.Generator().manual_seed(1))
        self._places = slots.view(arena.batch, PAGE)[order]
        self._storage, self._controller = controller(backend, settings, self._pool)

    def prepare(self, numbers: Sequence[int]) -> None:
        _keys(numbers)
        for place in range(len(numbers)):
            page = torch.from_numpy(self.arena.blocks[place]).view(self._pool.dtype)
            self._pool.set_from_flat_data_page(self._first(place), page)

    def store(self, numbers: Sequence[int]) -> None:
        operation = StorageOperation(
            self._slots(numbers), [], hash_value=_keys(numbers), prefix_keys=self._before()
        )
        self._controller._page_backup(operation)
        assert operation.completed_tokens == len(numbers) * PAGE, "a page was not stored"

    def load(self, numbers: Sequence[int]) -> None:
        operation = PrefetchOperation("request", [], prefix_keys=self._before())
        operation.hash_value, operation.host_indices = _keys(numbers), self._slots(numbers)
        num_pages = self._controller._page_transfer(operation)
        assert num_pages == len(numbers), "a page was not loaded"

    def lookup(self, numbers: Sequence[int]) -> Callable[[], int]:
        operation = PrefetchOperation("request", _keys(numbers), prefix_keys=self._before())
        return lambda: len(self._controller._storage_hit_query(operation)[0])

    def loaded(self, place: int) -> Bytes:
        page = self._pool.get_data_page(self._first(place), flat=True)
        return page.contiguous().view(torch.uint8).numpy()

    def clear(self) -> None:
        super().clear()
        self._pool.kv_buffer.zero_()

    def files(self, numbers: Sequence[int]) -> list[Path]:
        """Return these pages' files. Back ends with a file per page name it by the key."""
        every = super().files(numbers)
        keys = set(_keys(numbers))
        return every if self._is_ours else [path for path in every if path.name[:64] in keys]

    def forget(self, numbers: Sequence[int]) -> None:
        if self._is_ours:  # kvtier evicts the least recently used ones by itself
            all_others = _keys(range(self.num_blocks))
            self._storage.batch_set_v1(all_others[:1], self._slots(range(1)), _prompt(all_others))
        else:
            for path in self.files(numbers):
                path.unlink()

    def close(self) -> None:
        if hasattr(self._storage, "close"):
            self._storage.close()

    def _slots(self, numbers: Sequence[int]) -> torch.Tensor:
        return self._places[: len(numbers)].flatten()

    def _first(self, place: int) -> int:
        return int(self._places[place, 0])

    def _before(self) -> list[str] | None:
        """Return the prefix keys, as SGLang does for back ends that request them."""
        return [] if self._is_ours else None


def host_pool(page_bytes: int, num_pages: int) -> MHATokenToKVPoolHost:
    """Return a host pool in SGLang's own memory and in its default layout.

    The device pool beside it is as small as possible.
    """
    num_layers, rest = divmod(page_bytes, LAYER_BYTES)
    assert not rest, f"a page has a multiple of {LAYER_BYTES} bytes"
    device = MHATokenToKVPool(
        size=PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=num_layers,
        device="cpu",
        enable_memory_saver=False,
    )
    return MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        num_pages + 1,
        0,
        PAGE,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=num_layers,
    )


def mapped(path: Path, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a file in memory. The file is created or enlarged if necessary."""
    with path.open("a+b") as file:
        file.truncate(max(like.nbytes, path.stat().st_size))
        return torch.frombuffer(mmap(file.fileno(), like.nbytes), dtype=like.dtype).view(like.shape)


def controller(
    backend: str, settings: dict[str, object], pool: MHATokenToKVPoolHost
) -> tuple[object, HiCacheController]:
    """Return the storage, and the part of a controller that moves pages."""
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "model")
    config.extra_config = settings
    made = HiCacheController.__new__(HiCacheController)
    made.page_size = PAGE
    made.mem_pool_host = made.storage_host_pool = pool
    made.prefetch_sync_queue = SimpleQueue()
    made.storage_backend = StorageBackendFactory.create_backend(backend, config, pool)
    made.storage_backend.register_mem_pool_host(pool)
    made.storage_backend.on_host_pools_registered()
    generic = backend == "file"
    made.page_get_func = made._generic_page_get if generic else made._page_get_zero_copy
    made.page_set_func = made._generic_page_set if generic else made._page_set_zero_copy
    # Hashing is no work of the back ends, so it is left out: "tokens" are the keys.
    cache_controller.get_storage_hash_str = lambda tokens, *_, **__: tokens
    return made.storage_backend, made


def _prompt(keys: list[str]) -> object:
    return cache_controller.HiCacheStorageExtraInfo(prefix_keys=keys)


@cache
def _key(number: int) -> str:
    """Return the key of a page. It is cached, because hashing is SGLang's work."""
    return key_of(number).hex()


def _keys(numbers: Sequence[int]) -> list[str]:
    return [_key(number) for number in numbers]


open_store = SglangController
