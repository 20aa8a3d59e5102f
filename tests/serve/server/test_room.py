"""Limits: too many connections, too many long requests, and clients that send nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Thread

import httpx
import pytest

from kvtier.observe.live.files import LIVE_PATH
from kvtier.serve.engine import Engine
from kvtier.serve.server import bodies
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.metrics import CacheMetrics
from tests.kit.waiting import wait_until

from .conftest import MODEL, Running, busy, running
from .raw import (
    ASKED,
    COMPLETIONS,
    RawAnswer,
    answered,
    connect,
    exchange,
    head,
    is_closed,
    metrics_of,
    read,
    request,
)

pytestmark = pytest.mark.engine

PATIENT = ServerConfig(body_timeout_s=3600)
"""Settings for tests that hold a long request: no other one times out meanwhile."""


class Held:
    """Control of held tokenization. is_in: a request waits. may_go_on: set by the test."""

    def __init__(self) -> None:
        self.num_tokenized = 0
        self.is_in, self.may_go_on = Event(), Event()


@contextmanager
def held(tokenizer: object, monkeypatch: pytest.MonkeyPatch, is_long: bool) -> Iterator[Held]:
    """Hold the tokenization of long texts, or of short ones."""
    made = Held()
    encode: Callable[..., list[int]] = tokenizer.encode  # type: ignore[attr-defined]

    def slowly(text: str, **options: bool) -> list[int]:
        if (len(text) > 10_000) == is_long:
            made.num_tokenized += 1
            made.is_in.set()
            assert made.may_go_on.wait(60)
        return encode(text, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode", slowly)
        try:
            yield made
        finally:
            made.may_go_on.set()


@contextmanager
def asking(served: Running, sent: bytes, number: int) -> Iterator[list[RawAnswer | None]]:
    """Send a request from ``number`` clients. All answers have arrived when the block ends."""
    answers: list[RawAnswer | None] = []
    threads = [Thread(target=lambda: answers.append(exchange(served, sent))) for _ in range(number)]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join(60)


LONG_TEXT = json.dumps(
    {"model": MODEL, "prompt": "word " * 6000 + "\u00e9" * 12_000, "max_tokens": 8000}
).encode()


def test_idle_connections_keep_nobody_out(engine: Engine) -> None:
    with running(engine, ServerConfig(max_connections=4)) as made, ExitStack() as stack:
        idle = [stack.enter_context(connect(made)) for _ in range(200)]
        assert answered(made, request(COMPLETIONS, ASKED)).status == 200
        assert httpx.get(f"{made.url}/health").status_code == 200
        assert 'closed_connections_total{reason="room"}' in metrics_of(made)
        assert is_closed(idle[0])


def test_when_all_connections_ask_the_next_is_refused_and_health_is_not(engine: Engine) -> None:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 1500, "ignore_eos": True}
    key = "Authorization: Bearer k"
    with (
        running(engine, ServerConfig(max_connections=4, api_key="k")) as made,
        ExitStack() as stack,
    ):
        for _ in range(4):
            client = stack.enter_context(connect(made))
            client.sendall(request(COMPLETIONS, json.dumps(asked).encode(), key))
        wait_until(lambda: engine.num_running == 4, "all have asked")
        for _ in range(10):
            refused = answered(made, request(COMPLETIONS, ASKED))  # before any key check
            assert refused.status == 503
            assert "too many connections; try again later" in refused.message
            assert refused.headers["retry-after"] == "1"
            assert answered(made, head("/health", method="GET")).status == 200
            metrics = answered(made, head("/metrics", key, method="GET"))
            assert metrics.status == 200
            live = answered(made, head(LIVE_PATH, key, method="GET"))
            assert live.status == 200
            assert json.loads(live.body)["requests"]["running"] == 4
            assert answered(made, head("/", method="GET")).status == 200
        assert b"kvtier_slots" in metrics.body
        assert engine.num_running == 4
    wait_until(lambda: engine.num_running == 0, "they are gone")


@pytest.mark.slow
def test_short_requests_and_metrics_pass_long_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(engine, PATIENT) as made:
        with (
            held(engine.tokenizer, monkeypatch, is_long=True) as gate,
            asking(made, request(COMPLETIONS, LONG_TEXT), 6) as answers,
        ):
            assert gate.is_in.wait(30)
            for _ in range(10):
                assert answered(made, request(COMPLETIONS, ASKED)).status == 200
                assert "kvtier_slots" in metrics_of(made)
            gate.may_go_on.set()
        assert [answer and answer.status for answer in answers] == [400] * 6
        assert all(answer and "must fit into" in answer.message for answer in answers)


def test_a_long_request_is_dropped_when_its_client_leaves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(engine) as made, held(engine.tokenizer, monkeypatch, is_long=True) as gate:
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(connect(made)).sendall(request(COMPLETIONS, LONG_TEXT))
            assert gate.is_in.wait(30)
        left = 'requests_total{endpoint="completions",status="499"} 3.0'
        wait_until(lambda: left in metrics_of(made), "all are counted as left")
        gate.may_go_on.set()
        assert b"must fit into" in answered(made, request(COMPLETIONS, LONG_TEXT)).body
    assert gate.num_tokenized == 2


def test_too_many_long_requests_are_refused_and_not_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_WAITING", 1)
    with running(engine, PATIENT) as made:
        with (
            held(engine.tokenizer, monkeypatch, is_long=True) as gate,
            asking(made, request(COMPLETIONS, LONG_TEXT), bodies.NUM_LARGE + 4) as answers,
        ):
            assert gate.is_in.wait(30)
            wait_until(lambda: len(answers) == 3, "three are refused")
            assert [answer and answer.status for answer in answers] == [503] * 3
            assert answers[0] is not None
            assert "Too many long requests" in answers[0].message
            gate.may_go_on.set()
        assert sorted(answer.status for answer in answers if answer) == [400] * 5 + [503] * 3


def test_tokenizing_does_not_hold_up_others(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, sent = served.engine.tokenizer, request(COMPLETIONS, ASKED)
    with held(tokenizer, monkeypatch, is_long=False) as gate, asking(served, sent, 1) as answers:
        assert gate.is_in.wait(30)
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert not answers
        gate.may_go_on.set()
    assert [answer and answer.status for answer in answers] == [200]


def test_metrics_do_not_wait_for_a_busy_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(engine) as made:
        before = metrics_of(made)
        monkeypatch.setattr(CacheMetrics, "PATIENCE_S", 0.05)
        with busy(engine):
            meanwhile = metrics_of(made)
            assert httpx.get(f"{made.url}/health").status_code == 200
    assert "kvtier_server_requests_total" in meanwhile
    slots, then = (
        [line for line in text.splitlines() if line.startswith("kvtier_slots")]
        for text in (before, meanwhile)
    )
    assert slots
    assert then == slots


def test_metrics_are_read_by_many_at_once(engine: Engine) -> None:
    """A reading that ends while another one begins is still the answer to those that waited."""

    async def read() -> list[int]:
        numbers = iter(range(1000))
        metrics = CacheMetrics(engine, lambda registry: next(numbers), -1)

        async def often() -> list[int]:
            return [await metrics.read() for _ in range(30)]

        return [
            number for some in await asyncio.gather(*(often() for _ in range(8))) for number in some
        ]

    with running(engine):
        found = asyncio.run(read())
    assert min(found) >= 0
    assert len(found) == 240


def test_a_wrong_key_is_told_before_the_body_is_there(engine: Engine) -> None:
    with running(engine, ServerConfig(api_key="k")) as made, connect(made) as connection:
        connection.sendall(head(COMPLETIONS, f"Content-Length: {10**15}") + b"x" * 100_000)
        answer = read(connection)
        assert answer is not None
        assert answer.status == 401
        assert answer.headers["connection"] == "close"
        assert is_closed(connection)


def test_a_wrong_key_with_a_short_body_keeps_the_connection(engine: Engine) -> None:
    with running(engine, ServerConfig(api_key="k")) as made, connect(made) as connection:
        for key, status in (("wrong", 401), ("k", 200)):
            connection.sendall(request(COMPLETIONS, ASKED, f"Authorization: Bearer {key}"))
            answer = read(connection)
            assert answer is not None
            assert answer.status == status
