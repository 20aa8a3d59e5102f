"""The model's shape, and its export for ``from_pretrained``."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

MAX_LENGTH = 8192
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2


def tiny_config(vocab_size: int) -> Qwen3Config:
    """Return the shape of kvtier-tiny: Qwen3 with grouped-query attention."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[IM_END_ID, END_OF_TEXT_ID],
        pad_token_id=END_OF_TEXT_ID,
    )


def build_model(vocab_size: int, seed: int) -> Qwen3ForCausalLM:
    """Return a model with random weights from ``seed``, fp32."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(tiny_config(vocab_size))


def export(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write config, generation config and bf16 weights; the folder's other files stay."""
    out = copy.deepcopy(model).to(torch.bfloat16).eval()
    out.generation_config = GenerationConfig(
        eos_token_id=[IM_END_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID, do_sample=False
    )
    out.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
