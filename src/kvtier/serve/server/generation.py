"""Bridge between the event loop and the engine's thread: the choices of one HTTP request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvtier.cache.lease import PrefixStored
from kvtier.core.errors import Closed
from kvtier.core.hints import Hint
from kvtier.observe.traces import RequestSpan
from kvtier.serve.engine import (
    Completion,
    Engine,
    EngineBusy,
    RequestError,
    RequestHandle,
    SamplingParams,
    Token,
)
from kvtier.serve.server.choice import AnswerChoice, TextPiece
from kvtier.serve.server.errors import ApiError, bad_request, busy, shutting_down
from kvtier.serve.server.responses import Usage
from kvtier.serve.server.tracing import tell_stored

Event = Token | Sequence[Token] | Completion
"""A token, the prompt's tokens, or the end of a choice."""


@dataclass(frozen=True, slots=True)
class ChoiceOrder:
    """One choice to generate.

    echo: text to begin with.
    offsets: of the prompt's tokens in it, if their log probabilities are wanted.
    is_first: whether it is the first one of its prompt.
    """

    prompt: Sequence[int]
    params: SamplingParams
    echo: str = ""
    offsets: Sequence[int] = ()
    is_first: bool = True


class Generation:
    """The choices of one HTTP request, each a request to the engine.

    began: ``time.monotonic`` at its start.
    salt: cache salt of its tenant.
    explains: whether its usage explains the source of each prompt.
    span: of its trace, if any.
    hint: the client's hints about its conversation.
    audits: whether its hit is audited, in any case.
    Belongs to the event loop's thread. Always ``close`` it, which aborts running choices.
    """

    def __init__(
        self,
        engine: Engine,
        orders: Sequence[ChoiceOrder],
        stops: Sequence[str],
        salt: str,
        on_close: Callable[[Generation], None],
        explains: bool = False,
        span: RequestSpan | None = None,
        hint: Hint | None = None,
        audits: bool = False,
    ) -> None:
        self._hint = hint
        self._audits = audits
        self.began = time.monotonic()
        self.salt = salt
        self._orders = tuple(orders)
        self._on_close = on_close
        self._explains = explains
        self.span = span if span is not None and span.is_recording else None
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._completions: dict[int, Completion] = {}
        self._finish_reasons: dict[int, str] = {}
        self._handles: list[RequestHandle] = []
        self._was_cut_short = False
        try:
            for at, order in enumerate(self._orders):
                self._handles.append(self._submit(engine, at, order, salt))
        except ApiError:
            self.close()
            raise
        # After the engine has accepted the prompts: a tokenizer fails on token ids that are none.
        self._choices = [
            AnswerChoice(
                engine.tokenizer.detokenizer(order.prompt),
                stops,
                order.echo,
                order.params.min_tokens,
            )
            for order in self._orders
        ]

    def _submit(self, engine: Engine, at: int, order: ChoiceOrder, salt: str) -> RequestHandle:
        put = partial(self._put, at)
        try:
            return engine.submit(
                order.prompt,
                order.params,
                salt=salt,
                on_token=put,
                on_done=put,
                explain=(self._explains and order.is_first) or self.span is not None,
                on_stored=None if self.span is None else partial(self._put_stored, self.span),
                hint=self._hint,
                audit=self._audits,
                on_prompt=put,
            )
        except RequestError as error:
            raise bad_request(str(error)) from error
        except EngineBusy as error:
            raise busy(str(error)) from error
        except Closed as error:
            raise shutting_down() from error

    def _put(self, at: int, event: Event) -> None:
        """Queue an event. Called on the engine's thread; the loop may be closed at shutdown."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (at, event))

    def _put_stored(self, span: RequestSpan, stored: PrefixStored) -> None:
        """Add a span for stored blocks. May be called after the request has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(tell_stored, span, stored, time.perf_counter())

    async def pieces(self) -> AsyncIterator[tuple[int, TextPiece]]:
        """Yield (choice, piece) as pieces become certain, until every choice has ended.

        Raises ``ApiError`` if a choice could not be completed.
        """
        while len(self._completions) < len(self._choices):
            at, event = await self._events.get()
            choice = self._choices[at]
            if isinstance(event, Completion):
                self._completions[at] = event
                self._check(event, choice)
                last = choice.finish(event.finish_reason)
                self._finish_reasons[at] = last.finish_reason or event.finish_reason
                yield at, last
                continue
            if not isinstance(event, Token):
                yield at, choice.push_prompt(event, self._orders[at].offsets)
                continue
            was_stopped = choice.stopped
            piece = choice.push(event)
            if choice.stopped and not was_stopped:
                self._handles[at].abort()
            if piece.text or piece.tokens:
                yield at, piece

    def _check(self, completion: Completion, choice: AnswerChoice) -> None:
        if completion.finish_reason == "error":
            raise ApiError(500, completion.error, code="engine_error")
        if completion.finish_reason == "abort" and not choice.stopped:
            if self._was_cut_short:
                raise shutting_down()
            raise ApiError(500, "The request was aborted in the engine.", code="aborted")

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def counts(self) -> Usage:
        """Tokens of the request so far; a prompt counts once for any ``n``."""
        num_prompt = sum(len(order.prompt) for order in self._orders if order.is_first)
        num_generated = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }

    @property
    def usage(self) -> Usage:
        """Tokens of the whole request, and how many of them were cached."""
        firsts = [at for at, order in enumerate(self._orders) if order.is_first]
        num_cached = sum(
            self._completions[at].num_cached_tokens for at in firsts if at in self._completions
        )
        usage = self.counts
        usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        if self._explains:
            ended = (self._completions[at].explanation for at in firsts if at in self._completions)
            usage["kvtier"] = [None if each is None else each.as_json() for each in ended]
        return usage

    @property
    def hints(self) -> list[list[dict[str, str | int]]]:
        """Results of the client's hint, for each prompt; none without a hint."""
        if self._hint is None:
            return []
        firsts = (at for at, order in enumerate(self._orders) if order.is_first)
        ended = (self._completions[at] for at in firsts if at in self._completions)
        return [[result.as_json() for result in each.hint_results] for each in ended]

    @property
    def completions(self) -> list[Completion]:
        """The completions of the choices that have ended."""
        return [self._completions[at] for at in sorted(self._completions)]

    @property
    def finish_reasons(self) -> list[str]:
        """Why each choice ended that has ended, as the answer says it."""
        return [self._finish_reasons[at] for at in sorted(self._finish_reasons)]

    def prompts(self) -> list[tuple[Sequence[int], int]]:
        """Return the token ids of each prompt, and how many tokens its choices have so far."""
        found: list[tuple[Sequence[int], int]] = []
        for order, choice in zip(self._orders, self._choices, strict=True):
            if order.is_first:
                found.append((order.prompt, choice.num_tokens))
            else:
                prompt, num_generated = found[-1]
                found[-1] = prompt, num_generated + choice.num_tokens
        return found

    def cut_short(self) -> None:
        """End every choice because of a shutdown; ``pieces`` raises the error."""
        self._was_cut_short = True
        for handle in self._handles:
            handle.abort()

    def close(self) -> None:
        """Abort running choices. Safe to call twice."""
        for handle in self._handles:
            if not handle.done:
                handle.abort()
        # The engine's requests call this object: without its references to them they end at once,
        # with their grammars, and wait for no collector of cycles.
        self._handles.clear()
        self._on_close(self)
