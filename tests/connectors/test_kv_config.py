"""Sizes and replication that kvtier's own connector derives from vLLM's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.vllm.kv_connector.config import _bytes_per_page, _is_replicated

PAGE_BYTES, NUM_PAGES, LAYERS = 512, 10, ("a", "b", "c")


class MLAAttentionSpec:
    page_size_bytes = PAGE_BYTES


class FullAttentionSpec:
    page_size_bytes = PAGE_BYTES


def _cache(spec: object, *sizes: int, block_stride: int = 0, **more: Any) -> Any:
    tensors = [SimpleNamespace(size=size, block_stride=block_stride) for size in sizes]
    group = SimpleNamespace(layer_names=LAYERS, kv_cache_spec=spec)
    return SimpleNamespace(
        num_blocks=NUM_PAGES, kv_cache_tensors=tensors, kv_cache_groups=[group], **more
    )


def _config(**parallel: Any) -> Any:
    given: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "world_size": 2,
        "decode_context_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "nnodes_within_dp": 1,
        **parallel,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=True), parallel_config=SimpleNamespace(**given)
    )


ONE, ALL = PAGE_BYTES * NUM_PAGES, PAGE_BYTES * NUM_PAGES * len(LAYERS)


def test_page_has_the_bytes_of_all_layers_whether_or_not_they_share_an_allocation() -> None:
    assert _bytes_per_page(_cache(None, ONE, ONE, ONE)) == PAGE_BYTES * len(LAYERS)
    shared = _cache(None, ALL, ALL, ALL, block_stride=PAGE_BYTES)
    assert _bytes_per_page(shared) == PAGE_BYTES * len(LAYERS)


@pytest.mark.parametrize(
    ("parallel", "cache", "expected"),
    [
        ({}, _cache(MLAAttentionSpec(), ONE, ONE, ONE), True),
        ({}, _cache(MLAAttentionSpec(), ONE, ONE, 2 * ONE), False),
        ({}, _cache(FullAttentionSpec(), ONE, ONE, ONE), False),
        ({}, _cache(FullAttentionSpec(), ONE, kv_tp_replicas=2), True),
        ({}, _cache(MLAAttentionSpec(), ONE, kv_tp_replicas=1), False),
        ({"world_size": 4}, _cache(MLAAttentionSpec(), ONE, ONE, ONE), False),
        ({"nnodes_within_dp": 2}, _cache(MLAAttentionSpec(), ONE, ONE, ONE), False),
        ({"decode_context_parallel_size": 2}, _cache(MLAAttentionSpec(), ONE, ONE, ONE), False),
    ],
    ids=[
        "latents", "a layer of another size", "heads", "as vLLM says", "as vLLM denies",
        "a pipeline", "two machines", "context parallel",
    ],
)  # fmt: skip
def test_ranks_are_replicas_only_where_all_of_their_kv_is_the_same(
    parallel: dict[str, Any], cache: Any, expected: bool
) -> None:
    assert _is_replicated(_config(**parallel), cache) is expected
