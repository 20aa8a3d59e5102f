"""Models of random weights that draft for another model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.engines.vllm.engines import MODEL


def make_eagle(folder: Path) -> Path:
    """Save an EAGLE head for the built-in model: it repeats the last token, now and then."""
    target = json.loads((MODEL / "config.json").read_text())
    hidden, heads = target["hidden_size"], target["num_attention_heads"]
    config = LlamaConfig(
        vocab_size=target["vocab_size"],
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=target["num_key_value_heads"],
        head_dim=target["head_dim"],
        max_position_embeddings=target["max_position_embeddings"],
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    layer = LlamaForCausalLM(config).model.layers[0]
    weights = {f"layers.0.{name}": weight for name, weight in layer.state_dict().items()}
    del weights["layers.0.input_layernorm.weight"]  # an EAGLE head has none
    weights["fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    folder.mkdir()
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return folder


def make_mtp(folder: Path) -> Path:
    """Save a model with a layer that predicts one more token (MiMo); both often repeat a token."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = Qwen2Config(
        vocab_size=json.loads((MODEL / "config.json").read_text())["vocab_size"],
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    mtp = "model.mtp_layers.0."
    for name, weight in model.model.layers[0].state_dict().items():
        weights[mtp + name] = weight.clone()
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{mtp}{name}.weight"] = torch.ones(config.hidden_size)
    eye = torch.eye(config.hidden_size)
    weights[mtp + "input_proj.weight"] = torch.cat([eye, torch.zeros_like(eye)], dim=1)
    save_file(weights, file, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(described))
    return folder
