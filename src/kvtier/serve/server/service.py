"""State shared by the endpoints: engine, settings, and requests in flight."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Event
from typing import NoReturn, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from kvtier import __version__
from kvtier.control.doorman import Doorman, possible_connections
from kvtier.core.config import parse_size
from kvtier.core.system.memory import trim_heap
from kvtier.core.system.user_paths import user_path
from kvtier.observe.recording import Chains, Recorder, salt_from_environment
from kvtier.observe.traces import open_traces
from kvtier.serve.engine import Engine, Grammar, RequestError, SamplingParams
from kvtier.serve.server.bodies import Bodies, Body
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.errors import (
    ApiError,
    ClientGone,
    bad_request,
    busy,
    from_validation,
    show,
    shutting_down,
)
from kvtier.serve.server.generation import ChoiceOrder, Generation
from kvtier.serve.server.grammars import compiled
from kvtier.serve.server.metrics import ServerMetrics
from kvtier.serve.server.pace import Pace
from kvtier.serve.server.refused import refuse_unsupported
from kvtier.serve.server.responses import CostAnswer
from kvtier.serve.server.scan import Bounds
from kvtier.serve.server.schemas import GenerationRequest
from kvtier.serve.server.streaming import unless_gone
from kvtier.serve.server.tracing import attributes_of_request, end_failed

B = TypeVar("B", bound=BaseModel)
R = TypeVar("R", bound=GenerationRequest)
T = TypeVar("T")

EXPLAIN_HEADER = "X-KVTier-Explain"
"""Request header that adds the source of each prompt's tokens to the usage in the answer, or in the
last chunk of a stream. It is a header because other servers refuse unknown fields of the body."""
AUDIT = "audit"
"""Value of the header that has the hit audited, too."""


def given(value: T | None, default: T) -> T:
    """Return the value of a request, else the default."""
    return default if value is None else value


def wants_explanation(request: Request) -> bool:
    """Whether the header asks for an explanation. Raises ``ApiError`` for an invalid value."""
    value = _asked(request)
    if value not in ("0", "1", AUDIT):
        raise bad_request(
            f"{EXPLAIN_HEADER} is {show(value)}; send 1 to have it, "
            f"{AUDIT} for an audit, too, or 0."
        )
    return value != "0"


def _asked(request: Request) -> str:
    return request.headers.get(EXPLAIN_HEADER, "0").strip()


def parse(content: bytes, content_type: str, schema: type[B]) -> B:
    """Parse a request. Raises ``ApiError`` that says what is wrong with it.

    content: has passed a ``Scan``, which bounds the time and memory of parsing.
    """
    if not content:
        raise bad_request("The body is empty; send a JSON object.", code="invalid_json")
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        _refuse_kind()
    value = _load(content)
    if not isinstance(value, dict):
        _refuse_kind()
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None


def _load(content: bytes) -> object:
    try:
        # UTF-8 only: in UTF-16 the scan would have seen other quotes than the parser.
        value: object = json.loads(content.decode(), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise bad_request(
            f"The body is not valid JSON at character {error.pos}: {error.msg}.",
            code="invalid_json",
        ) from None
    except UnicodeDecodeError as error:
        raise bad_request(
            f"The body can't be read as JSON: byte {error.start} is not UTF-8.",
            code="invalid_json",
        ) from None
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object with unique keys: programs disagree on which of two equal keys counts."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise bad_request(f"The key {show(twice)} is given twice in one object; give it once.")
    return made


def _refuse_kind() -> NoReturn:
    raise bad_request(
        'The body must be a JSON object, sent with the header "Content-Type: application/json".',
        code="invalid_json",
    )


class Encode(Protocol):
    """Tokenizes a prompt; see ``Service.encode``."""

    def __call__(self, text: str, *, special_tokens: bool = False) -> list[int]: ...


MAX_ESTIMATED = 64
"""Most prompts whose cost is estimated at a time: for each, the engine looks up one prompt between
two of its steps."""
MAX_TENANTS = 4096
"""Most names of tenants that are remembered, for the control."""
ESCAPED = 6
r"""Maximum bytes of a character in JSON, written as \u and four digits."""

PROBE_CHARACTERS_PER_TOKEN = 16
"""A text with more characters than this per available token: its beginning is tokenized first."""


class Service:
    """One served model. Belongs to the event loop's thread."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.model_name = config.served_model_name or engine.info.model_name
        self.created = int(time.time())
        self.metrics = ServerMetrics(
            self.model_name, lambda: engine.num_running, lambda: engine.num_waiting
        )
        self.tenants: set[str] = set()  # each cache_salt that was used
        self.is_closing = False
        self._cut_short = Event()
        self._generations: set[Generation] = set()
        self._num_estimated = 0
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.doorman = Doorman(
            possible_connections(config.max_connections, engine.max_event_descriptors),
            config.header_timeout_s,
            config.write_timeout_s,
            self.metrics.closed,
        )
        self._pace = Pace()
        limit = engine.info.max_model_tokens
        self._max_text_bytes = limit * engine.tokenizer.max_token_bytes
        self.bodies = Bodies(
            parse_size(config.max_body_bytes, "max_body_bytes"),
            config.body_timeout_s,
            Bounds(ESCAPED * self._max_text_bytes),
            self._pace,
        )
        # Long requests wait for long ones, short ones for short ones; metrics never wait.
        self._short = ThreadPoolExecutor(2, thread_name_prefix="kvtier-tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="kvtier-tokenizer-long")
        # A grammar may take half a second: others wait for it only if they have one, too.
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="kvtier-grammar")
        self._recorder = self._open_recorder()
        self._traces = open_traces(__version__) if config.traces else None

    # -- one request ------------------------------------------------------------------------------

    async def prepare(
        self, request: Request, schema: type[R], work: Callable[[R, Encode], T]
    ) -> tuple[R, T]:
        """Parse the body of ``request``, then run ``work`` on it; both off the event loop.

        work: gets the parsed request and a function that tokenizes.
        """
        body: Body = request.state.body
        content_type = request.headers.get("content-type", "")

        encode = partial(self._encode_slowly, body) if body.is_large else self.encode

        def prepared() -> tuple[R, T]:
            asked = parse(body.content, content_type, schema)
            return asked, work(asked, encode)

        async def in_thread(executor: ThreadPoolExecutor) -> tuple[R, T]:
            return await asyncio.get_running_loop().run_in_executor(executor, prepared)

        try:
            if body.is_large:
                return await unless_gone(in_thread(self._long), request.receive)
            return await in_thread(self._short)
        finally:
            body.release()

    async def grammar(self, request: Request, rules: str, param: str) -> Grammar | None:
        """Compile the grammar of an answer; None for "". Raises ``ApiError``.

        param: the field of the request that asked for it.
        """
        if not rules:
            return None

        loop = asyncio.get_running_loop()

        async def in_thread() -> Grammar:
            return await loop.run_in_executor(self._grammars, compiled, self.engine, rules, param)

        grammar = await unless_gone(in_thread(), request.receive)
        weakref.finalize(grammar, self._note_end_of_grammar, loop).atexit = False
        return grammar

    def _note_end_of_grammar(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the memory of a grammar given back. Called on any thread, within any other call."""
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._trim_heap)

    def _trim_heap(self) -> None:
        with suppress(RuntimeError):  # shut down
            self._grammars.submit(trim_heap)

    def check(self, request: GenerationRequest, num_prompts: int = 1) -> None:
        """Raise ``ApiError`` for another model, unsupported parameters and too many choices."""
        self.check_model(request.model)
        refuse_unsupported(request)
        num_choices = num_prompts * request.n
        if num_choices > self.config.max_choices:
            raise bad_request(
                f"The request asks for {num_choices} choices; ask for at most "
                f"{self.config.max_choices} at once.",
                "n" if num_prompts == 1 else "prompt",
            )

    def check_model(self, name: str) -> None:
        if name != self.model_name:
            raise ApiError(
                404,
                f"There is no model {show(name)}; this server serves {show(self.model_name)}.",
                param="model",
                code="model_not_found",
            )

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the prompt's tokens. Raises ``ApiError`` if they leave no room for an answer.

        special_tokens: whether the tokenizer adds its own, such as BOS.

        Tokenizing megabytes takes seconds. Therefore a prompt that is far too long is refused
        early: if its beginning alone is too long, the whole prompt is.
        """
        limit = self.engine.info.max_model_tokens
        num_bytes = len(text) if text.isascii() else len(text.encode())
        if num_bytes > self._max_text_bytes:
            raise self._too_long(
                f"The prompt has {num_bytes} bytes, but the {limit} tokens that prompt and answer "
                f"must fit into hold {self._max_text_bytes} at most; shorten it."
            )
        num_probed = PROBE_CHARACTERS_PER_TOKEN * limit
        encode = partial(self.engine.tokenizer.encode, special_tokens=special_tokens)
        if len(text) > num_probed and len(encode(text[:num_probed])) > limit:
            raise self._too_long(
                f"The prompt has {len(text)} characters, of which the first {num_probed} alone are "
                f"more than the {limit} tokens that prompt and answer must fit into; shorten it."
            )
        prompt = encode(text)
        self._room(prompt)
        return prompt

    def _encode_slowly(self, body: Body, text: str, *, special_tokens: bool = False) -> list[int]:
        """Like ``encode``, but at the pace of long requests."""
        while (wait_s := self._pace.wait_s) and not self._cut_short.wait(wait_s):
            pass  # other long requests have used the pace meanwhile
        self._check_not_cut_short()
        if body.is_released:
            raise ClientGone
        began = time.perf_counter()
        try:
            return self.encode(text, special_tokens=special_tokens)
        finally:
            self._pace.worked(time.perf_counter() - began)

    def _too_long(self, message: str) -> ApiError:
        note = self.engine.info.context_note
        return bad_request(message + note, code="context_length_exceeded")

    def _room(self, prompt: Sequence[int]) -> int:
        """Return the tokens available for the answer. Raises ``ApiError`` if there are none."""
        limit = self.engine.info.max_model_tokens
        if len(prompt) >= limit:
            raise self._too_long(
                f"The prompt has {len(prompt)} tokens, but prompt and answer must fit into "
                f"{limit}; shorten the prompt."
            )
        return limit - len(prompt)

    def orders(
        self,
        request: GenerationRequest,
        prompt: Sequence[int],
        *,
        max_tokens: int | None,
        default_max_tokens: int,
        num_logprobs: int | None,
        echo: str = "",
        offsets: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> list[ChoiceOrder]:
        """Return the ``n`` choices of one prompt.

        max_tokens: None for the default, limited by the available room; a value above the available
        room is an error.
        offsets: of the prompt's tokens in ``echo``, if they get log probabilities.
        """
        defaults = self.engine.sampling_defaults
        room = self._room(prompt)
        if max_tokens is not None and max_tokens > room:
            raise self._too_long(
                f"The prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together "
                f"{len(prompt) + max_tokens}, but they must fit into {len(prompt) + room}; shorten "
                "the prompt or lower max_tokens."
            )
        return [
            ChoiceOrder(
                prompt,
                SamplingParams(
                    max_tokens=min(default_max_tokens, room) if max_tokens is None else max_tokens,
                    temperature=given(request.temperature, defaults.temperature),
                    top_p=given(request.top_p, defaults.top_p),
                    top_k=given(request.top_k, defaults.top_k),
                    min_p=given(request.min_p, defaults.min_p),
                    presence_penalty=request.presence_penalty,
                    frequency_penalty=request.frequency_penalty,
                    repetition_penalty=given(
                        request.repetition_penalty, defaults.repetition_penalty
                    ),
                    logit_bias=request.logit_bias,
                    min_tokens=request.min_tokens,
                    grammar=grammar,
                    seed=None if request.seed is None else request.seed + at,
                    stop_token_ids=request.stop_token_ids,
                    ignore_eos=request.ignore_eos,
                    num_logprobs=num_logprobs,
                    prompt_logprobs=num_logprobs if offsets else None,
                ),
                echo,
                offsets,
                is_first=at == 0,
            )
            for at in range(request.n)
        ]

    def start(
        self, request: Request, asked: GenerationRequest, orders: Sequence[ChoiceOrder]
    ) -> Generation:
        """Submit the choices to the engine: all of them, or none and raise ``ApiError``."""
        self._check_not_cut_short()
        explains = wants_explanation(request)
        span = None
        if self._traces is not None:
            name = f"{request.method} {request.url.path}"
            attributes = attributes_of_request(request, asked, orders[0].params)
            span = self._traces.begin(name, request.headers, request.state.began, attributes)
        try:
            generation = Generation(
                self.engine,
                orders,
                asked.stop,
                asked.cache_salt,
                self._ended,
                explains,
                span,
                asked.hint,
                audits=_asked(request) == AUDIT,
            )
        except Exception as error:
            if span is not None:
                end_failed(span, error)
            raise
        self._generations.add(generation)
        if len(self.tenants) < MAX_TENANTS:
            self.tenants.add(asked.cache_salt)
        self.metrics.hinted(asked.kv_hints.actions)
        return generation

    async def estimate(self, asked: GenerationRequest, orders: Sequence[ChoiceOrder]) -> CostAnswer:
        """Return what prompts would cost if they were submitted now. Changes nothing."""
        self._check_not_cut_short()
        prompts = [(order.prompt, order.params) for order in orders if order.is_first]
        if len(prompts) > MAX_ESTIMATED:
            raise bad_request(f"{len(prompts)} prompts; send {MAX_ESTIMATED} at most to this path.")
        if self._num_estimated + len(prompts) > MAX_ESTIMATED:
            raise busy(f"it estimates the cost of {self._num_estimated} prompts; try again later")
        self._num_estimated += len(prompts)
        loop = asyncio.get_running_loop()
        try:
            found = await asyncio.wrap_future(self.engine.preview(prompts, salt=asked.cache_salt))
            costs = await loop.run_in_executor(
                self._short, lambda: [preview.cost() for preview in found]
            )
        except RequestError as error:
            raise bad_request(str(error)) from error
        finally:
            self._num_estimated -= len(prompts)
        return {"object": "kvtier.cost", "model": self.model_name, "costs": costs}

    def _ended(self, generation: Generation) -> None:
        if generation not in self._generations:
            return  # refused, or ended before
        self._generations.discard(generation)
        if self._recorder is not None:
            for prompt, num_generated in generation.prompts():
                self._recorder.offer(generation.began, prompt, num_generated, generation.salt)

    def _check_not_cut_short(self) -> None:
        if self._cut_short.is_set():
            raise shutting_down()

    # -- all requests -----------------------------------------------------------------------------

    def enter(self) -> None:
        """Count an HTTP request that begins."""
        self._num_in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count an HTTP request that has ended."""
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self._idle.set()

    async def finish(self, grace_s: float) -> None:
        """Refuse new requests; let those in flight continue for ``grace_s``, then end them."""
        self.is_closing = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            self.cut_short()

    def cut_short(self) -> None:
        """End every request in flight now, each with a proper end of its answer."""
        self.is_closing = True
        self._cut_short.set()
        for generation in list(self._generations):
            generation.cut_short()

    def close(self) -> None:
        """Release resources after the last request."""
        for executor in (self._short, self._long, self._grammars):
            executor.shutdown(wait=False, cancel_futures=True)
        if self._recorder is not None:
            self._recorder.close()
        if self._traces is not None:
            self._traces.close()

    def _open_recorder(self) -> Recorder | None:
        config = self.config
        if not config.record:
            return None
        chains = Chains(salt_from_environment(), self.engine.info.block_size)
        path = user_path(config.record)
        max_bytes = parse_size(config.record_max_bytes, "record_max_bytes")
        return Recorder(path, chains, max_bytes, self.metrics.recorded)
