"""The models that the servers run: random weights, and the built-in model's tokenizer.

Computing a prompt is far more expensive than copying its KV, as with real models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kvtier

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENIZER = Path(kvtier.__file__).parent / "serve/engine/builtin/kvtier-tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 4096,
}
"""Sizes of a Qwen3: 23 million weights, 12 KiB of KV per token in float32."""
KV_BYTES_PER_TOKEN = (
    2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * SIZES["head_dim"] * 4
)
QWEN3, QWEN3_NEXT, GPT_OSS = SHAPES = ("qwen3", "qwen3-next", "gpt-oss")
"""Full attention; recurrent states and full attention; windows and full attention."""
QWEN3_NEXT_SIZES: Final = {
    **SIZES,
    "num_hidden_layers": 8,
    "head_dim": 256,  # so that the KV of 128 tokens has room for a state
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
GPT_OSS_SIZES: Final = {
    **SIZES,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "sliding_window": 128,
}
SPREAD = 0.08
"""Standard deviation of the weights. At the usual 0.02 the next token hardly depends on the prompt,
and wrong KV would not be noticed."""


def make_model(folder: Path, sizes: Mapping[str, Any] | None = None, shape: str = QWEN3) -> Path:
    """Write weights from seed 0, in float32, and a chat tokenizer. Return ``folder``.

    The temperature is 0 in its generation config, because the script sets none and SGLang would
    sample.

    Args:
        folder: where the model is written.
        sizes: fields of its configuration, if not those of its shape.
        shape: one of ``SHAPES``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(shape, sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config)
    module.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, folder / name)
    tokenizer = folder / "tokenizer_config.json"
    told = json.loads(tokenizer.read_text())
    # Transformers 4, which vLLM 0.18 uses, reads this name, too.
    told["additional_special_tokens"] = told.pop("extra_special_tokens")
    tokenizer.write_text(json.dumps(told))
    return folder


def _config(shape: str, sizes: Mapping[str, Any] | None) -> PreTrainedConfig:
    """Return the configuration of a shape."""
    from transformers import GptOssConfig, Qwen3Config, Qwen3NextConfig

    family, own = {
        QWEN3: (Qwen3Config, SIZES),
        QWEN3_NEXT: (Qwen3NextConfig, QWEN3_NEXT_SIZES),
        GPT_OSS: (GptOssConfig, GPT_OSS_SIZES),
    }[shape]
    return family(
        **(own if sizes is None else sizes),
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
