"""vLLM's scheduler half with kvtier's slab below its own host tier, driven by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import shake_128
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.engines.vllm.replica import offloading_config

ROW_BYTES = 8192
NUMBERS = itertools.count()
STEP = ScheduleEndContext((), ())


def config_of(folder: Path, num_rows: int, num_slots: int, **tier: Any) -> OffloadingConfig:
    settings = {
        "type": "KvtierTier",
        "module_path": "kvtier.connectors.vllm.standalone.secondary",
        "disk_path": str(folder),
        "disk_capacity": num_slots * ROW_BYTES,
        "namespace": "tests",  # of weights that are nowhere
        **tier,
    }
    extra = {"cpu_bytes_to_use": num_rows * ROW_BYTES, "secondary_tiers": [settings]}
    return offloading_config(ROW_BYTES // 2, extra, pages_per_block=2)


def keys_of(*numbers: int, group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(shake_128(b"%d" % number).digest(32), group) for number in numbers]


def bytes_of(key: OffloadKey) -> np.ndarray:
    return np.frombuffer(shake_128(b"bytes of " + key).digest(ROW_BYTES), np.uint8)


class Harness:
    """Actions of vLLM's scheduler on its tiers, with the accelerator's part done by hand."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.spec = TieringOffloadingSpec(config)
        self.manager: Any = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers

    @property
    def rows(self) -> np.ndarray:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def request(self, keys: Sequence[OffloadKey]) -> ReqContext:
        context = ReqContext(f"request {next(NUMBERS)}")
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, 32 * (position + 1))
        self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        self.settle()
        self.manager.on_request_finished(context)
        self.manager.on_schedule_end(STEP)

    def settle(self) -> None:
        """Take steps of the scheduler until no transfer is pending."""
        while True:
            self.manager.on_schedule_end(STEP)
            if not self.manager.has_pending_work():
                return
            self.tier.drain_jobs()

    def store(self, keys: Sequence[OffloadKey]) -> None:
        """Let a request compute blocks, and cascade them."""
        self.finish(self.compute(keys))

    def compute(self, keys: Sequence[OffloadKey]) -> ReqContext:
        """Let a request compute blocks. Return it."""
        context = self.request(keys)
        output = self.manager.prepare_store(keys, context)
        assert output is not None, "no room in the host tier"
        for key, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.rows[row] = bytes_of(key)
        self.manager.complete_store(output.keys_to_store, context)
        return context

    def load(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Look blocks up until each is in the host tier or cannot be loaded; load the found ones.

        Compare the loaded bytes; return whether each block was found.
        """
        context = self.request(keys)
        found: list[bool] = []
        for key in keys:
            result = self.manager.lookup(key, context)
            while result in (LookupResult.HIT_PENDING, LookupResult.RETRY):
                self.settle()
                result = self.manager.lookup(key, context)
            found.append(result is LookupResult.HIT)
        there = [key for key, is_there in zip(keys, found, strict=True) if is_there]
        spec = self.manager.prepare_load(there, context)
        for key, row in zip(there, spec.chunk_ids, strict=True):
            assert (self.rows[row] == bytes_of(key)).all(), "wrong bytes"
        self.manager.complete_load(there, context)
        self.finish(context)
        return found

    def forget_host(self) -> None:
        """Empty the host tier, as when weights change or the engine sleeps."""
        self.manager.reset_cache()

    def check(self) -> None:
        self.settle()
        self.tier.slab.check_invariants()
        assert not self.manager._jobs


@contextmanager
def running(path: Path, num_rows: int = 16, num_slots: int = 16, **tier: Any) -> Iterator[Harness]:
    harness = Harness(config_of(path, num_rows, num_slots, **tier))
    try:
        yield harness
        harness.check()
    finally:
        harness.manager.shutdown()
