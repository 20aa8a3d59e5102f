"""Random requests cause no server error and no hang, and honest clients are still served.

Every refusal is one sentence. A short part runs with the other tests. KVTIER_NUM_MUTATIONS is the
number of requests (300), KVTIER_FUZZ_SEED their seed; the seed is printed, and a failing request
with it.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from kvtier.serve.engine import Engine, EngineConfig
from kvtier.serve.server.config import ServerConfig
from tests.fuzz.mutations import damage, mutate

from .conftest import MODEL, Running, running
from .raw import RawAnswer, connect, head, read, request

pytestmark = pytest.mark.engine

NUM_MUTATIONS = int(os.environ.get("KVTIER_NUM_MUTATIONS", "300"))
SEED = int(os.environ.get("KVTIER_FUZZ_SEED", str(time.time_ns() % 2**32)))
TOGETHER = 25
"""Number of requests sent at a time. The honest request follows each group."""

COMPLETION: dict[str, object] = {
    "model": MODEL,
    "prompt": "import",
    "max_tokens": 2,
    "temperature": 0,
    "logprobs": 2,
    "stop": ["zzz"],
    "n": 1,
    "top_p": 0.9,
    "top_k": 3,
    "seed": 1,
    "stream": False,
    "echo": False,
    "user": "u",
    "cache_salt": "",
    "logit_bias": {},
    "metadata": {"a": "b"},
}
CHAT: dict[str, object] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "n"},
    ],
    "max_completion_tokens": 2,
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [],
    "response_format": {"type": "text"},
}
HONEST = {"model": MODEL, "prompt": "def main", "max_tokens": 8, "temperature": 0, "logprobs": 3}
ROUTES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
ROUTES |= {f"{path}/cost": body for path, body in ROUTES.items()}
OTHERS = ("/v1/models", "/v1/models/x", "/health", "/metrics", "/openapi.json", "/", "/%00", "/é")
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW")


def a_body(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice(list(ROUTES))
    asked: object = ROUTES[rng.choice((path, path, path, rng.choice(list(ROUTES))))]
    for _ in range(rng.choice((1, 1, 2, 4))):
        asked = mutate(asked, rng)
    body = json.dumps(asked, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    return path, damage(body, rng) if rng.random() < 0.25 else body


def json_body(rng: random.Random) -> bytes:
    """Return a request with a valid header and a random body."""
    return request(*a_body(rng))


def raw_request(rng: random.Random) -> bytes:
    """Return a request that is damaged anywhere."""
    return damage(request(*a_body(rng)), rng)


def chunked(rng: random.Random) -> bytes:
    path, body = a_body(rng)
    size = rng.choice((1, 7, 1000))
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    sent = head(path, "Transfer-Encoding: chunked") + chunks
    return damage(sent, rng) if rng.random() < 0.3 else sent


def other_route(rng: random.Random) -> bytes:
    method, path = rng.choice(METHODS), rng.choice((*OTHERS, *ROUTES))
    body = rng.randbytes(rng.choice((0, 10, 3000)))
    return head(path, f"Content-Length: {len(body)}", method=method) + body


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 40, 3000)))


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    *(json_body, json_body, json_body, json_body),
    *(raw_request, chunked, other_route, noise),
)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Running]:
    """Run a server with a short context, so that accepted requests take little time.

    It has short time-outs for clients that send less than they announced.
    """
    config = EngineConfig(model=MODEL, device_capacity="8MiB", threads=1, max_model_tokens=100)
    timeouts = ServerConfig(header_timeout_s=1, body_timeout_s=1)
    with Engine(config) as engine, running(engine, timeouts) as made:
        yield made


def ask(served: Running, sent: bytes) -> RawAnswer | None:
    """Return the answer; None if the server closed. A hang raises TimeoutError."""
    with connect(served) as connection:
        connection.settimeout(30)
        with suppress(OSError):  # refused before all was sent
            connection.sendall(sent)
        return read(connection)


def check(answer: RawAnswer | None, sent: bytes) -> None:
    """Check the rules for every answer."""
    if answer is None:
        return
    assert answer.status < 500, answer
    if answer.status >= 400 and not sent.startswith(b"HEAD "):
        assert answer.message
    for line in answer.body.split(b"\n\n"):
        if line.startswith(b"data: {"):  # an error within a stream is too late for the status
            event = json.loads(line.removeprefix(b"data: "))
            assert event.get("error", {}).get("type") != "server_error", event


@pytest.mark.slow
@pytest.mark.nightly
def test_no_request_breaks_the_server(fuzzed: Running) -> None:
    print(f"KVTIER_FUZZ_SEED={SEED} KVTIER_NUM_MUTATIONS={NUM_MUTATIONS}")
    rng = random.Random(SEED)
    honest = request("/v1/completions", json.dumps(HONEST).encode())
    first = honest_choice(ask(fuzzed, honest))

    def attempt(sent: bytes) -> None:
        try:
            check(ask(fuzzed, sent), sent)
        except BaseException:
            print(f"the request was {sent!r}")
            raise

    with ThreadPoolExecutor(TOGETHER) as threads:
        for begin in range(0, NUM_MUTATIONS, TOGETHER):
            number = min(TOGETHER, NUM_MUTATIONS - begin)
            attempts = [threads.submit(attempt, rng.choice(KINDS)(rng)) for _ in range(number)]
            health = ask(fuzzed, head("/health", method="GET"))
            assert health is not None
            assert health.status == 200
            for each in attempts:
                each.result()
            assert honest_choice(ask(fuzzed, honest)) == first
    assert fuzzed.engine.drain()
    assert fuzzed.engine.num_running == fuzzed.engine.num_waiting == 0


def honest_choice(answer: RawAnswer | None) -> object:
    """Return the text, the tokens and their log probabilities."""
    assert answer is not None
    assert answer.status == 200, answer
    return json.loads(answer.body)["choices"]
