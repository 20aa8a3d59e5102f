"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvtier.serve.engine import Grammar, Tokenizer
from kvtier.serve.server.answer import Answerer, AnswerForm, Whole
from kvtier.serve.server.choice import TextPiece, TextToken
from kvtier.serve.server.errors import bad_request, show
from kvtier.serve.server.generation import ChoiceOrder
from kvtier.serve.server.grammars import grammar_of_answer
from kvtier.serve.server.logprobs import chat_logprobs
from kvtier.serve.server.responses import (
    CalledTool,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageAnswer,
    CostAnswer,
)
from kvtier.serve.server.schemas import ChatMessage, ChatRequest, takes
from kvtier.serve.server.service import Encode, Service
from kvtier.serve.server.tool_calls import CallForm, CallReader, ToolCall, find_form


class ChatForm(AnswerForm):
    """Form of the answers of chat completions.

    num_logprobs: alternatives per token; None reports no log probabilities.
    call_form: how calls are written in the answer; None if it has none.
    max_calls: further calls are dropped; 0 for none.
    """

    endpoint = "chat"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_logprobs: int | None,
        call_form: CallForm | None = None,
        max_calls: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._call_form = call_form
        self._max_calls = max_calls
        self._begun: set[int] = set()
        self._readers: dict[int, CallReader] = {}

    def whole(self, wholes: Sequence[Whole]) -> list[ChatChoice]:
        return [self._whole(at, whole) for at, whole in enumerate(wholes)]

    def _whole(self, at: int, whole: Whole) -> ChatChoice:
        message: ChatMessageAnswer = {"role": "assistant", "content": whole.text, "refusal": None}
        finish_reason = whole.finish_reason
        if self._call_form is not None:
            text, calls = self._read(at, whole.text, finish_reason)
            message["content"] = text if text or not calls else None
            if calls:
                message["tool_calls"] = [_called(call) for call in calls]
                finish_reason = _reason(finish_reason)
        return {
            "index": at,
            "message": message,
            "logprobs": self._logprobs(whole.tokens),
            "finish_reason": finish_reason,
        }

    def chunk(self, index: int, piece: TextPiece) -> list[list[ChatChunkChoice]]:
        """Return chunks: first the role, then text and calls, at last the end."""
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append([self._choice(index, {"role": "assistant", "content": ""})])
        tokens = piece.tokens if self._num_logprobs is not None else ()
        text, finish_reason, calls = piece.text, piece.finish_reason, list[ToolCall]()
        if self._call_form is not None:
            text, calls = self._read(index, text, finish_reason)
        if text or tokens:
            chunks.append([self._choice(index, {"content": text}, tokens)])
        first = self._readers[index].num_calls - len(calls) if calls else 0
        for number, call in enumerate(calls, first):
            chunks += [[self._choice(index, delta)] for delta in _deltas(number, call)]
        if finish_reason is not None:
            if self._call_form is not None and self._readers[index].num_calls:
                finish_reason = _reason(finish_reason)
            chunks.append([self._choice(index, {}, finish_reason=finish_reason)])
        return chunks

    def _read(self, index: int, text: str, finish_reason: str | None) -> tuple[str, list[ToolCall]]:
        """Return the text and the calls that a piece of a choice makes certain."""
        assert self._call_form is not None
        if index not in self._readers:
            self._readers[index] = CallReader(self._call_form, self._max_calls)
        given, calls = self._readers[index].push(text)
        if finish_reason is not None:
            rest, more = self._readers[index].finish()
            given, calls = given + rest, calls + more
        return given, calls

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


def _reason(finish_reason: str | None) -> str | None:
    """Return the end of an answer with calls."""
    return "tool_calls" if finish_reason == "stop" else finish_reason


