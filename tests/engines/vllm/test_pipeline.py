"""A real vLLM of two pipeline ranks with unequal layers: a block has another size on each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engines import (
    BLOCK,
    ENVIRONMENT,
    Answer,
    Connects,
    count,
    engine,
    one_by_one,
    prompt,
)

LAYERS = (1, 4)
"""Layers of the built-in model on each rank."""
LAYER_BYTES = BLOCK * 2 * 2 * 64 * 4
"""Bytes of one block in a layer: keys and values, KV heads, head size, float32."""
NUM_FIT = 12
"""Blocks that the larger rank's half of the disk has room for. The other's would have four times as
many."""
CAPACITY = len(LAYERS) * NUM_FIT * LAYERS[1] * LAYER_BYTES
NUM_BLOCKS = 3
"""Blocks of a prompt. A few more tokens follow the last one; from them the rest is computed."""
PROMPTS = [prompt(9000 + number, NUM_BLOCKS * BLOCK + 30) for number in range(8)]
"""Twice as many blocks as fit."""


@contextmanager
def stages(
    config: dict[str, Any], layers: tuple[int, ...] = LAYERS, **changes: Any
) -> Iterator[Any]:
    """Run a vLLM of two stages on the CPU.

    When vLLM warms up, the second stage allocates a buffer for the first one's output. On a CPU it
    does so only if it compiles and if the memory for KV is not set.

    Args:
        config: Config of its connector.
        layers: Number of layers of each stage.
    """
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE")
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        patch.setenv("VLLM_PP_LAYER_PARTITION", ",".join(map(str, layers)))
        options: Any = {
            "pipeline_parallel_size": len(layers),
            "gpu_memory_utilization": 0.2,
            "enforce_eager": False,
            "compilation_config": {"mode": 2, "backend": "eager"},
        }
        with engine(config, **options, **changes) as llm:
            yield llm


def pipeline(slab: Path, connects: Connects) -> AbstractContextManager[Any]:
    """Run the two stages with a disk."""
    return stages(
        connects(
            host_capacity=CAPACITY,
            disk_path=str(slab),
            disk_capacity=CAPACITY,
            eviction_policy="lru",
        )
    )


def _on_disk(what: str) -> float:
    """Return a count or a gauge of the disk tier."""
    return count(f"vllm:kvtier_{what}", tier="disk")


@pytest.mark.timeout(880)
def test_disk_of_unequal_ranks_keeps_the_newest_prompts_over_a_restart(
    tmp_path: Path, connects: Connects
) -> None:
    answers: list[Answer] = []
    with pipeline(tmp_path, connects) as llm:
        for asked in PROMPTS:
            ((cached, answer),) = one_by_one(llm, [asked])
            assert cached == 0
            answers.append(answer)
        one_by_one(llm, [prompt(9100, 40)])  # a few more steps: what was evicted is on disk
        assert _on_disk("chunks") == NUM_FIT, "the rank with the larger blocks counts"
        assert 0 < _on_disk("used_chunks") <= NUM_FIT
        assert _on_disk("evicted_chunks_total") > 0
        assert _on_disk("breaker_state") == 0
        assert count("vllm:kvtier_failed_chunks_total") == 0
    with pipeline(tmp_path, connects) as llm:
        found = one_by_one(llm, [PROMPTS[-1], PROMPTS[-2], PROMPTS[0]])
    assert [cached for cached, _ in found] == [NUM_BLOCKS * BLOCK, NUM_BLOCKS * BLOCK, 0]
    for (_, (tokens, steps)), cold in zip(
        found, (answers[-1], answers[-2], answers[0]), strict=True
    ):
        assert tokens == cold[0]
        assert steps == [pytest.approx(step, abs=1e-3) for step in cold[1]], "but for rounding"
