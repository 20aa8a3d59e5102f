"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvtier.engine import Tokenizer
from kvtier.server.answer import Answerer, AnswerForm, Whole
from kvtier.server.choice import TextPiece, TextToken
from kvtier.server.errors import bad_request
from kvtier.server.logprobs import chat_logprobs
from kvtier.server.responses import ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs
from kvtier.server.schemas import ChatMessage, ChatRequest, takes
from kvtier.server.service import Encode, Service


class ChatForm(AnswerForm):
    """Form of the answers of chat completions.

    num_logprobs: alternatives per token; None reports no log probabilities.
    """

    endpoint = "chat"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, num_logprobs: int | None) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._begun: set[int] = set()

    def whole(self, wholes: Sequence[Whole]) -> list[ChatChoice]:
        return [
            {
                "index": at,
                "message": {"role": "assistant", "content": whole.text, "refusal": None},
                "logprobs": self._logprobs(whole.tokens),
                "finish_reason": whole.finish_reason,
            }
            for at, whole in enumerate(wholes)
        ]

    def chunk(self, index: int, piece: TextPiece) -> list[list[ChatChunkChoice]]:
        """Return chunks: the first one has the role, the next ones text, the last one the end."""
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append([self._choice(index, {"role": "assistant", "content": ""})])
        tokens = piece.tokens if self._num_logprobs is not None else ()
        if piece.text or tokens:
            chunks.append([self._choice(index, {"content": piece.text}, tokens)])
        if piece.finish_reason is not None:
            chunks.append([self._choice(index, {}, finish_reason=piece.finish_reason)])
        return chunks

    def _choice(
        self,
        index: int,
        delta: ChatDelta,
        tokens: Sequence[TextToken] = (),
        finish_reason: str | None = None,
    ) -> ChatChunkChoice:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: Sequence[TextToken]) -> ChatLogprobs | None:
        if self._num_logprobs is None:
            return None
        return chat_logprobs(tokens, self._tokenizer, self._num_logprobs)


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()
    tokenizer = service.engine.tokenizer

    @router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Return the assistant's next turn in a conversation."""
        body, prompt = await service.prepare(request, ChatRequest, prepare)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        orders = service.orders(
            body,
            prompt,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            default_max_tokens=service.config.default_chat_tokens,
            num_logprobs=num_logprobs,
        )
        form = ChatForm(tokenizer, num_logprobs)
        generation = service.start(request, body, orders)
        return await Answerer(service, request, body, form).answer(generation)

    def prepare(body: ChatRequest, encode: Encode) -> list[int]:
        service.check(body)
        max_tokens = body.max_completion_tokens or body.max_tokens
        if body.max_tokens and body.max_tokens != max_tokens:
            raise bad_request(
                f"max_tokens is {body.max_tokens} and max_completion_tokens is {max_tokens}; "
                "give one of them.",
                "max_tokens",
            )
        if not tokenizer.has_chat_template:
            raise bad_request(
                f"{service.model_name} has no chat template; use /v1/completions.", "messages"
            )
        turns = [_turn(message) for message in body.messages]
        try:
            text = tokenizer.render_chat(turns)
        except Exception as error:  # a template may raise anything
            why = " ".join(str(error).split()).rstrip(".")[:200]
            raise bad_request(
                f"The model's chat template refuses these messages: {why}.", "messages"
            ) from error
        return encode(text)

    return router


def _turn(message: ChatMessage) -> dict[str, str]:
    """Return a message for chat templates, with ``developer`` as the older ``system``."""
    role = "system" if message.role == "developer" else message.role
    turn = {"role": role, "content": message.content}
    return turn if message.name is None else {**turn, "name": message.name}
