"""Small models: the built-in one, and one with latent attention (MLA), of random weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.engines.sglang.servers import MODEL


def model_of(kind: str, folder: Path) -> Path:
    """Return the built-in model ("mha"), or one that is made in ``folder`` ("mla")."""
    return MODEL if kind == "mha" else make_mla(folder / "mla")


def make_mla(folder: Path) -> Path:
    """Make three layers of DeepSeek-V2's shape, with the built-in model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV2Config

    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=3,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        moe_layer_freq=1,  # type: ignore[call-arg]
        n_group=1,
        topk_group=1,
        max_position_embeddings=8192,
        # The only rotary embedding that SGLang has for MLA on a CPU.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
        initializer_range=0.08,  # larger than usual: logits of random weights would be alike
        eos_token_id=2,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder
