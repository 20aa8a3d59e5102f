"""Small models with random weights, prompts for them, and answers with all logits."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from scripts.model_coverage import small_config

CHUNK = 16


def small_model(seed: int = 0, **changes: Any) -> Any:
    """Return a model whose answers depend on every token of a prompt."""
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**sizes | changes)).eval()


def other_model(kind: str, **changes: Any) -> Any:
    """Return a small model of another type."""
    config = small_config(kind, kind, 300)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def prompt(seed: int, num_tokens: int = 100, shared: int = 0) -> torch.Tensor:
    """Return random token ids [1, num_tokens], of which the first ``shared`` are always equal."""
    ids = torch.randint(1, 300, (1, num_tokens), generator=torch.Generator().manual_seed(seed + 1))
    same = torch.Generator().manual_seed(0)
    ids[:, :shared] = torch.randint(1, 300, (1, shared), generator=same)
    return ids


def answer(model: Any, ids: torch.Tensor, **options: Any) -> tuple[Any, torch.Tensor]:
    """Return the tokens, and the logits of each step: [num_steps, batch, vocab_size]."""
    given: dict[str, Any] = {
        "max_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    if "attention_mask" not in options:
        options["attention_mask"] = torch.ones_like(ids)
    found: Any = model.generate(ids, **given | options)
    return found.sequences, torch.stack(found.logits)


def on_grid(model: Any, ids: torch.Tensor, **options: Any) -> tuple[Any, torch.Tensor]:
    """Return the answer that an attached model has to give, by transformers alone."""
    return answer(model, ids, prefill_chunk_size=CHUNK, **options)


def are_equal(one: tuple[Any, torch.Tensor], other: tuple[Any, torch.Tensor]) -> bool:
    """Whether two answers have the same bits."""
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
