"""Small models with random weights, prompts for them, and answers with all logits."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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


TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": None,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
VISION = {"hidden_size": 32, "intermediate_size": 64}
PATCHES = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
ENCODER = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
QWEN_TOKENS = {
    "image_token_id": 290,
    "video_token_id": 291,
    "vision_start_token_id": 292,
    "vision_end_token_id": 293,
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": MROPE},
        "vision_config": {**VISION, **PATCHES, "window_size": 16, "fullatt_block_indexes": [1]},
        **QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        "vision_config": {
            **VISION,
            **PATCHES,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
        **QWEN_TOKENS,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, **ENCODER, "model_type": "clip_vision_model"},
        "image_token_id": 290,
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 48},
        "vision_config": {**VISION, **ENCODER, "model_type": "siglip_vision_model"},
        "image_token_id": 290,
        "mm_tokens_per_image": 4,
    },
}
"""Configurations of small multimodal models, by type."""


def multimodal_model(kind: str) -> Any:
    """Return a small model for text and images."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**MULTIMODAL[kind])
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def multimodal_prompt(
    kind: str, seed: int, image: int | None = None, num_tokens: int = 100
) -> dict[str, torch.Tensor]:
    """Return what a processor returns: text, and an image of random pixels behind 40 tokens."""
    ids = torch.randint(3, 280, (1, num_tokens), generator=torch.Generator().manual_seed(seed))
    found: dict[str, torch.Tensor] = {}
    is_qwen = kind.startswith("qwen")
    if image is not None:
        pixels = torch.Generator().manual_seed(1000 + image)
        ids[:, 40 : 44 if kind == "gemma3" else 56] = 290
        if is_qwen:
            ids[:, 39], ids[:, 56] = 292, 293
            found["pixel_values"] = torch.randn(64, 3 * 2 * 16, generator=pixels)
            found["image_grid_thw"] = torch.tensor([[1, 8, 8]])
        else:
            found["pixel_values"] = torch.randn(1, 3, 32, 32, generator=pixels)
    if is_qwen or kind == "gemma3":
        found["mm_token_type_ids" if is_qwen else "token_type_ids"] = (ids == 290).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **found}


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
