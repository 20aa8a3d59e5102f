"""Small models of random weights with the shapes of models whose layers keep unlike KV.

``python -m tests.engines.vllm.shapes FOLDER`` saves all of them, each in a folder of its name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import vllm
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from tests.engines.vllm.engines import BLOCK

SIZES: Any = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
EXPERTS: Any = {"num_local_experts": 4, "num_experts_per_tok": 1}
CONVOLUTION: Any = {"conv_dim": 128, "block_dim": 128}
SHAPES: dict[str, PreTrainedConfig] = {
    "gemma3": Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=6,
        head_dim=32,
        sliding_window=2 * BLOCK,
        query_pre_attn_scalar=32,
    ),
    "gpt-oss": GptOssConfig(
        **SIZES, **EXPERTS, num_hidden_layers=4, head_dim=32, sliding_window=BLOCK
    ),
    "llama4": Llama4TextConfig(
        **SIZES,
        **EXPERTS,
        num_hidden_layers=4,
        head_dim=32,
        intermediate_size_mlp=256,
        attention_chunk_size=2 * BLOCK,
        no_rope_layers=[1, 1, 1, 0],
        interleave_moe_layer_step=2,
    ),
    "lfm2": Lfm2Config(
        **SIZES,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        tie_word_embeddings=False,
        **CONVOLUTION,
    ),
    "falcon-h1": FalconH1Config(
        **SIZES,
        num_hidden_layers=2,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=32,
    ),
    "qwen3-next": Qwen3NextConfig(
        **SIZES,
        num_hidden_layers=4,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
}
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 1024}
"""Blocks may be of 16 tokens."""


def options_of(shape: str) -> dict[str, Any]:
    """Return vLLM's options for a model."""
    if shape == "gpt-oss" and vllm.__version_tuple__[:2] < (0, 32):
        return {**OPTIONS, "dtype": "bfloat16"}  # 0.28's kernel for the CPU takes no other sinks
    if shape not in ("falcon-h1", "qwen3-next"):
        return OPTIONS
    # vLLM's kernels for the CPU can't give a state from the middle of a step.
    in_steps = {"max_num_batched_tokens": BLOCK, "max_num_seqs": 16}
    if shape == "falcon-h1":
        return {**OPTIONS, **in_steps}
    # These layers need bfloat16 on a CPU, and vLLM 0.28 takes their states in float32 only.
    return {**OPTIONS, **in_steps, "dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}


def save_random(config: PreTrainedConfig, folder: Path) -> None:
    """Save a model with random weights.

    They are large enough that a wrong block shows in every log-probability.
    """
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)


if __name__ == "__main__":
    for name, shape in SHAPES.items():
        save_random(shape, Path(sys.argv[1], name))
