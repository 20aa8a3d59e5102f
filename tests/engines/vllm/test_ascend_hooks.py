"""A rank of ``KvtierConnector`` under the hooks that vllm-ascend's model runner and attention call.

`make peers-ascend` fetches the Python sources of three releases; see ``ascend/sources.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvtier.connectors.vllm.kv_connector.connector import StepMetadata
from kvtier.connectors.vllm.kv_connector.messages import PageJob, StepMessage
from kvtier.connectors.vllm.shared.copies import BlockSlots, PageRange
from kvtier.connectors.vllm.shared.fronts import OWN
from kvtier.core.types import Slot
from tests.engines.vllm.ascend.runner import RUNNER
from tests.engines.vllm.ascend.sources import FOLDER, VERSIONS, Sources
from tests.engines.vllm.scheduler_half import ATTENTION, PAGE, make_config

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="make peers-ascend fetches the sources")

NUM_PAGES, LAYER = 8, "layer.0"
SHAPE = (NUM_PAGES, PAGE, 1, 32)
END_S = 30.0


@pytest.fixture(scope="module")
def config() -> Any:
    found = make_config()
    found.scheduler_config.disable_hybrid_kv_cache_manager = True
    found.kv_transfer_config = KVTransferConfig(
        kv_connector=OWN.connector,
        **OWN.config,
        kv_role="kv_both",
        kv_connector_extra_config={"host_capacity": "1MiB"},
    )
    return found


@pytest.fixture
def caches(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[torch.Tensor, ...]]:
    """Register keys and values apart, and make the connector vLLM's."""
    size = NUM_PAGES * ATTENTION.page_size_bytes
    tensors = [KVCacheTensor(size=size, layers=[LAYER], layer_stride=0, block_stride=0)]
    sizes = KVCacheConfig(NUM_PAGES, tensors, [KVCacheGroupSpec([LAYER], ATTENTION)])
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, sizes)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    parts = torch.zeros(SHAPE), torch.zeros(SHAPE)
    connector.register_kv_caches({LAYER: parts})
    yield parts
    connector.shutdown()


def _scheduled(**message: Any) -> Any:
    """Return the parts of vLLM's SchedulerOutput that the hooks read."""
    return SimpleNamespace(
        kv_connector_metadata=StepMetadata(StepMessage(**message)),
        has_sync_kv_loads=False,
        finished_req_ids=set(),
    )


def _job(job_id: int, pages: list[int]) -> PageJob:
    return PageJob(job_id, "request", [PageRange(pages)], BlockSlots([Slot(0), Slot(1)]))


@pytest.mark.parametrize("is_deferred", [False, True], ids=["at once", "after a draft model"])
@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_step_computes_is_stored_and_comes_back(
    version: str, is_deferred: bool, config: Any, caches: tuple[torch.Tensor, ...]
) -> None:
    hooks = Sources(version, {}).module("vllm_ascend.attention.utils")
    mixin = KVConnectorModelRunnerMixin
    with (
        set_forward_context({}, config),
        mixin.maybe_get_kv_connector_output(
            _scheduled(stores=[_job(1, [1, 2])]), defer_finalize=is_deferred
        ) as output,
    ):
        assert output is not None
        hooks["wait_for_kv_layer_from_connector"](LAYER)
        for seed, part in enumerate(caches):
            part[1:3] = torch.rand(2, *SHAPE[1:], generator=torch.Generator().manual_seed(seed))
        hooks["maybe_save_kv_layer_to_connector"](LAYER, list(caches))
    if is_deferred:
        mixin.finalize_kv_connector()
    _until(config, 1, output)
    before = [part.clone() for part in caches]
    for part in caches:
        part.zero_()
    loaded = _until(config, 2, None, loads=[_job(2, [5, 6])])
    assert loaded.finished_recving == {"request"}
    for part, old in zip(caches, before, strict=True):
        assert torch.equal(part[5:7], old[1:3])
        assert old[1:3].abs().min() > 0


def _until(
    config: Any, job_id: int, output: KVConnectorOutput | None, **message: Any
) -> KVConnectorOutput:
    """Take steps that compute nothing until the rank reports a copy. Return that report."""
    end_s = time.monotonic() + END_S
    while output is None or job_id not in _ended(output):
        assert time.monotonic() < end_s
        step = _scheduled(computes=False, **message)
        found = KVConnectorModelRunnerMixin.kv_connector_no_forward(step, config)
        output, message = found.kv_connector_output, {}
    return output


def _ended(output: KVConnectorOutput) -> dict[int, int]:
    meta = output.kv_connector_worker_meta
    return {} if meta is None else meta.message.ended


@pytest.mark.parametrize("version", VERSIONS)
def test_report_of_a_rank_that_samples_nothing_is_passed_on(version: str) -> None:
    """vllm-ascend's worker drops it in ``execute_model``; its runner gives it afterwards."""
    parallel = SimpleNamespace(world_size=2, is_last_rank=False)
    sources = Sources(version, {"get_pp_group": lambda: parallel})
    runner = sources.part(RUNNER, "NPUModelRunner")()
    report = KVConnectorOutput(kv_connector_worker_meta=object())
    runner.__dict__.update(
        kv_connector_output=report,
        execute_model_state=None,
        use_async_scheduling=False,
        is_kv_producer=False,
        speculative_config=None,
    )
    assert runner.sample_tokens(None).kv_connector_output is report
