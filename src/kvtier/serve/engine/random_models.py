"""Models with seeded random weights, for tests and measurements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from kvtier.serve.engine.model_names import RandomName


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model family with the sizes of its configuration.

    on_device: generate the weights on the target device. They depend on the device then, but a
    large model takes only seconds.
    """

    family: type[PreTrainedConfig]
    sizes: dict[str, int]
    on_device: bool = False


_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}
_GQA = _SMALL | {"num_key_value_heads": 2, "head_dim": 32}
_MLA = _SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
}
_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}

RANDOM: dict[str, RandomModel] = {
    RandomName.GQA: RandomModel(Qwen3Config, _GQA),
    RandomName.LLAMA: RandomModel(LlamaConfig, _GQA),
    RandomName.MLA: RandomModel(DeepseekV3Config, _MLA),
    RandomName.LLAMA_8B: RandomModel(LlamaConfig, _LLAMA_8B, on_device=True),
}
"""One small model per kind of attention, and one of the shape of Llama-3-8B, for accelerators, with
the vocabulary of the built-in model."""


def random_config(name: str, vocab_size: int) -> PreTrainedConfig:
    """Return the configuration of a model of ``RANDOM``, without special tokens."""
    made = RANDOM[name]
    config = made.family.from_dict({**made.sizes, "vocab_size": vocab_size})
    if made.on_device:
        config.dtype = torch.bfloat16
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return config


def random_module(
    name: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Return the model with weights from seed 0, on ``device`` or on the CPU."""
    place = device if RANDOM[name].on_device else torch.device("cpu")
    with torch.random.fork_rng(devices=[]), place:
        torch.manual_seed(0)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="eager"
        )
    return module
