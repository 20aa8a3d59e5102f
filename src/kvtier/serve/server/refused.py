"""API parameters that this server does not support.

A parameter that would change the answer is refused unless it has a neutral value; one that only
labels the request is ignored. null counts as absent, and so do false and empty values of unknown
parameters: routers write out the defaults of the engines that they know.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from kvtier.serve.server.errors import ApiError, bad_request, show
from kvtier.serve.server.schemas import ChatMessage, ChatRequest, GenerationRequest, StreamOptions

_LONGEST_NAME = 64
"""Characters of an unknown parameter that are compared with the known ones."""

LABELS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "service_tier"})
"""Ignored parameters, which concern the request and not the answer."""

HARMLESS: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": (),
    "include_reasoning": (True, False),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": (),
    "separate_reasoning": (True, False),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "store": (),
    "stream_reasoning": (True, False),
    "suffix": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Refused parameters, with the neutral values that are accepted."""


_OWN = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
"""Fields of messages of one role."""


def refuse_unsupported(request: GenerationRequest) -> None:
    """Raise ``ApiError`` if the request asks for something unsupported."""
    for name, value in (request.model_extra or {}).items():
        _refuse_parameter(name, value, list(type(request).model_fields))
    options = request.stream_options
    for name, value in (options.model_extra or {}).items() if options is not None else ():
        if value is not None:
            raise _unknown(f"stream_options.{name}", list(StreamOptions.model_fields))
    if options is not None and not request.stream:
        raise bad_request(
            "stream_options is given without stream; set stream to true or leave it out.",
            "stream_options",
        )
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise bad_request(
                "top_logprobs is given without logprobs; set logprobs to true.", "top_logprobs"
            )
        for at, message in enumerate(request.messages):
            _refuse_message(at, message)


def _refuse_parameter(name: str, value: object, known: list[str]) -> None:
    if value is None or name in LABELS or _is_neutral(value, HARMLESS.get(name, ())):
        return
    if name in HARMLESS:
        raise _unsupported(
            f"{name}={show(value)} is not supported by this server; leave it out, or serve the "
            "model with vLLM or SGLang, to which kvtier connects.",
            name,
        )
    raise _unknown(name, known)


def _is_neutral(value: object, defaults: tuple[object, ...]) -> bool:
    """Whether a parameter with this value is as good as absent. defaults: its neutral values."""
    # 1 == True, and asks for something else
    if any(value == it and isinstance(value, bool) is isinstance(it, bool) for it in defaults):
        return True
    return value in ("", [], {}) or (value is False and not _is_on(defaults))


def _is_on(defaults: tuple[object, ...]) -> bool:
    """Whether a parameter is true unless it is given."""
    return any(it is True for it in defaults)


def _unknown(name: str, known: list[str]) -> ApiError:
    near = get_close_matches(name.rpartition(".")[2][:_LONGEST_NAME], known, n=1)
    advice = f"did you mean {near[0]}?" if near else "leave it out."
    return _unsupported(f"{show(name)} is no parameter of this request; {advice}", name)


ASKED_OF_MESSAGES = frozenset({"audio", "function_call", "partial", "prefix"})
"""Fields of messages that would change the answer. Clients add many others, which change nothing:
they send back what some server has answered, and notes of their own.
"""


def _refuse_message(at: int, message: ChatMessage) -> None:
    """Refuse fields of messages that ask for something; ignore all others."""
    if message.content is None and message.role != "assistant":
        where = f"messages[{at}].content"
        raise bad_request(f"{where} is missing; this request needs it.", where, "missing")
    for name, role in _OWN.items():
        if getattr(message, name) and message.role != role:
            where = f"messages[{at}].{name}"
            raise bad_request(
                f"{where} belongs to a message of the {role}, but this one is of the "
                f"{message.role}.",
                where,
            )
    for name, value in (message.model_extra or {}).items():
        if name in ASKED_OF_MESSAGES and value not in (None, False, [], {}):
            where = f"messages[{at}].{name}"
            raise _unsupported(f"{where} is not supported by this server; leave it out.", where)


def _unsupported(message: str, param: str) -> ApiError:
    return bad_request(message, param[:100], "unsupported_parameter")
