"""Scores and weights of attention over given keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Everything but the tensors that determines a layer's attention.

    scaling: factor of the products of queries and keys.
    window: last tokens that a token attends to, itself included; 0 for all (Mistral, Gemma 2).
    softcap: scores s become softcap * tanh(s / softcap); 0.0 for none (Gemma 2).
    sinks: [num_heads], one more score per head that takes a share of the weights and has no value;
    None without (gpt-oss).
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    form: AttentionParams,
) -> torch.Tensor:
    """Return the weighted values: [num_sequences, num_kv_heads, num_rows, value dim].

    The window is up to the caller, who chooses keys and mask.

    query: [num_sequences, num_kv_heads, num_rows, dim]. Rows are those of the query heads that
    share a KV head, one head after the other.
    mask: added to the scores [num_sequences, num_kv_heads, num_rows, num_keys], or a part of these
    axes.
    """
    if not form.softcap and form.sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=form.scaling)
    scores = torch.matmul(query, keys.transpose(-2, -1)).float() * form.scaling
    if form.softcap:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    if mask is not None:
        scores = scores + mask
    if form.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = _per_row(form.sinks, scores)
        most = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        weights = torch.exp(scores - most)
        weights = weights / (weights.sum(-1, keepdim=True) + torch.exp(sinks - most))
    return torch.matmul(weights.to(values.dtype), values)


def _per_row(sinks: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the sink of each row of scores: [num_kv_heads, num_rows, 1]."""
    num_kv_heads, num_rows = scores.shape[1:3]
    groups = len(sinks) // num_kv_heads
    per_head = sinks.float().view(num_kv_heads, groups, 1)
    return per_head.expand(-1, -1, num_rows // groups).reshape(num_kv_heads, num_rows, 1)
