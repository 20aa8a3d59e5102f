"""Models of random weights that draft for another model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.engines.vllm.engines import BLOCK, MODEL
from tests.engines.vllm.shapes import SIZES


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
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    mtp = "model.mtp_layers.0."
    _add_mtp(folder, model, mtp, {f"{mtp}{name}" for name in norms}, f"{mtp}input_proj")
    _describe(folder, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    return folder


def make_mtp_of_windows(folder: Path) -> Path:
    """Do so with layers of windows and of full attention (K-EXAONE); the added one has a window."""
    config = ExaoneMoeConfig(
        **SIZES,
        num_hidden_layers=4,
        sliding_window=BLOCK,
        mlp_layer_types=["dense"] * 4,
    )
    torch.manual_seed(0)
    model = ExaoneMoeForCausalLM(config)
    model.save_pretrained(folder)
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    _add_mtp(folder, model, "mtp.layers.0.", {f"mtp.{name}" for name in norms}, "mtp.fc")
    _describe(folder, num_nextn_predict_layers=1)
    return folder


def _add_mtp(
    folder: Path, model: PreTrainedModel, layer: str, norms: set[str], projection: str
) -> None:
    """Add a layer to a saved model that predicts one more token, from the last one.

    layer, norms, projection: names of its weights.
    """
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for name, weight in model.model.layers[0].state_dict().items():
        weights[layer + name] = weight.clone()
    for name in norms:
        weights[f"{name}.weight"] = torch.ones(model.config.hidden_size)
    eye = torch.eye(model.config.hidden_size)
    weights[f"{projection}.weight"] = torch.cat([eye, torch.zeros_like(eye)], dim=1)
    save_file(weights, file, metadata={"format": "pt"})


def _describe(folder: Path, **more: object) -> None:
    """Add settings to a saved model's config."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
