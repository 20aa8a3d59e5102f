"""Answers of the API as plain data."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # typing's own won't do for pydantic before Python 3.12

from kvtier.plan import PromptCost


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """Token counts of an answer.

    prompt_tokens_details: in a whole answer and in the last chunk.
    kvtier: on request, an explanation per prompt, in order; null for one that ended before it was
    scheduled.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    kvtier: NotRequired[list[dict[str, object] | None]]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    name: NotRequired[str]
    arguments: str


class CalledTool(TypedDict):
    """A call, or a part of one in a chunk.

    index, and not always the others: in chunks.
    """

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCall


class ChatMessageAnswer(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[CalledTool]]


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[CalledTool]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class HintAnswer(TypedDict):
    """Results of the hints of a request, for each of its prompts."""

    hints: list[list[dict[str, str | int]]]


class Answer(TypedDict):
    """A whole answer, or one chunk of a streamed one.

    usage: in a whole answer, and on request in the last chunk; before that null, or the tokens so
    far.
    kvtier: where the last ``usage`` is, if the request had hints.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice] | list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    kvtier: NotRequired[HintAnswer]


class CostAnswer(TypedDict):
    """Answer about prompts that were not submitted. costs: one per prompt, in order."""

    object: Literal["kvtier.cost"]
    model: str
    costs: list[PromptCost]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class HealthAnswer(TypedDict):
    status: Literal["ok"]
    model: str
    running: int
    waiting: int
