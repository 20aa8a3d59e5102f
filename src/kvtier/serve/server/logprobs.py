"""Log probabilities in the formats of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.serve.engine import Tokenizer
from kvtier.serve.server.choice import TextToken
from kvtier.serve.server.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have."""


def completion_logprobs(
    tokens: Sequence[TextToken], tokenizer: Tokenizer, num_top: int
) -> CompletionLogprobs:
    """Return four lists with one entry per token.

    num_top: alternatives per token; the chosen one is added if it is not among them. The first
    token of a prompt has neither.
    """
    texts = [tokenizer.token_text(token.token.token_id) for token in tokens]
    tops: list[dict[str, float] | None] = []
    for text, token in zip(texts, tokens, strict=True):
        if token.token.logprob is None:  # the first token of a prompt
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in token.token.top_logprobs[:num_top]:
            top.setdefault(tokenizer.token_text(token_id), _finite(logprob))
        top.setdefault(text, _finite(token.token.logprob))
        tops.append(top)
    return {
        "tokens": texts,
        "token_logprobs": [
            None if token.token.logprob is None else _finite(token.token.logprob)
            for token in tokens
        ],
        "top_logprobs": tops if num_top else None,
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[TextToken], tokenizer: Tokenizer, num_top: int) -> ChatLogprobs:
    """Return one object per token, each with its ``num_top`` alternatives."""
    content: list[TokenLogprob] = []
    for each in tokens:
        token = each.token
        top = [_entry(tokenizer, *pair) for pair in token.top_logprobs[:num_top]]
        content.append({**_entry(tokenizer, token.token_id, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> TopLogprob:
    text = tokenizer.token_text(token_id)
    # A token that is part of a character has no text of its own, so its bytes are unknown.
    known = "\ufffd" not in text
    return {
        "token": text,
        "logprob": _finite(logprob),
        "bytes": list(text.encode()) if known else None,
    }


def _finite(logprob: float | None) -> float:
    assert logprob is not None, "log probabilities are computed where they are asked for"
    return max(logprob, LOWEST)
