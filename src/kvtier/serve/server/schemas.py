"""Requests of the API. Unknown parameters are refused, not ignored: see ``refused``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field
from pydantic.json_schema import models_json_schema

from kvtier.core.hints import Hint, KvHints
from kvtier.serve.server.fields import (
    Calls,
    Choice,
    Content,
    Format,
    Hinted,
    LogitBias,
    Orchestrated,
    Prompts,
    Stops,
    Text,
    TokenIds,
    ToolChoice,
    Tools,
    Variables,
    none_is,
)

Flag = Annotated[bool, Field(strict=True), none_is(False)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True)]


class StreamOptions(BaseModel):
    """Options of a streamed answer.

    include_usage: add a last chunk with the usage of the whole request.
    continuous_usage_stats: also report the tokens so far in every chunk.
    """

    model_config = ConfigDict(extra="allow")

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Flag = False


class GenerationRequest(BaseModel):
    """Fields of both endpoints. null counts as absent."""

    model_config = ConfigDict(extra="allow")

    model: Text
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: Annotated[Count, Field(ge=1, le=16), none_is(1)] = 1
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2), none_is(0.0)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2), none_is(0.0)] = 0.0
    logit_bias: LogitBias = ()
    response_format: Format = None
    seed: Annotated[Count, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = ()
    user: object = None
    """Ignored."""

    # -- extensions -------------------------------------------------------------------------------
    top_k: Annotated[Count, Field(ge=-1), AfterValidator(lambda k: max(k, 0))] | None = None
    """Choose among the k likeliest tokens; 0 or -1 for all."""
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    """Leave out tokens less likely than this share of the likeliest one."""
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    """Divide positive logits of tokens in prompt and answer by it, multiply negative ones."""
    stop_token_ids: TokenIds = ()
    """Tokens that end the answer, beside the model's own."""
    min_tokens: Annotated[Count, Field(ge=0), none_is(0)] = 0
    """Number of tokens before any that ends the answer."""
    ignore_eos: Flag = False
    """Continue to max_tokens."""
    cache_salt: Annotated[Text, Field(max_length=1024), none_is("")] = ""
    """Requests share cached prefixes only under equal salts."""
    kvtier: Hinted = None
    """Hints about the conversation: which blocks will be used again, and until when."""
    kv_hints: Orchestrated = KvHints()
    """Hints of an orchestrator, such as Dynamo. What is unknown in them is ignored."""

    @property
    def hint(self) -> Hint | None:
        """The client's hint, else the orchestrator's."""
        return self.kv_hints.hint if self.kvtier is None else self.kvtier


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[Count, Field(ge=0)] | None = None
    echo: Flag = False
    logprobs: Annotated[Count, Field(ge=0, le=20)] | None = None


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Text | None = None
    tool_calls: Calls = []
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[Count, Field(ge=0, le=20)] | None = None
    tools: Tools = ()
    tool_choice: Choice = ToolChoice("auto")
    parallel_tool_calls: Annotated[bool, Field(strict=True), none_is(True)] = True

    # -- extensions -------------------------------------------------------------------------------
    chat_template_kwargs: Variables = {}
    """Further variables of the model's chat template."""


_COMPONENTS = "#/components/schemas/"


def takes(schema: type[BaseModel]) -> dict[str, object]:
    """Return the OpenAPI description of an operation whose body is a ``schema``."""
    reference = {"$ref": f"{_COMPONENTS}{schema.__name__}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


def components() -> dict[str, object]:
    """Return OpenAPI's descriptions of the requests, by name."""
    _, described = models_json_schema(
        [(CompletionRequest, "validation"), (ChatRequest, "validation")],
        ref_template=f"{_COMPONENTS}{{model}}",
    )
    found: dict[str, object] = described["$defs"]
    return found
