"""A real vLLM with kvtier under it, and other kinds of attention than the built-in model has."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import DeepseekV3Config, PreTrainedConfig

from tests.engines.vllm.engines import (
    BLOCK,
    Connects,
    connector,
    count,
    engine,
    moved_from_disk,
    one_by_one,
    prompt,
    with_disk,
)
from tests.engines.vllm.shapes import OPTIONS, SHAPES, SIZES, options_of, save_random

KINDS: dict[str, PreTrainedConfig] = {
    "latent": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        num_hidden_layers=2,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=2,
    ),
    "sliding window": SHAPES["gemma3"],
    "convolution": SHAPES["lfm2"],
    "state space": SHAPES["falcon-h1"],
}


LATENT_BYTES = 2 * (512 + 64) * 4
"""Bytes of a token in two layers."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_kv_comes_from_host_and_after_a_restart_from_disk(kind: str, tmp_path: Path) -> None:
    save_random(KINDS[kind], tmp_path / "model")
    prompts = [prompt(seed, 7 * BLOCK + 50) for seed in range(3)]
    config = with_disk(tmp_path / "slab", host_capacity="64MiB", disk_capacity="64MiB")
    options = options_of("falcon-h1") if kind == "state space" else OPTIONS
    with engine(config, tmp_path / "model", **options) as llm:
        cold = one_by_one(llm, prompts)
        on_device = one_by_one(llm, prompts)
        assert all(cached >= 7 * BLOCK for cached, _ in on_device)
        assert llm.reset_prefix_cache()
        assert one_by_one(llm, prompts) == on_device
    assert len({tuple(answer[0]) for _, answer in cold}) == 3, "every prompt is answered alike"
    with engine(config, tmp_path / "model", **options) as llm:
        assert one_by_one(llm, prompts) == on_device


@pytest.mark.timeout(900)
def test_kv_of_several_groups_comes_directly_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full attention and windows: what each has of a block is in pieces of the same sizes."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # vLLM's memory begins at a page
    save_random(KINDS["sliding window"], tmp_path / "model")
    prompts = [prompt(seed, 7 * BLOCK + 50) for seed in range(3)]
    sizes = {"host_capacity": "64MiB", "disk_capacity": "64MiB", "disk_direct": "on"}
    config = with_disk(tmp_path / "slab", **sizes)
    with engine(config, tmp_path / "model", **OPTIONS) as llm:
        one_by_one(llm, prompts)
        on_device = one_by_one(llm, prompts)
    with engine(config, tmp_path / "model", **OPTIONS) as llm:
        before = moved_from_disk()
        assert one_by_one(llm, prompts) == on_device
        past_host, through = moved_from_disk(before)
        assert past_host > 0
        assert through == 0


def _shared_memory() -> set[Path]:
    """Return the files in shared memory; those that nodes keep for their successors end .sock."""
    found = Path("/dev/shm").glob("kvtier-*")
    return {path for path in found if path.suffix != ".sock"}


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("two_cores")
def test_latents_of_two_ranks_are_stored_once(tmp_path: Path, connects: Connects) -> None:
    """Both ranks have the same: the first one stores it, in memory that the other one maps."""
    save_random(KINDS["latent"], tmp_path / "model")
    prompts = [prompt(seed, 7 * BLOCK + 50) for seed in range(3)]
    slab = str(tmp_path / "slab")
    config = connects(host_capacity="64MiB", disk_path=slab, disk_capacity="64MiB")
    options = {**OPTIONS, "tensor_parallel_size": 2}
    before, names = count("vllm:kv_offload_store_bytes_total"), _shared_memory()
    with engine(config, tmp_path / "model", **options) as llm:
        one_by_one(llm, prompts)
        on_device = one_by_one(llm, prompts)
        assert llm.reset_prefix_cache()
        assert one_by_one(llm, prompts) == on_device
        (one_rank,) = (tmp_path / "slab").iterdir()
        assert one_rank.name == "rank0"
        if connects is connector:
            stored = count("vllm:kv_offload_store_bytes_total") - before
            assert stored == sum(cached for cached, _ in on_device) * LATENT_BYTES
        assert _shared_memory() <= names, "a name is left"
    with engine(config, tmp_path / "model", **options) as llm:
        assert one_by_one(llm, prompts) == on_device
