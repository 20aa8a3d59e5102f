"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvtier.serve.engine import Grammar, Tokenizer
from kvtier.serve.server.answer import Answerer, AnswerForm, Whole
from kvtier.serve.server.choice import TextPiece, TextToken
from kvtier.serve.server.fields import Prompt
from kvtier.serve.server.generation import ChoiceOrder
from kvtier.serve.server.grammars import grammar_of_answer
from kvtier.serve.server.logprobs import completion_logprobs
from kvtier.serve.server.responses import CompletionChoice, CompletionLogprobs, CostAnswer
from kvtier.serve.server.schemas import CompletionRequest, takes
from kvtier.serve.server.service import Encode, Service

DEFAULT_MAX_TOKENS = 16
"""Default of ``max_tokens`` in the OpenAI API."""


@dataclass(frozen=True, slots=True)
class CompletionPrompts:
    """Prompts as token ids, and the rules of the grammar of every answer.

    echoes: text to begin each prompt's answers with; offsets of the prompt's tokens in it.
    """

    prompts: list[list[int]]
    echoes: list[tuple[str, list[int]]]
    rules: str


class CompletionForm(AnswerForm):
    """Form of the answers of completions.

    num_logprobs: alternatives per token; None reports no log probabilities.
    """

    endpoint = "completions"
    whole_object = chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, num_logprobs: int | None) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs

    def whole(self, wholes: Sequence[Whole]) -> list[CompletionChoice]:
        return [
            self._choice(at, whole.text, whole.tokens, whole.finish_reason)
            for at, whole in enumerate(wholes)
        ]

    def chunk(self, index: int, piece: TextPiece) -> list[list[CompletionChoice]]:
        tokens = piece.tokens if self._num_logprobs is not None else ()
        if not piece.text and not tokens and piece.finish_reason is None:
            return []
        return [[self._choice(index, piece.text, tokens, piece.finish_reason)]]

    def _choice(
        self, index: int, text: str, tokens: Sequence[TextToken], finish_reason: str | None
    ) -> CompletionChoice:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: Sequence[TextToken]) -> CompletionLogprobs | None:
        if self._num_logprobs is None:
            return None
        return completion_logprobs(tokens, self._tokenizer, self._num_logprobs)


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()
    tokenizer = service.engine.tokenizer

    @router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue one or more prompts."""
        body, prepared = await service.prepare(request, CompletionRequest, prepare)
        grammar = await service.grammar(request, prepared.rules, "response_format")
        generation = service.start(request, body, orders_of(body, prepared, grammar))
        form = CompletionForm(tokenizer, body.logprobs)
        return await Answerer(service, request, body, form).answer(generation)

    @router.post("/v1/completions/cost", openapi_extra=takes(CompletionRequest))
    async def estimate_completion(request: Request) -> CostAnswer:
        """Return what the prompts would cost here, without computing or loading anything."""
        body, prepared = await service.prepare(request, CompletionRequest, prepare)
        return await service.estimate(body, orders_of(body, prepared))

    def orders_of(
        body: CompletionRequest, prepared: CompletionPrompts, grammar: Grammar | None = None
    ) -> list[ChoiceOrder]:
        orders: list[ChoiceOrder] = []
        for token_ids, (echo, offsets) in zip(prepared.prompts, prepared.echoes, strict=True):
            orders += service.orders(
                body,
                token_ids,
                max_tokens=body.max_tokens,
                default_max_tokens=DEFAULT_MAX_TOKENS,
                num_logprobs=body.logprobs,
                echo=echo,
                offsets=offsets,
                grammar=grammar,
            )
        return orders

    def prepare(body: CompletionRequest, encode: Encode) -> CompletionPrompts:
        service.check(body, len(body.prompt))
        prompts = [
            encode(each, special_tokens=True) if isinstance(each, str) else each
            for each in body.prompt
        ]
        scores = body.echo and body.logprobs is not None
        echoes = [
            _echo(tokenizer, prompt, token_ids, scores) if body.echo else ("", [])
            for prompt, token_ids in zip(body.prompt, prompts, strict=True)
        ]
        return CompletionPrompts(prompts, echoes, grammar_of_answer(body.response_format))

    return router


def _echo(
    tokenizer: Tokenizer, prompt: Prompt, token_ids: Sequence[int], scores: bool
) -> tuple[str, list[int]]:
    """Return the prompt's text; with ``scores`` also where the text of each token begins in it."""
    if not scores:
        return (prompt if isinstance(prompt, str) else tokenizer.decode(token_ids)), []
    detokenizer, text, offsets = tokenizer.detokenizer(), "", []
    for token_id in token_ids:
        offsets.append(len(text))
        text += detokenizer.push(token_id)
    return text + detokenizer.flush(), offsets
