"""What the endpoints share: the engine, the settings, and the requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtier.engine import Engine, SamplingParams
from kvtier.server.config import ServerConfig
from kvtier.server.errors import ApiError, bad_request, show, shutting_down
from kvtier.server.generation import Generation, Order
from kvtier.server.metrics import ServerMetrics
from kvtier.server.refused import refuse_unsupported
from kvtier.server.schemas import GenerationRequest

T = TypeVar("T")

PROBE_CHARACTERS_PER_TOKEN = 16
"""A text longer than this, for each token there is room for, is tried before it is tokenized."""

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow."""


class Service:
    """One served model. Belongs to the event loop's thread."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.model_name = config.served_model_name or engine.info.model_name
        self.created = int(time.time())
        self.metrics = ServerMetrics(lambda: engine.num_running, lambda: engine.num_waiting)
        self.is_closing = False
        self._is_cut_short = False
        self._generations: set[Generation] = set()
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="kvtier-tokenizer")

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run what takes long, tokenizing for instance, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    # -- one request ------------------------------------------------------------------------------

    def check(self, request: GenerationRequest, num_prompts: int = 1) -> None:
        """Raise ``ApiError`` for another model, parameters we don't have, and too many choices."""
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

    def refuse_endless(self, text: str) -> None:
        """Raise ``ApiError`` for a text that is far too long, before all of it is tokenized.

        Megabytes take seconds; where the beginning alone is too long, the whole is, too.
        """
        limit = self.engine.info.max_model_tokens
        num_probed = PROBE_CHARACTERS_PER_TOKEN * limit
        if len(text) > num_probed and len(self.engine.tokenizer.encode(text[:num_probed])) > limit:
            raise _too_long(
                f"The prompt has {len(text)} characters, of which the first {num_probed} alone are "
                f"more than the {limit} tokens that prompt and answer must fit into; shorten it."
            )

    def orders(
        self,
        request: GenerationRequest,
        prompt: Sequence[int],
        *,
        max_tokens: int | None,
        default_max_tokens: int,
        num_logprobs: int,
        echo: str = "",
    ) -> list[Order]:
        """The ``n`` choices of one prompt. max_tokens: None takes the default, or what there is
        room for; more than there is room for is an error."""
        limit = self.engine.info.max_model_tokens
        room = limit - len(prompt)
        if room < 1:
            raise _too_long(
                f"The prompt has {len(prompt)} tokens, but prompt and answer must fit into "
                f"{limit}; shorten the prompt."
            )
        if max_tokens is not None and max_tokens > room:
            raise _too_long(
                f"The prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together "
                f"{len(prompt) + max_tokens}, but they must fit into {limit}; shorten the prompt "
                "or lower max_tokens."
            )
        temperature = 0.0 if request.temperature < GREEDY_BELOW else request.temperature
        return [
            Order(
                prompt,
                SamplingParams(
                    max_tokens=max_tokens or min(default_max_tokens, room),
                    temperature=temperature,
                    top_p=request.top_p,
                    top_k=request.top_k,
                    seed=None if request.seed is None else request.seed + at,
                    ignore_eos=request.ignore_eos,
                    num_logprobs=num_logprobs,
                ),
                echo,
                is_first=at == 0,
            )
            for at in range(request.n)
        ]

    def start(self, request: GenerationRequest, orders: Sequence[Order]) -> Generation:
        """Hand the choices to the engine: all of them, or none and an ``ApiError``."""
        if self._is_cut_short:
            raise shutting_down()
        generation = Generation(
            self.engine, orders, request.stop, request.cache_salt, self._generations.discard
        )
        self._generations.add(generation)
        return generation

    # -- all requests -----------------------------------------------------------------------------

    def enter(self) -> None:
        """An HTTP request begins."""
        self._num_in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """An HTTP request ended."""
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self._idle.set()

    async def finish(self, grace_s: float) -> None:
        """Take no new requests; let those in flight go on for ``grace_s``, then cut them short."""
        self.is_closing = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            self.cut_short()

    def cut_short(self) -> None:
        """End every request in flight now, each with a proper end of its answer."""
        self.is_closing = self._is_cut_short = True
        for generation in list(self._generations):
            generation.cut_short()

    def close(self) -> None:
        """The last request is gone."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _too_long(message: str) -> ApiError:
    return bad_request(message, code="context_length_exceeded")