def _called(call: ToolCall) -> CalledTool:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _deltas(number: int, call: ToolCall) -> list[ChatDelta]:
    """Return the parts of a call in chunks: its name, then its arguments."""
    begin = _called(call)
    begin["index"] = number
    begin["function"]["arguments"] = ""
    return [
        {"tool_calls": [begin]},
        {"tool_calls": [{"index": number, "function": {"arguments": call.arguments}}]},
    ]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids; how calls in its answer are written; rules of its grammar."""

    prompt: list[int]
    call_form: CallForm | None
    rules: str


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()
    tokenizer = service.engine.tokenizer

    @router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Return the assistant's next turn in a conversation."""
        body, prepared = await service.prepare(request, ChatRequest, prepare)
        param = "tool_choice" if body.response_format is None else "response_format"
        grammar = await service.grammar(request, prepared.rules, param)
        generation = service.start(request, body, orders_of(body, prepared, grammar))
        max_calls = 0 if body.parallel_tool_calls else 1
        form = ChatForm(tokenizer, num_logprobs_of(body), prepared.call_form, max_calls)
        return await Answerer(service, request, body, form).answer(generation)

    @router.post("/v1/chat/completions/cost", openapi_extra=takes(ChatRequest))
    async def estimate_chat_completion(request: Request) -> CostAnswer:
        """Return what the next turn would cost here, without computing or loading anything."""
        body, prepared = await service.prepare(request, ChatRequest, prepare)
        return await service.estimate(body, orders_of(body, prepared))

    def num_logprobs_of(body: ChatRequest) -> int | None:
        return (body.top_logprobs or 0) if body.logprobs else None

    def orders_of(
        body: ChatRequest, prepared: ChatPrompt, grammar: Grammar | None = None
    ) -> list[ChoiceOrder]:
        return service.orders(
            body,
            prepared.prompt,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            default_max_tokens=service.config.default_chat_tokens,
            num_logprobs=num_logprobs_of(body),
            grammar=grammar,
        )

    @cache
    def form_of_calls() -> CallForm | None:
        return find_form(tokenizer)

    def prepare(body: ChatRequest, encode: Encode) -> ChatPrompt:
        service.check(body)
        max_tokens = body.max_completion_tokens or body.max_tokens
        if body.max_tokens and body.max_tokens != max_tokens:
            raise bad_request(
                f"max_tokens is {body.max_tokens} and max_completion_tokens is {max_tokens}; "
                "give one of them.",
                "max_tokens",
            )
        check_template(service)
        form = check_tools(body)
        text = chat_text(body, service)
        rules = grammar_of_answer(
            body.response_format,
            form,
            body.tools,
            body.tool_choice,
            is_single=not body.parallel_tool_calls,
        )
        return ChatPrompt(encode(text), form, rules)

    def check_tools(body: ChatRequest) -> CallForm | None:
        """Return how calls in the answer are written; None if there are to be none."""
        choice = body.tool_choice
        if not body.tools and choice.mode == "required":
            raise bad_request("tool_choice asks for a call, but there are no tools.", "tool_choice")
        if choice.name and choice.name not in [tool.name for tool in body.tools]:
            raise bad_request(
                f"tool_choice names {show(choice.name)}, which is none of the tools.", "tool_choice"
            )
        if not body.tools or choice.mode == "none":
            return None
        form = form_of_calls()
        if form is None:
            raise bad_request(
                f"{service.model_name} has no chat template for tools, or its calls are written in "
                "a way that this server can't read (it reads those of Qwen and Llama 3); leave "
                "tools out, or serve the model with vLLM or SGLang, to which kvtier connects.",
                "tools",
                "unsupported_parameter",
            )
        return form

    return router


def check_template(service: Service) -> None:
    """Raise ``ApiError`` if the model has no chat template."""
    if not service.engine.tokenizer.has_chat_template:
        raise bad_request(
            f"{service.model_name} has no chat template; use /v1/completions.", "messages"
        )


def chat_text(body: ChatRequest, service: Service) -> str:
    """Return the prompt of a chat. Raises ``ApiError`` if the model's template refuses it."""
    check_template(service)
    return render(body, service.engine.tokenizer)


def render(body: ChatRequest, tokenizer: Tokenizer) -> str:
    """Return the prompt of a chat for a model that has a chat template.

    Raises ``ApiError`` if the template refuses it.
    """
    turns = [_turn(message) for message in body.messages]
    tools = [tool.given for tool in body.tools]
    try:
        return tokenizer.render_chat(turns, tools, body.chat_template_kwargs)
    except Exception as error:  # a template may raise anything
        why = " ".join(str(error).split()).rstrip(".")[:200]
        raise bad_request(
            f"The model's chat template refuses these messages: {why}.", "messages"
        ) from error


def _turn(message: ChatMessage) -> dict[str, object]:
    """Return a message for chat templates, with ``developer`` as the older ``system``."""
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, object] = {"role": role, "content": message.content or ""}
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        if value := getattr(message, name):
            turn[name] = value
    return turn
