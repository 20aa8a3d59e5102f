"""A real vLLM: KV whose keys hold a name instead of content is not taken for other content's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.vllm.blip import make_blip, picture
from tests.vllm.engines import (
    BLOCK,
    MODEL,
    Answer,
    Prompt,
    connector,
    engine,
    prompt,
    run,
    with_disk,
)

TEXT = prompt(4100, 3 * BLOCK + 50)
DIFFERENT = 1e-3
"""Log-probabilities that are further apart are those of another input."""


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_blip(tmp_path_factory.mktemp("blip"))


@pytest.fixture(scope="module")
def right(vision_model: Path) -> list[Answer]:
    """Return vLLM's own answers to the first image, and to the second one."""
    with engine(None, vision_model) as llm:
        first, other = (run(llm, _seen(seed))[0][1] for seed in (1, 2))
    assert not _are_same(first, other), "or the test would not notice"
    return [first, other]


def _seen(seed: int, name: str | None = None) -> dict[str, Any]:
    """A prompt with an image, which the client gives a name or not."""
    asked: dict[str, Any] = {**TEXT, "multi_modal_data": {"image": picture(seed)}}
    if name is not None:
        asked["multi_modal_uuids"] = {"image": [name]}
    return asked


def _are_same(one: Answer, other: Answer) -> bool:
    """Whether two answers are the same up to rounding."""
    (tokens, steps), (other_tokens, other_steps) = one, other
    if list(tokens) != list(other_tokens):
        return False
    return all(
        abs(step[token] - other_step.get(token, step[token])) < DIFFERENT
        for step, other_step in zip(steps, other_steps, strict=True)
        for token in step
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["cat", None], ids=["named by the client", "counted"])
def test_image_does_not_get_the_kv_of_another_of_its_name(
    vision_model: Path, right: list[Answer], tmp_path: Path, name: str | None
) -> None:
    """vLLM counts images, and starts again in each process, where all its caches are off."""
    options = {} if name else {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    first, other = right
    with engine(with_disk(tmp_path), vision_model, **options) as llm:
        cached, answer = run(llm, _seen(1, name))[0]
        assert cached == 0
        assert _are_same(answer, first)
        assert run(llm, TEXT)[0][0] == 0
        assert run(llm, prompt(4101, 2 * BLOCK))[0][0] == 0  # what was stored before is on disk
    with engine(with_disk(tmp_path), vision_model, **options) as llm:
        cached, answer = run(llm, _seen(2, name))[0]
        assert cached == 0
        assert _are_same(answer, other)
        assert run(llm, TEXT)[0][0] == 3 * BLOCK, "text is found on disk"


@pytest.mark.timeout(900)
def test_embeddings_are_found_in_their_process_alone(tmp_path: Path) -> None:
    """vLLM hashes their bytes, without their type and shape."""
    hidden = json.loads((MODEL / "config.json").read_text())["hidden_size"]
    made = torch.Generator().manual_seed(1)
    embedded: dict[str, Any] = {
        "prompt_embeds": torch.randn(3 * BLOCK + 50, hidden, generator=made)
    }
    with engine(with_disk(tmp_path), enable_prompt_embeds=True) as llm:
        assert run(llm, TEXT)[0][0] == 0
        assert run(llm, embedded)[0][0] == 0
        assert llm.reset_prefix_cache()
        assert run(llm, embedded)[0][0] == 3 * BLOCK, "from host memory"
        assert run(llm, prompt(4101, 2 * BLOCK))[0][0] == 0  # what was stored before is on disk
    with engine(with_disk(tmp_path), enable_prompt_embeds=True) as llm:
        assert run(llm, embedded)[0][0] == 0
        assert run(llm, TEXT)[0][0] == 3 * BLOCK, "text is found on disk"


def _make_adapter(folder: Path, seed: int) -> str:
    """A LoRA adapter of random weights for the built-in model, at the same path each time."""
    folder.mkdir(exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text())
    hidden, num_layers, rank = config["hidden_size"], config["num_hidden_layers"], 8
    made = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(num_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=made)
        weights[f"{name}.lora_B.weight"] = torch.randn(
            config["num_attention_heads"] * _head_dim(config), rank, generator=made
        )
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _adapted(llm: Any, asked: Prompt, adapter: LoRARequest) -> tuple[int, Answer]:
    """As ``run``, of one prompt with an adapter."""
    generate = llm.generate
    llm.generate = lambda *given, **more: generate(*given, lora_request=adapter, **more)
    try:
        return run(llm, asked)[0]
    finally:
        llm.generate = generate


@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "loaded beside"])
def test_adapter_that_is_loaded_again_does_not_get_the_kv_of_the_former(
    tmp_path: Path, is_told: bool
) -> None:
    """is_told: requests carry ``load_inplace``, as those of vLLM's server do."""
    options: Any = {"enable_lora": True, "max_lora_rank": 8}
    path = _make_adapter(tmp_path / "adapter", 1)
    first = LoRARequest("adapter", 1, path)
    again = LoRARequest("adapter", 1, path, load_inplace=True)
    with engine(connector(host_capacity="256MiB"), **options) as llm:
        cached, before = _adapted(llm, TEXT, first)
        assert cached == 0
        assert llm.reset_prefix_cache()
        cached, answer = _adapted(llm, TEXT, first)
        assert cached == 3 * BLOCK, "the same adapter's KV comes from host memory"
        assert _are_same(answer, before)
        _make_adapter(tmp_path / "adapter", 2)
        llm.llm_engine.add_lora(again)
        assert llm.reset_prefix_cache()
        cached, answer = _adapted(llm, TEXT, again if is_told else first)
        assert cached == 0
        assert not _are_same(answer, before), "or the test would not notice"
        assert llm.reset_prefix_cache()
        loaded = LoRARequest("adapter", 2, path)
        for expected in (0, 3 * BLOCK):
            cached, found = _adapted(llm, TEXT, loaded)
            assert cached == expected, "a load of its own has KV of its own"
            assert _are_same(found, answer)
            assert llm.reset_prefix_cache()
