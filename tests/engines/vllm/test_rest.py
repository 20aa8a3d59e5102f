"""Steps of a rank that compute nothing, which vLLM takes while transfers are in flight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from kvtier.connectors.vllm.offloading.connector import KvtierOffloadingConnector, TierMetadata
from kvtier.connectors.vllm.offloading.translation import HostSlots
from kvtier.connectors.vllm.offloading.worker import OffloadedPages
from kvtier.connectors.vllm.shared import worker as worker_module
from kvtier.connectors.vllm.shared.copies import BlockSlots
from kvtier.connectors.vllm.shared.step import DueRequests, QueuedRequests
from kvtier.connectors.vllm.shared.worker import REST_S, RankLimits
from kvtier.core.types import Slot
from kvtier.devices import find_device

PAGE_BYTES = 4096


class Sleeps:
    """Stands in for ``time``, and counts the seconds slept."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Sleeps:
    made = Sleeps()
    monkeypatch.setattr(worker_module, "time", made)
    return made


@pytest.fixture
def worker() -> Any:
    tensor = torch.zeros((8, PAGE_BYTES), dtype=torch.int8)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, PAGE_BYTES)], [[CanonicalKVCacheRef(0, PAGE_BYTES)]]
    )
    made = OffloadedPages(caches, find_device("cpu"), RankLimits(PAGE_BYTES, 8), 1, rank=0)
    yield made
    made.shutdown()


def _rank(worker: OffloadedPages) -> KvtierOffloadingConnector:
    made: KvtierOffloadingConnector = object.__new__(KvtierOffloadingConnector)
    theirs = SimpleNamespace(worker=worker, start_kv_transfers=lambda metadata: None)
    made.connector_worker = theirs
    made._loading, made._steps = {}, []
    return made


@pytest.mark.parametrize("computes", [True, False])
def test_rank_sleeps_in_a_step_that_computes_nothing(
    computes: bool, worker: OffloadedPages, sleeps: Sleeps
) -> None:
    """Otherwise it would spin, and starve the threads whose results it waits for."""
    rank = _rank(worker)
    rank._connector_metadata = TierMetadata({}, {}, computes=computes)
    rank.start_load_kv(None)
    assert sleeps.seconds == pytest.approx(0 if computes else REST_S)


def test_rank_tells_of_a_copy_that_is_done_without_sleeping(
    worker: OffloadedPages, sleeps: Sleeps
) -> None:
    assert worker.submit_store(1, GPULoadStoreSpec([1], [1], [0]), HostSlots(BlockSlots([Slot(0)])))
    worker.wait({1})
    worker.rest()
    assert sleeps.seconds == 0
    assert [each.job_id for each in worker.get_finished()] == [1]
    worker.rest()
    assert sleeps.seconds == pytest.approx(REST_S)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_scheduler_says_whether_a_step_computes(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        OffloadingConnector,
        "build_connector_meta",
        lambda self, output: OffloadingConnectorMetadata({}, {}),
    )
    steps = SimpleNamespace(begin=lambda now, pieces: None)
    manager = SimpleNamespace(take_orders=list, steps=steps, num_new_weights=0)
    monkeypatch.setattr(KvtierOffloadingConnector, "_manager", manager)
    output = SchedulerOutput.make_empty()
    if num_tokens:
        output.num_scheduled_tokens = {"request": num_tokens}
        output.scheduled_new_reqs = [SimpleNamespace(req_id="request", num_computed_tokens=0)]
    connector = object.__new__(KvtierOffloadingConnector)
    connector._queued = QueuedRequests(1, 0, None)
    connector._due, connector._is_due = DueRequests(), True
    meta = connector.build_connector_meta(output)
    assert isinstance(meta, TierMetadata)
    assert meta.computes == (num_tokens > 0)
