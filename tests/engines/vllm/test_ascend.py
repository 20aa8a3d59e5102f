"""K and V in separate tensors, as in vllm-ascend, through kvtier's worker and a fake CANN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

from kvtier.connectors.vllm.offloading.ascend import split_caches
from kvtier.connectors.vllm.offloading.translation import HostSlots
from kvtier.connectors.vllm.offloading.worker import OffloadedPages
from kvtier.connectors.vllm.shared.copies import BlockSlots
from kvtier.connectors.vllm.shared.worker import RankLimits
from kvtier.core.errors import LayoutError
from kvtier.core.types import Slot
from tests.devices.drivers import make_device
from tests.engines.vllm.engines import connector
from tests.kit.fakes.fake import Fake

NUM_PAGES, PAGE, HEADS, DIM = 6, 4, 2, 8
PART_BYTES = PAGE * HEADS * DIM * 2


class PlatformsConnector(OffloadingConnector):
    """Stands where vllm-ascend has its own connector."""


def _spec() -> Any:
    return FullAttentionSpec(
        block_size=PAGE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16
    )


def _config(*groups: tuple[list[str], Any], num_blocks: int = NUM_PAGES) -> Any:
    """Return the parts of vLLM's KVCacheConfig that are read."""
    return SimpleNamespace(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names, spec in groups
        ],
    )


def _random(*shape: int) -> torch.Tensor:
    content = torch.randint(0, 256, shape, dtype=torch.uint8)
    return content.view(torch.bfloat16)


