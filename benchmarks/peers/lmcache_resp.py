"""LMCache's `resp` adapter, how its server reaches Valkey and Redis: C++ threads, a line each."""

from __future__ import annotations

from pathlib import Path

from lmcache.v1.distributed.l2_adapters.resp_l2_adapter import RESPL2AdapterConfig

from benchmarks.peers.lmcache_adapter import LmcacheAdapter
from benchmarks.peers.store import Arena


class LmcacheResp(LmcacheAdapter):
    """A server on loopback. num_workers: threads; its default is 8."""

    def __init__(
        self, arena: Arena, folder: Path, num_blocks: int, port: int, num_workers: int
    ) -> None:
        config = RESPL2AdapterConfig.from_dict(
            {"host": "127.0.0.1", "port": port, "num_workers": num_workers}
        )
        super().__init__(arena, folder, num_blocks, config)


open_store = LmcacheResp
