"""Turns a running generation into the HTTP answer, whole or streamed, for both endpoints."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from fastapi import Request
from starlette.responses import Response

from kvtier.observe.traces import Attributes
from kvtier.serve.server.choice import TextPiece, TextToken
from kvtier.serve.server.errors import ApiError, internal_error
from kvtier.serve.server.generation import Generation
from kvtier.serve.server.responses import Answer, ChatChoice, ChatChunkChoice, CompletionChoice
from kvtier.serve.server.schemas import GenerationRequest
from kvtier.serve.server.service import Service, wants_explanation
from kvtier.serve.server.streaming import DONE, EventStream, encode_event, encode_json, unless_gone
from kvtier.serve.server.tracing import (
    add_parts,
    attributes_of_answer,
    end_answered,
    end_failed,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Whole:
    """One complete choice."""

    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: TextPiece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason


class AnswerForm(ABC):
    """Form of an endpoint's answers. endpoint: its name in the metrics."""

    endpoint: str
    whole_object: str
    chunk_object: str

    @abstractmethod
    def whole(self, wholes: Sequence[Whole]) -> list[CompletionChoice] | list[ChatChoice]:
        """Return the choices of a whole answer."""

    @abstractmethod
    def chunk(
        self, index: int, piece: TextPiece
    ) -> list[list[CompletionChoice]] | list[list[ChatChunkChoice]]:
        """Return the choices of each chunk for ``piece``; often one chunk, sometimes none."""


class Answerer:
    """Answers one HTTP request. Its id names the answer in the API and in the log."""

    def __init__(
        self, service: Service, request: Request, asked: GenerationRequest, form: AnswerForm
    ) -> None:
        self._service = service
        self._request = request
        self._asked = asked
        self._form = form
        self._id: str = request.state.request_id
        self._began: float = request.state.began
        self._created = int(time.time())
        options = asked.stream_options
        self._wants_usage = options is not None and options.include_usage
        self._wants_counts = options is not None and options.continuous_usage_stats
        self._ends_with_usage = self._wants_usage or wants_explanation(request)
        self._first_s: float | None = None

    async def answer(self, generation: Generation) -> Response:
        """Return the response, whole or streamed. Always closes ``generation``."""
        pieces = self._timed(generation.pieces())
        try:
            if not self._asked.stream:
                work = self._collect(generation, pieces)
                return await unless_gone(work, self._request.receive)
            # Start the stream with the first text: an earlier error gets its own HTTP status.
            first = await unless_gone(_first(pieces), self._request.receive)
        except BaseException as error:
            generation.close()
            if generation.span is not None:
                end_failed(generation.span, error, self._traced(generation))
            raise
        return EventStream(
            self._events(generation, first, pieces),
            lambda complete: self._end(generation, complete),
        )

    async def _collect(
        self, generation: Generation, pieces: AsyncIterator[tuple[int, TextPiece]]
    ) -> Response:
        wholes = [Whole() for _ in range(generation.num_choices)]
        async for at, piece in pieces:
            wholes[at].add(piece)
        self._end(generation, is_complete=True)
        answer = self._answer(self._form.whole_object, self._form.whole(wholes))
        _end_with_usage(answer, generation)
        return Response(encode_json(answer), media_type="application/json")

    async def _events(
        self,
        generation: Generation,
        first: tuple[int, TextPiece],
        rest: AsyncIterator[tuple[int, TextPiece]],
    ) -> AsyncIterator[bytes]:
        try:
            for event in self._chunks(generation, *first):
                yield event
            async for at, piece in rest:
                for event in self._chunks(generation, at, piece):
                    yield event
            if self._ends_with_usage:
                last = self._answer(self._form.chunk_object, [])
                _end_with_usage(last, generation)
                yield encode_event(last)
        except ApiError as error:
            self._request.state.status = error.status
            yield encode_event(error.body)
        except Exception as error:
            logger.error("stream failed id=%s error=%s", self._id, type(error).__name__)
            self._request.state.status = 500
            yield encode_event(internal_error(self._id).body)
        yield DONE

    def _chunks(self, generation: Generation, at: int, piece: TextPiece) -> list[bytes]:
        events = []
        for choices in self._form.chunk(at, piece):
            answer = self._answer(self._form.chunk_object, choices)
            if self._wants_usage:
                answer["usage"] = generation.counts if self._wants_counts else None
            events.append(encode_event(answer))
        return events

    def _answer(
        self,
        kind: str,
        choices: list[CompletionChoice] | list[ChatChoice] | list[ChatChunkChoice],
    ) -> Answer:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model_name,
            "choices": choices,
        }

    async def _timed(
        self, pieces: AsyncIterator[tuple[int, TextPiece]]
    ) -> AsyncIterator[tuple[int, TextPiece]]:
        async for at, piece in pieces:
            if self._first_s is None:
                self._first_s = time.perf_counter() - self._began
                self._service.metrics.first_token(self._form.endpoint, self._first_s)
            yield at, piece

    def _end(self, generation: Generation, is_complete: bool) -> None:
        generation.close()
        has_all = is_complete and self._request.state.status is None
        if generation.span is not None:
            end_answered(generation.span, self._traced(generation), has_all)
        if has_all:
            seconds = time.perf_counter() - self._began
            self._service.metrics.answered(self._form.endpoint, seconds, generation.usage)

    def _traced(self, generation: Generation) -> Attributes:
        """Add the spans of the choices that have ended; return the attributes of the answer."""
        assert generation.span is not None
        for completion in generation.completions:
            add_parts(generation.span, completion)
        return attributes_of_answer(
            self._id,
            self._service.model_name,
            generation.usage,
            generation.finish_reasons,
            self._first_s if self._asked.stream else None,
        )


def _end_with_usage(answer: Answer, generation: Generation) -> None:
    answer["usage"] = generation.usage
    if hints := generation.hints:
        answer["kvtier"] = {"hints": hints}


async def _first(pieces: AsyncIterator[tuple[int, TextPiece]]) -> tuple[int, TextPiece]:
    return await anext(pieces)
