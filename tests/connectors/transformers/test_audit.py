"""Audits of an attached model: restored KV is compared with what the model computes now."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtier
from kvtier.connectors.transformers.attached import Attached
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.types import LoadPolicy
from tests.connectors.transformers.models import (
    CHUNK,
    answer,
    are_equal,
    on_grid,
    prompt,
    small_model,
)

pytestmark = pytest.mark.engine


def attached(model: Any, **changes: Any) -> Attached:
    """Attach with room for 64 chunks, and audit every restored prompt."""
    settings: dict[str, Any] = {"host_capacity": "1MiB", "chunk_tokens": CHUNK, "audit": 1.0}
    return kvtier.attach(model, **settings | changes)


def always(cache: Attached, piece: int) -> None:
    """Audit this chunk of each restored prompt."""
    auditor: Any = cache._auditor
    auditor.piece = lambda num_pieces: piece


def spoil(cache: Attached) -> None:
    """Change the last byte but a few of every block: a value of the last layer."""
    blocks = cache._grid._memory.blocks
    used = blocks.bool().any(dim=1)
    piece = cache._layers.pieces[-1]
    blocks[used, piece.offset + piece.num_bytes - 1] ^= 0x40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_prompts_are_equal_from_memory_and_from_disk(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = small_model().to(dtype)
    ids = [prompt(seed, 90 + seed, shared=50) for seed in range(5)]
    expected = [on_grid(model, each) for each in ids]
    for source in ("host", "disk"):
        with attached(model, disk_path=str(tmp_path), disk_capacity="16MiB") as cache:
            found = [answer(model, each) for each in ids * 2]
            assert cache.flush()
            stats = cache.stats()
        assert all(map(are_equal, found, expected * 2))
        assert stats.audits == {"equal": 9 if source == "host" else 10}
        assert source in stats.reused_tokens


def test_after_a_difference_the_prompt_is_computed_and_kept_anew() -> None:
    model, ids = small_model(), prompt(0, 90)
    expected = on_grid(model, ids)
    with attached(model) as cache:
        answer(model, ids)
        spoil(cache)
        always(cache, 0)
        assert are_equal(answer(model, ids), expected), "no wrong answer"
        assert (cache.stats().audits, cache.stats().reused_tokens) == ({"different": 1}, {})
        for num in range(2):
            assert are_equal(answer(model, ids), expected)
            equal = {"equal": num} if num else {}
            assert cache.stats().audits == {"different": 1} | equal
        spoil(cache)
        assert are_equal(answer(model, ids), expected)
        reused = cache.stats().num_reused_tokens
        for _ in range(2):
            assert are_equal(answer(model, ids), expected)
        assert cache.stats().num_reused_tokens == reused, "nothing is used any more"


def test_without_audits_wrong_kv_is_used() -> None:
    """Negative control of the test above."""
    model, ids = small_model(), prompt(0, 90)
    expected = on_grid(model, ids)
    with attached(model, audit=0.0) as cache:
        answer(model, ids)
        spoil(cache)
        assert not are_equal(answer(model, ids), expected)
        assert cache.stats().audits == {}


def test_no_way_to_generate_gives_a_difference() -> None:
    """Assisted ones cut candidates off the cache; beams and batches reorder it."""
    model, helper = small_model(), small_model(3)
    ways: list[dict[str, Any]] = [
        {"assistant_model": helper},
        {"prompt_lookup_num_tokens": 3},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.5},
    ]
    with attached(model) as cache, attached(helper) as other:
        text = prompt(0, 60)
        for number, way in enumerate(ways * 2):
            text = answer(model, text, max_new_tokens=20, **way)[0][:1]  # the next turn
            answer(model, prompt(number % 2, 90, shared=40), **way)
        for stats in (cache.stats(), other.stats()):
            assert stats.audits.keys() == {"equal"}
            assert stats.num_kept_tokens
        assert cache.stats().audits["equal"] >= 15


def test_kv_of_a_stale_adapter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that change are noticed; this is as if they were not."""
    model, ids = small_model(), prompt(0, 90)
    weight = model.model.layers[1].self_attn.v_proj.weight
    with attached(model) as cache:
        answer(model, ids)
        identity: Any = cache._weights.current()
        monkeypatch.setattr(cache._weights, "current", lambda: identity)
        up, down = torch.ones(len(weight), 1), torch.ones(1, weight.shape[1])
        with torch.no_grad():
            weight += 0.01 * up @ down
        right = on_grid(copy.deepcopy(model), ids)
        assert are_equal(answer(model, ids), right)
        assert cache.stats().audits == {"different": 1}


def test_only_kv_of_this_process_must_have_equal_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process may have rounded otherwise what is on disk."""
    model, ids = small_model(), prompt(0, 90)
    loads = CacheConfig(load_policy=LoadPolicy.ALWAYS)  # so small a model is computed sooner
    slab = {"disk_path": str(tmp_path), "disk_capacity": "16MiB", "settings": loads}

    def outcome(cache: Attached) -> Any:
        always(cache, 0)
        blocks = cache._grid._memory.blocks.view(torch.float32)
        blocks.mul_(1 + 1e-6)
        answer(model, ids)
        return cache.stats().audits

    for text in (ids, prompt(1, 60)):
        with attached(model, **slab) as cache:
            answer(model, text)
            answer(model, ids)
            assert cache.flush()
            if text is ids:
                assert outcome(cache) == {"equal": 1, "different": 1}
                assert "writer='this process'" in caplog.text
            else:
                assert outcome(cache) == {"equal": 1, "within_tolerance": 1}


def test_a_failed_audit_fails_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_model(), prompt(0, 90)
    expected = on_grid(model, ids)

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    with attached(model) as cache:
        answer(model, ids)
        monkeypatch.setattr(cache._grid, "_audit", fail)
        assert are_equal(answer(model, ids), expected)
        assert cache.stats().num_reused_tokens > 0


def test_no_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="audit: 2 is no share of hits"):
        attached(small_model(), audit=2)
