"""The training loss of a Qwen3 model, written to be fast on a CPU.

It reads the weights of the transformers model in place. ``check_forward`` shows that both give the
same logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM


def rope_table(model: Qwen3ForCausalLM, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding, each [length, head_dim]."""
    config = model.config
    dim = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), inv_freq)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x [batch, heads, length, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def forward(model: Qwen3ForCausalLM, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return logits [batch * length, vocab] of ids [batch, length]; each row is causal."""
    config = model.config
    eps, dim = config.rms_norm_eps, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    batch, length = ids.shape
    weight = model.model.embed_tokens.weight
    x = functional.embedding(ids, weight)
    width = x.shape[-1]
    for layer in model.model.layers:
        att, mlp = layer.self_attn, layer.mlp
        h = functional.rms_norm(x, (width,), layer.input_layernorm.weight, eps)
        q = (h @ att.q_proj.weight.T).view(batch, length, heads, dim)
        k = (h @ att.k_proj.weight.T).view(batch, length, kv_heads, dim)
        v = (h @ att.v_proj.weight.T).view(batch, length, kv_heads, dim)
        q = rotate(functional.rms_norm(q, (dim,), att.q_norm.weight, eps).transpose(1, 2), cos, sin)
        k = rotate(functional.rms_norm(k, (dim,), att.k_norm.weight, eps).transpose(1, 2), cos, sin)
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = v.transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + out.transpose(1, 2).reshape(batch, length, heads * dim) @ att.o_proj.weight.T
        h = functional.rms_norm(x, (width,), layer.post_attention_layernorm.weight, eps)
        h = functional.silu(h @ mlp.gate_proj.weight.T) * (h @ mlp.up_proj.weight.T)
        x = x + h @ mlp.down_proj.weight.T
    x = functional.rms_norm(x, (width,), model.model.norm.weight, eps)
    return x.reshape(batch * length, width) @ weight.T


def loss(model: Qwen3ForCausalLM, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the mean cross-entropy per token in nats; rows [batch, length + 1]."""
    logits = forward(model, rows[:, :-1], cos, sin)
    return functional.cross_entropy(logits, rows[:, 1:].reshape(-1))


def check_forward(model: Qwen3ForCausalLM) -> float:
    """Return the largest difference between these logits and those of transformers."""
    ids = torch.randint(3, model.config.vocab_size, (2, 96))
    with torch.inference_mode():
        own = forward(model, ids, *rope_table(model, 96))
        theirs = model(input_ids=ids).logits.reshape(own.shape)
    return float((own - theirs).abs().max())
