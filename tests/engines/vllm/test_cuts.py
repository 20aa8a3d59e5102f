"""The blocks that a cut needs, as kvtier and as vLLM's own managers of KV groups find them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvtier.connectors.vllm.shared.names import EngineFacts, GroupFacts
from kvtier.connectors.vllm.shared.prompt import group_key
from kvtier.connectors.vllm.shared.reach import Cuts

interface = pytest.importorskip("vllm.v1.kv_cache_interface")
SlidingWindowMLASpec = getattr(interface, "SlidingWindowMLASpec", SlidingWindowSpec)
pytestmark = pytest.mark.skipif(
    not hasattr(SlidingWindowManager, "reachable_block_mask"), reason="an older vLLM"
)

SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
NUM_TOKENS = 4096

# Latents and an indexer's keys of DeepSeek V4, its window, and the states of its compressors.
DEEPSEEK = [
    MLAAttentionSpec(block_size=256, **SHAPE),
    MLAAttentionSpec(block_size=256, **{**SHAPE, "head_size": 32, "dtype": torch.uint8}),
    SlidingWindowMLASpec(block_size=64, sliding_window=128, **SHAPE),
    SlidingWindowMLASpec(block_size=4, sliding_window=8, **SHAPE),
    SlidingWindowMLASpec(block_size=8, sliding_window=128, **SHAPE),
]
GEMMA = [
    FullAttentionSpec(block_size=16, **SHAPE),
    SlidingWindowSpec(block_size=32, sliding_window=512, **SHAPE),
]
WIDE = [
    FullAttentionSpec(block_size=128, **SHAPE),
    SlidingWindowSpec(block_size=16, sliding_window=81, **SHAPE),
    SlidingWindowSpec(block_size=16, sliding_window=4096, **SHAPE),
]
STATES = [
    FullAttentionSpec(block_size=16, **SHAPE),
    MambaSpec(block_size=512, shapes=((2, 4),), dtypes=(torch.float32,)),
]


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize(
    "specs", [DEEPSEEK, GEMMA, WIDE, STATES], ids=["v4", "dense", "wide", "states"]
)
def test_a_cut_needs_the_blocks_that_vllm_stores(
    specs: list[Any], extra: int, is_draft: bool
) -> None:
    if extra and not hasattr(specs[-1], "extra_retained_tokens"):
        pytest.skip("no window, or an older vLLM")
    if extra:
        specs = [
            replace(spec, extra_retained_tokens=extra)
            if hasattr(spec, "sliding_window") and isinstance(spec, SlidingWindowSpec)
            else spec
            for spec in specs
        ]
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
    for group in groups:
        group.is_eagle_group = is_draft
    facts = EngineFacts(
        tuple(GroupFacts(at, spec.block_size, ()) for at, spec in enumerate(specs)), 0, 1, 4, ""
    )
    cuts = Cuts.of(facts, groups)
    (alignment,) = {spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec)}
    for number, spec in enumerate(specs):
        size = spec.block_size
        ends = range(size, NUM_TOKENS + 1, size)
        found = [cuts.need(group_key(b"prefix", number), end) for end in ends]
        assert found == _stored(spec, alignment, len(ends), is_draft)


def _stored(spec: Any, alignment: int, num_blocks: int, is_draft: bool) -> list[bool]:
    """Return which of a prompt's first blocks vLLM's connector stores."""
    if not isinstance(spec, SlidingWindowSpec):
        return [True] * num_blocks
    if extra := getattr(spec, "extra_retained_tokens", 0):
        # As vLLM's connector does before it asks.
        window = spec.sliding_window + extra
        spec = replace(spec, sliding_window=window, extra_retained_tokens=0)
    mask = SlidingWindowManager.reachable_block_mask(
        start_block=0,
        end_block=num_blocks,
        alignment_tokens=alignment,
        kv_cache_spec=spec,
        use_eagle=is_draft,
    )
    return [True] * num_blocks if mask is None else mask
