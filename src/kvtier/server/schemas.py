"""Requests of the API. Unknown parameters are refused, not ignored: see ``refused``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field
from pydantic.json_schema import models_json_schema

from kvtier.hints import Hint, KvHints
from kvtier.server.fields import Content, Hinted, Orchestrated, Prompts, Stops, Text, none_is

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
    temperature: Annotated[Number, Field(ge=0, le=2), none_is(1.0)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1), none_is(1.0)] = 1.0
    seed: Annotated[Count, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = ()
    user: Text | None = None
    """Ignored."""

    # -- extensions -------------------------------------------------------------------------------
    top_k: Annotated[Count, Field(ge=-1), AfterValidator(lambda k: max(k, 0)), none_is(0)] = 0
    """Choose among the k likeliest tokens; 0 or -1 for all."""
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
    echo: Flag = False
    logprobs: Annotated[Count, Field(ge=0, le=20)] | None = None


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[Count, Field(ge=0, le=20)] | None = None


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