def _pair(num_rows: int = NUM_PAGES) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a layer, each in memory of its own."""
    return _random(num_rows, PAGE, HEADS, DIM * 2), _random(num_rows, PAGE, HEADS, DIM * 2)


def _shares(caches: CanonicalKVCaches) -> list[list[tuple[int, int, int]]]:
    """Return, by group: address of page 0, bytes to the next page, and bytes of a share."""
    return [
        [
            (
                caches.tensors[ref.tensor_idx].tensor.data_ptr(),
                caches.tensors[ref.tensor_idx].tensor.stride(0),
                ref.page_size_bytes,
            )
            for ref in refs
        ]
        for refs in caches.group_data_refs
    ]


def test_keys_and_values_are_shares_of_their_own() -> None:
    caches = {"a": _pair(), "b": list(_pair())}
    found = split_caches(caches, _config((["a", "b"], _spec())), [0])
    assert found is not None
    assert [tuple(tensor.tensor.shape) for tensor in found.tensors] == [(NUM_PAGES, PART_BYTES)] * 4
    assert _shares(found) == [
        [(each.data_ptr(), PART_BYTES, PART_BYTES) for name in "ab" for each in caches[name]]
    ]


def test_one_tensor_per_layer_is_left_to_vllm() -> None:
    whole = _random(NUM_PAGES, 2, PAGE, HEADS, DIM * 2)
    assert split_caches({"a": whole}, _config((["a"], _spec())), [0]) is None


def test_only_offloaded_groups_count_and_shared_memory_counts_once() -> None:
    pair = _pair()
    config = _config((["scratch"], _spec()), (["a"], _spec()), (["b"], _spec()))
    found = split_caches({"a": pair, "b": pair}, config, [1, 2])
    assert found is not None
    assert len(found.tensors) == 2
    assert _shares(found)[0] == _shares(found)[1]


def test_states_of_recurrent_layers_are_shares() -> None:
    memory = torch.zeros(1 + NUM_PAGES * 5, dtype=torch.int8)
    states = [
        memory[1 : 1 + NUM_PAGES * 2].view(NUM_PAGES, 2),
        memory[1 + NUM_PAGES * 2 :].view(NUM_PAGES, 3),
    ]
    spec = MambaSpec(
        block_size=1, shapes=((2,), (3,)), dtypes=(torch.int8, torch.int8), page_size_padded=8
    )
    found = split_caches({"a": states}, _config((["a"], spec)), [0])
    assert found is not None
    first, second = (state.data_ptr() for state in states)
    assert _shares(found) == [[(first, 2, 2), (second, 3, 3)]]


def test_scattered_bytes_of_a_page_are_refused() -> None:
    keys, values = _pair()
    with pytest.raises(LayoutError, match="a: a page is not one run of bytes"):
        split_caches({"a": (keys.transpose(1, 2), values)}, _config((["a"], _spec())), [0])


@pytest.mark.parametrize("variant", ["cann83", "cann85", "cann91"])
@pytest.mark.parametrize("pages_per_block", [1, 2])
def test_keys_and_values_come_back_through_cann(
    variant: str, pages_per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages 1, 2, 3 go to host memory, and come back into 4, 5, 0; nothing else changes."""
    fake = Fake(variant)
    layers = {name: _pair() for name in "abc"}
    tensors = [part for pair in layers.values() for part in pair]
    for part in tensors:
        fake.adopt(part.data_ptr(), part.nbytes)
    caches = split_caches(layers, _config((list(layers), _spec())), [0])
    assert caches is not None
    slot_bytes = 4096
    device = make_device(fake)
    monkeypatch.setattr(device, "prepare", lambda: None)  # what is measured here may rank any first
    worker = OffloadedPages(caches, device, RankLimits(slot_bytes, 8), pages_per_block, rank=0)
    before = [part.view(torch.uint8).clone() for part in tensors]
    slots = HostSlots(BlockSlots([*map(Slot, [5, 2] if pages_per_block == 2 else [5, 2, 7])]))
    try:
        _run(worker, 1, worker.submit_store(1, GPULoadStoreSpec([1, 2, 3], [3], [0]), slots))
        if fake.version >= 805:
            assert fake.count("aclrtMemcpyBatchAsync") >= 1
        _run(worker, 2, worker.submit_load(2, slots, GPULoadStoreSpec([4, 5, 0], [3], [0])))
    finally:
        worker.shutdown()
    for part, old in zip(tensors, before, strict=True):
        now = part.view(torch.uint8)
        assert torch.equal(now[[4, 5, 0]], old[[1, 2, 3]])
        assert torch.equal(now[[1, 2, 3]], old[[1, 2, 3]]), "a store changes nothing"
        fake.disown(part.data_ptr())
    assert fake.violations == []
    different = [part.view(torch.uint8)[4].numpy().tobytes() for part in tensors]
    assert len(set(different)) == len(tensors), "no share is another's"


def _run(worker: OffloadedPages, job_id: int, is_accepted: bool) -> None:
    assert is_accepted
    worker.wait({job_id})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, worker.take_failed_loads()) == (job_id, True, [])
    assert result.transfer_size == 3 * 6 * PART_BYTES


def _register_theirs() -> None:
    """Register the platform's connector, as vllm-ascend's plug-in does."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry.pop("OffloadingConnector", None)
    KVConnectorFactory.register_connector(
        "OffloadingConnector", "tests.engines.vllm.test_ascend", "PlatformsConnector"
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_platforms_connector_is_under_ours_whoever_registers_first(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvtier.connectors.vllm.offloading.connector import KvtierOffloadingConnector

    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    find = KVConnectorFactory.__dict__["get_connector_class"]
    find = classmethod(getattr(find.__func__, "__wrapped__", find.__func__))
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", find)
    steps = [_register_theirs, _register_ours]
    for step in steps if is_first else reversed(steps):
        step()
    found = KVConnectorFactory.get_connector_class(KVTransferConfig(**connector()))
    assert issubclass(found, KvtierOffloadingConnector)
    assert issubclass(found, PlatformsConnector)
    before = found.__mro__.index(PlatformsConnector)
    assert found.__mro__.index(KvtierOffloadingConnector) < before
    assert found.theirs is PlatformsConnector


def _register_ours() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvtier.connectors.vllm.shared.registry import wrap_factory

    wrap_factory(KVConnectorFactory)
