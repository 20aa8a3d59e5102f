"""A replica of a vLLM engine without its model.

The scheduler's half and the ranks' halves that the spec makes, driven as vLLM drives them.

Bytes follow from keys and ranks, and are compared for every load that is reported as done.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from hashlib import shake_128
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

import kvtier
from kvtier.cache.transfer.ranks import Report
from kvtier.connectors.vllm.offloading.spec import KvtierSpec
from kvtier.connectors.vllm.shared.pages import EnginePages
from kvtier.connectors.vllm.shared.weights import vllm_source
from kvtier.tiers.wrappers import Shards

MODEL = Path(kvtier.__file__).parent / "serve/engine/builtin/kvtier-tiny"
PAGE_BYTES = 4096
NUM_PAGES = 64
TOKENS = 16
PATIENCE_S = 60.0
NUMBERS = itertools.count()
WAITS = (LookupResult.RETRY, LookupResult.HIT_PENDING)


def key_of(number: int) -> OffloadKey:
    return make_offload_key(shake_128(b"%d" % number).digest(32), 0)


def offloading_config(
    page_bytes: int, extra: dict[str, Any], engine_id: str = "", pages_per_block: int = 1
) -> OffloadingConfig:
    """Return the configuration of an engine of one rank, for an offloading spec."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, ("layer.0",), 0),),
        worker_kv_bytes_per_block=page_bytes,
        enable_kv_cache_events=True,
        extra_config=extra,
        engine_id=engine_id or f"kvtier-test-{os.getpid()}-{next(NUMBERS)}",
        model=OffloadingModelConfig("nobody/model", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS, pages_per_block),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="LBHNC",
    )


