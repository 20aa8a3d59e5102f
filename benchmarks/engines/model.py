"""The model that the servers run: random weights, and the built-in model's tokenizer.

Computing a prompt is far more expensive than copying its KV, as with real models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kvtier

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
SPREAD = 0.08
"""Standard deviation of the weights. At the usual 0.02 the next token hardly depends on the prompt,
and wrong KV would not be noticed."""


def make_model(folder: Path, sizes: Mapping[str, Any] = SIZES) -> Path:
    """Write weights from seed 0, in float32, and a chat tokenizer. Return ``folder``.

    The temperature is 0 in its generation config, because the script sets none and SGLang would
    sample.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **sizes,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Qwen3ForCausalLM(config)
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
