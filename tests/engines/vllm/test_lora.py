"""A real vLLM with LoRA adapters: KV is found under the bytes of an adapter, whatever its name."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from kvtier.identity import GRAIN_NS
from tests.engines.vllm.engines import (
    BLOCK,
    MODEL,
    Answer,
    are_close,
    connector,
    engine,
    one_by_one,
    prompt,
    run,
    with_disk,
)

TEXT = prompt(4100, 3 * BLOCK + 50)
FLOOD = [prompt(4200 + seed, 6 * BLOCK + 50) for seed in range(12)]
"""More than vLLM's pool and a small host tier hold."""
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def make_adapter(folder: Path, seed: int) -> Path:
    """Make a LoRA adapter of random weights for the built-in model, at the same path each time."""
    folder.mkdir(exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text())
    hidden, num_layers, rank = config["hidden_size"], config["num_hidden_layers"], 8
    head_dim = int(config.get("head_dim") or hidden // config["num_attention_heads"])
    made = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(num_layers):
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=made)
            weights[f"{name}.lora_B.weight"] = torch.randn(
                config[heads] * head_dim, rank, generator=made
            )
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "k_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def ask(llm: Any, folder: Path | None, number: int = 1, **more: Any) -> tuple[int, Answer]:
    """Run ``TEXT`` with the adapter in ``folder``; None for the model alone."""
    if folder is None:
        return run(llm, TEXT)[0]
    return run(llm, TEXT, lora_request=LoRARequest(folder.name, number, str(folder), **more))[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Answer]:
    """Return vLLM's answers from its own pool, by the adapter's seed; 0 for the model alone."""
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    with engine(None, **OPTIONS) as llm:
        for seed in range(4):
            adapter = make_adapter(folder / f"{seed}", seed) if seed else None
            assert ask(llm, adapter, seed)[0] == 0
            cached, found[seed] = ask(llm, adapter, seed)
            assert cached == 3 * BLOCK
    for seed in range(1, 4):
        assert not are_close(found[0], found[seed]), "or the test would not notice"
    return found


@pytest.mark.timeout(900)
def test_adapters_and_the_model_come_from_host_and_disk(
    tmp_path: Path, alone: Mapping[int, Answer]
) -> None:
    first, second = (make_adapter(tmp_path / name, at + 1) for at, name in enumerate(("a", "b")))
    slab = with_disk(tmp_path / "slab", host_capacity="24MiB", eviction_policy="lru")
    with engine(slab, **OPTIONS) as llm:
        asked = {0: None, 1: first, 2: second}
        for seed, folder in asked.items():
            assert ask(llm, folder, seed)[0] == 0
        assert llm.reset_prefix_cache()
        for seed, folder in asked.items():
            assert ask(llm, folder, seed) == (3 * BLOCK, alone[seed]), "from host memory"
        one_by_one(llm, FLOOD)
        for seed, folder in asked.items():
            assert ask(llm, folder, seed) == (3 * BLOCK, alone[seed]), "from disk, after eviction"
    moved = first.rename(tmp_path / "renamed")
    other = make_adapter(first, 3)
    with engine(slab, **OPTIONS) as llm:
        assert ask(llm, None) == (3 * BLOCK, alone[0])
        assert ask(llm, second, 1) == (3 * BLOCK, alone[2])
        assert ask(llm, moved, 2) == (3 * BLOCK, alone[1]), "under another name and number"
        cached, answer = ask(llm, other, 3)
        assert cached == 0, "another adapter under the name and path of the former"
        assert are_close(answer, alone[3])
        assert llm.reset_prefix_cache()
        assert ask(llm, other, 3) == (3 * BLOCK, alone[3])


@pytest.mark.timeout(900)
def test_adapter_that_is_loaded_again_does_not_get_the_kv_of_the_former(
    tmp_path: Path, alone: Mapping[int, Answer]
) -> None:
    """Requests carry ``load_inplace``, as those of vLLM's server do, or not."""
    slab = with_disk(tmp_path / "slab")
    folders = [make_adapter(tmp_path / f"adapter{number}", 1) for number in (1, 2)]
    former = make_adapter(tmp_path / "former", 1)
    with engine(slab, **OPTIONS) as llm:
        for number, is_told, folder in zip((1, 2), (True, False), folders, strict=True):
            assert are_close(ask(llm, folder, number)[1], alone[1])
            assert llm.reset_prefix_cache()
            cached, answer = ask(llm, folder, number)
            assert (cached, answer) == (3 * BLOCK, alone[1]), "it comes from host memory"
            make_adapter(folder, number + 1)
            again = LoRARequest(folder.name, number, str(folder), load_inplace=True)
            cached, answer = ask(llm, folder, number)
            assert are_close(answer, alone[1]), "vLLM still has the former"
            llm.llm_engine.add_lora(again)
            assert llm.reset_prefix_cache()
            cached, answer = ask(llm, folder, number, load_inplace=is_told)
            assert cached == 0
            assert are_close(answer, alone[number + 1])
            assert llm.reset_prefix_cache()
        time.sleep(2 * GRAIN_NS / 1e9)  # files that have just been written are not believed at once
        for expected in (0, 3 * BLOCK):
            assert ask(llm, folder, 3)[0] == expected
            assert llm.reset_prefix_cache()
        one_by_one(llm, FLOOD[:2])
    with engine(slab, **OPTIONS) as llm:
        cached, answer = ask(llm, folders[0], 1)
        assert are_close(answer, alone[2])
        assert ask(llm, folders[1], 2) == (3 * BLOCK, alone[3])
        assert ask(llm, former, 3) == (3 * BLOCK, alone[1])


@pytest.mark.timeout(900)
def test_adapters_in_host_memory_alone_have_the_keys_of_vllm(tmp_path: Path) -> None:
    """Their files are not read; a load under the same name and path has keys of its own."""
    folder = make_adapter(tmp_path / "adapter", 1)
    with engine(connector(host_capacity="64MiB"), **OPTIONS) as llm:
        for number in (1, 2):
            for expected in (0, 3 * BLOCK):
                assert ask(llm, folder, number)[0] == expected
                assert llm.reset_prefix_cache()