class Replica:
    """The halves of a connector that share a configuration.

    Args:
        storage: URLs of stores.
        replicated: All ranks have the same KV.
        page_bytes: Bytes of a page on each rank, if ranks differ.
        num_cut: Shards of a block in stores, for any number of ranks; 0 for one per rank.
        settings: Further settings.
    """

    @staticmethod
    def make_tensor(page_bytes: int) -> torch.Tensor:
        """Return vLLM's tensor of one rank."""
        return torch.zeros((NUM_PAGES, page_bytes), dtype=torch.int8)

    @staticmethod
    def theirs(tensor: torch.Tensor) -> torch.Tensor:
        """Return the part that vLLM passes on."""
        return tensor

    def __init__(
        self,
        storage: str | list[str],
        num_ranks: int = 2,
        replicated: bool = False,
        page_bytes: Sequence[int] = (),
        num_cut: int = 0,
        **settings: object,
    ) -> None:
        self.num_ranks, self.replicated = num_ranks, replicated
        self.num_shards = 1 if replicated else num_ranks
        self.num_own = num_cut // num_ranks
        self.page_bytes = page_bytes or [PAGE_BYTES] * num_ranks
        extra: dict[str, object] = {
            "spec_name": "kvtier",
            "host_capacity": 32 * PAGE_BYTES * self.num_shards,
            "storage": storage,
            "storage_capacity": "64MiB",
            "load_policy": "always",
            "lookup_deadline_s": 0.5,
            "storage_shards": num_cut,
            **settings,
        }
        engine_id = f"kvtier-test-{os.getpid()}-{next(NUMBERS)}"
        specs = [KvtierSpec(self._config(rank, extra, engine_id)) for rank in range(num_ranks)]
        if num_cut:
            for rank, spec in enumerate(specs):
                spec.cut = partial(self._cut, rank)
        specs[0].sizes.names.settle([vllm_source(str(MODEL))])
        self.manager: Any = specs[0].get_manager()
        self.tensors = [self.make_tensor(each) for each in self.page_bytes]
        self.workers: list[Any] = [
            spec.get_worker(
                CanonicalKVCaches(
                    [CanonicalKVCacheTensor(self.theirs(tensor), num_bytes)],
                    [[CanonicalKVCacheRef(0, num_bytes)]],
                )
            )
            for spec, tensor, num_bytes in zip(specs, self.tensors, self.page_bytes, strict=True)
        ]
        self.num_steps = 0
        self.step()  # all have sent their hello

    def _config(self, rank: int, extra: dict[str, object], engine_id: str) -> OffloadingConfig:
        num = self.num_ranks
        return replace(
            offloading_config(self.page_bytes[rank], extra, engine_id),
            parallel=OffloadingParallelConfig(rank, num, num, 1, 1, 1, 0, 1, None, False),
            replicated_layout=self.replicated,
        )

    def _cut(self, rank: int, pages: EnginePages) -> Shards:
        """Return a rank's shards, each of them a run of bytes of a page."""
        num_bytes = self.page_bytes[rank] // self.num_own
        own = range(rank * self.num_own, (rank + 1) * self.num_own)
        return Shards(
            tuple(b"%d" % shard for shard in own),
            num_bytes * np.arange(self.num_own).reshape(-1, 1),
            np.array([num_bytes]),
            self.page_bytes[rank],
        )

    # -- steps -------------------------------------------------------------------------------------

    def step(self, without: Collection[int] = ()) -> None:
        """Run an engine step that computes nothing. without: ranks whose orders are lost."""
        self.num_steps += 1
        orders = self.manager.take_orders()
        for rank, worker in enumerate(self.workers):
            for order in orders if rank not in without else ():
                worker.carry_out(order)
        reports = [worker.take_report(frozenset()) for worker in self.workers]
        self.manager.hear(reduce(Report.and_also, reports))
        time.sleep(0.001)

    def settle(self, without: Collection[int] = ()) -> None:
        """Take steps until no transfer is pending."""
        end_s = time.monotonic() + PATIENCE_S
        while self.manager.has_pending_work():
            assert time.monotonic() < end_s, "it never ends"
            self.step(without)
            if without:  # the others have done it, and it is not done
                return

    # -- KV ----------------------------------------------------------------------------------------

    def _content(self, number: int, rank: int) -> torch.Tensor:
        num = self.num_own or 1
        first = 0 if self.replicated else rank * num
        made = b"".join(
            shake_128(b"%d of %d" % (number, shard)).digest(self.page_bytes[rank] // num)
            for shard in range(first, first + num)
        )
        return torch.frombuffer(bytearray(made), dtype=torch.int8)

    def _context(self, numbers: Sequence[int]) -> ReqContext:
        context = ReqContext(f"request {next(NUMBERS)}")
        for at, number in enumerate(numbers):
            context.set_offload_key_position(key_of(number), (at + 1) * TOKENS)
        self.manager.on_new_request(context)
        return context

    def _copy(self, number_of_pages: int, slots: Any, is_load: bool) -> None:
        pages = GPULoadStoreSpec(list(range(number_of_pages)), [number_of_pages], [0])
        job = next(NUMBERS)
        for worker in self.workers:
            if is_load:
                worker.submit_load(job, slots, pages)
            else:
                worker.submit_store(job, pages, slots)
            worker.wait({job})
            assert [each.success for each in worker.get_finished()] == [True]

    def compute(self, *numbers: int) -> None:
        """Let a request compute blocks, and store them."""
        context = self._context(numbers)
        output = self.manager.prepare_store([key_of(number) for number in numbers], context)
        assert output is not None, "no room in host memory"
        new = [number for number in numbers if key_of(number) in set(output.keys_to_store)]
        for rank, tensor in enumerate(self.tensors):
            for page, number in enumerate(new):
                tensor[page] = self._content(number, rank)
        self._copy(len(new), output.store_spec, is_load=False)
        self.manager.complete_store(set(output.keys_to_store), context)
        self.manager.on_request_finished(context)

    def load(self, *numbers: int) -> int:
        """Look blocks up, wait as the connector requires, and load the leading run of found blocks.

        Compare the loaded bytes on every rank; return the number of loaded blocks.
        """
        context = self._context(numbers)
        num = self._num_found(context, numbers)
        if num:
            keys = [key_of(number) for number in numbers[:num]]
            self.sources = [self.manager.get_load_source(key, context) for key in keys]
            slots = self.manager.prepare_load(keys, context)
            for tensor in self.tensors:
                tensor.zero_()
            self._copy(num, slots, is_load=True)
            self.manager.complete_load(set(keys), context)
            for rank, tensor in enumerate(self.tensors):
                for page, number in enumerate(numbers[:num]):
                    assert torch.equal(tensor[page], self._content(number, rank)), "wrong bytes"
        self.manager.on_request_finished(context)
        return num

    sources: Sequence[Any] = ()

    def _num_found(self, context: ReqContext, numbers: Sequence[int]) -> int:
        """Look blocks up as vLLM's scheduler does, step by step; return the number of hits."""
        state, end_s = self.manager.state_of(context.req_id), time.monotonic() + PATIENCE_S

        def look_up() -> int | None:
            found = []
            for number in numbers:
                found.append(self.manager.lookup(key_of(number), context))
                if found[-1] is LookupResult.MISS:
                    break
            waits = any(each in WAITS for each in found)
            return None if waits else TOKENS * found.count(LookupResult.HIT)

        while time.monotonic() < end_s:
            num = self.manager.num_to_load(state, 0, (len(numbers) + 1) * TOKENS, look_up)
            if num is not None:
                return int(num) // TOKENS
            self.step()
        raise AssertionError("it waits for ever")

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()


@contextmanager
def replica(storage: str | list[str], **changes: Any) -> Iterator[Replica]:
    made = Replica(storage, **changes)
    try:
        yield made
    finally:
        made.close()
