"""One streamed request to an OpenAI-compatible server, with its times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from kvtier.core.errors import CacheError

MAX_TOKENS = 1 << 40
"""Largest number of tokens that a server may report."""
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")
"""Fields of a chat's delta that hold tokens. The first one is the answer."""


class FailedRequestError(CacheError):
    """A request that was not answered correctly.

    Attributes:
        kind: reason, without text from the server.
    """

    def __init__(self, kind: str, said: str = "") -> None:
        super().__init__(f"{kind}: {said}" if said else kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Exchange:
    """An answered request: seconds from its start, and tokens as counted by the server."""

    text: str
    first_token_s: float
    whole_s: float
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model of a server.

    Attributes:
        server: base URL, without ``/v1``.
        model: name of the model.
        is_chat: use ``/v1/chat/completions`` instead of ``/v1/completions``.
        timeout_s: timeout of each request.
        api_key: key of the server; None for none.
    """

    server: str
    model: str
    is_chat: bool = False
    timeout_s: float = 600.0
    api_key: str | None = field(default=None, repr=False)

    @property
    def path(self) -> str:
        """Path of the requests on the server."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def ask(self, texts: Sequence[str], max_tokens: int) -> Exchange:
        """Send a conversation and read its next answer.

        Args:
            texts: alternately of the user and of the model; the last one is the user's.
            max_tokens: most tokens of the answer.

        Raises:
            FailedRequestError: the answer is missing or incomplete.
        """
        # Imported here, since help shows the options of a load without an HTTP client.
        from kvtier.observe.live.client import NoAnswerError, RefusedError, stream

        content = json.dumps(self._body(texts, max_tokens)).encode()
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        began = perf_counter()
        lines = stream(self.server + self.path, self.timeout_s, headers, content, self.api_key)
        try:
            return self._read(_events(lines), began)
        except RefusedError as error:
            raise FailedRequestError(f"status {error.code}", error.said) from error
        except NoAnswerError as error:
            raise FailedRequestError(error.why) from error
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise FailedRequestError("an event that is none of the API's") from error
        finally:
            lines.close()

    def _body(self, texts: Sequence[str], max_tokens: int) -> dict[str, object]:
        roles = ("user", "assistant")
        asked: dict[str, object] = {"prompt": "".join(texts)}
        if self.is_chat:
            asked = {
                "messages": [
                    {"role": roles[at % 2], "content": text} for at, text in enumerate(texts)
                ]
            }
        return {
            "model": self.model,
            **asked,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _read(self, events: Iterator[dict[str, Any]], began: float) -> Exchange:
        answer: list[str] = []
        first_token_s: float | None = None
        usage: Mapping[str, Any] = {}
        for event in events:
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                texts = self._texts(choice)
                answer.append(texts[0])
                if first_token_s is None and (any(texts) or choice.get("finish_reason")):
                    first_token_s = perf_counter() - began
        if first_token_s is None:
            raise FailedRequestError("an answer without tokens")
        details = usage.get("prompt_tokens_details") or {}
        return Exchange(
            "".join(answer),
            first_token_s,
            perf_counter() - began,
            _count(usage.get("prompt_tokens")),
            _count(usage.get("completion_tokens")),
            _count(details.get("cached_tokens")),
        )

    def _texts(self, choice: Mapping[str, Any]) -> list[str]:
        """Return the texts of a chunk, the answer's first."""
        if not self.is_chat:
            return [_text(choice.get("text"))]
        delta = choice.get("delta") or {}
        return [_text(delta.get(name)) for name in TEXT_FIELDS]


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of an answer, up to its end mark.

    Raises:
        FailedRequestError: an event is an error, or the end mark is missing.
    """
    from kvtier.observe.live.client import error_message

    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event or event.get("object") == "error":
            raise FailedRequestError("an error within the answer", error_message(event))
        yield event
    raise FailedRequestError("the answer ended before its end mark")


def _text(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError("text expected")
    return value or ""


def _count(value: object) -> int | None:
    """Return a number of tokens; None if the server reports none."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise TypeError("a number of tokens expected")
    return value
