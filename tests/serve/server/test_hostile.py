"""Hostile requests cost the server little, and do not affect honest clients."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from kvtier.serve.engine import Engine
from kvtier.serve.server import bodies
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.errors import show
from tests.kit.waiting import wait_until

from .conftest import MODEL, Running, running
from .raw import ASKED, COMPLETIONS, answered, connect, head, is_closed, metrics_of, request
from .test_load import Wordy

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
MIB = 1 << 20


def sent_body(body: tuple[str, str, str] | dict[str, object] | bytes) -> bytes:
    """Return a body: 8 MiB of a head, a repeated middle and a tail; a request; or as it is."""
    if isinstance(body, tuple):
        head, middle, tail = body
        return (head + middle * ((8 * MIB - len(head) - len(tail)) // len(middle)) + tail).encode()
    return json.dumps({"model": MODEL, **body}).encode() if isinstance(body, dict) else body


BEGIN = f'{{"model":"{MODEL}",'


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        (CHAT, (BEGIN + '"messages":[', "{},", "{}]}"), "more than 16384 lists and objects"),
        (COMPLETIONS, (BEGIN + '"prompt":[', "[1],", "[1]]}"), "more than 16384 lists and objects"),
        (COMPLETIONS, (BEGIN + '"prompt":[', "1,", "1]}"), "more than 262144 values"),
        (COMPLETIONS, (BEGIN + '"logit_bias":{', '"1":1,', '"2":1}}'), "more than 262144 values"),
        (COMPLETIONS, (BEGIN + '"stop":[', '"a",', '"a"]}'), "more than 262144 values"),
        (COMPLETIONS, (BEGIN + '"prompt":"x","seed":', "7", "}"), "number of more than 64"),
        (COMPLETIONS, (BEGIN + '"prompt":"x","top_p":0.', "7", "}"), "number of more than 64"),
        (COMPLETIONS, (BEGIN + '"prompt":', "[", ""), "more than 128 levels"),
        (COMPLETIONS, (BEGIN + '"prompt":', '{"a":', ""), "more than 128 levels"),
        (COMPLETIONS, (BEGIN + '"prompt":"', " ", '"}'), "a text of more than"),
        (COMPLETIONS, (BEGIN + '"prompt":"x","', "k", '":1}'), "a text of more than"),
        (COMPLETIONS, (BEGIN + '"prompt":"', "\\", '"}'), "a text of more than"),
        (COMPLETIONS, ("", " ", "x"), "not valid JSON"),
        # Requests that pass the scan of their body.
        (CHAT, {"messages": [{}] * 5000}, "messages[0].role is missing"),
        (COMPLETIONS, {"prompt": [[1]] * 5000}, "asks for 5000 choices; ask for at most 64"),
        (COMPLETIONS, {"prompt": ["x"] * 5000}, "asks for 5000 choices; ask for at most 64"),
        (COMPLETIONS, {"prompt": "x", "k" * 200_000: 1}, "is no parameter of this request"),
        (COMPLETIONS, {"prompt": "x", "suffix": "s" * 200_000}, "is not supported"),
        (COMPLETIONS, {"prompt": "x", "stop": ["s"] * 100_000}, "give at most 64"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(50_000)), 1)}, ""),
        (COMPLETIONS, {"prompt": "x", "n": int("9" * 60)}, "n is 9999"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": int("9" * 60)}, "lower max_tokens"),
        (COMPLETIONS, {"prompt": [int("9" * 60)]}, "token ids outside"),
        (COMPLETIONS, {"prompt": "x", "cache_salt": "s" * 2000}, "but must have at most 1024"),
        (CHAT, {"messages": [{"role": "user", "content": " " * 400_000}]}, "has 4000"),
        # Bodies that programs read differently.
        (
            COMPLETIONS,
            b'{"model":"kvtier-tiny","prompt":"x","prompt":"y"}',
            'The key "prompt" is given twice',
        ),
        (
            COMPLETIONS,
            b'{"model":"kvtier-tiny","prompt":"x","metadata":{"a":1,"a":1}}',
            'The key "a" is given',
        ),
        (COMPLETIONS, ASKED.decode().encode("utf-16"), "is not UTF-8"),
        (COMPLETIONS, ASKED.decode().encode("utf-16-le"), "not valid JSON"),
        (COMPLETIONS, b"\xef\xbb\xbf" + ASKED, "not valid JSON"),
        (COMPLETIONS, b'{"model":"kvtier-tiny","prompt":"x","top_p":1e999}', "top_p is Infinity"),
        (
            COMPLETIONS,
            b'{"model":"kvtier-tiny","prompt":"x","max_tokens":1e3}',
            "max_tokens is 1000.0",
        ),
    ],
)
def test_a_hostile_body_is_refused_with_a_sentence(
    served: Running,
    path: str,
    body: tuple[str, str, str] | dict[str, object] | bytes,
    sentence: str,
) -> None:
    answer = answered(served, request(path, sent_body(body)))
    assert answer.status == 400
    assert sentence in answer.message


@pytest.mark.parametrize(
    "change",
    [
        {"top_p": 1e-46},
        {"top_p": 5e-324},
        {"temperature": 1e-40, "top_p": 1e-46},
        {"temperature": 2, "top_p": 1e-46, "top_k": 10**60},
        {"seed": 2**63 - 1, "n": 16, "temperature": 2},
        {"seed": -(2**63), "temperature": 1.1e-5},
        {"logprobs": 20, "max_tokens": 1, "n": 16},
    ],
)
def test_extreme_values_of_numbers_are_served(served: Running, change: dict[str, object]) -> None:
    answer = httpx.post(
        f"{served.url}{COMPLETIONS}", json={**json.loads(ASKED), **change}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    if "n" not in change:
        plain = answered(served, request(COMPLETIONS, ASKED))
        is_greedy = change.get("temperature", 0) != 1.1e-5
        if is_greedy and change.get("temperature") != 2:
            assert answer.json()["choices"][0] == json.loads(plain.body)["choices"][0]


def test_a_shown_value_is_looked_at_no_further_than_it_is_shown() -> None:
    class Endless(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(100)
            raise AssertionError("read on")

    assert show(Endless([1])) == "[" + ", ".join(map(str, range(18)))[:56] + "..."
    assert len(show("x" * MIB)) == 60


# -- invalid HTTP ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS client", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400),
        (head("/health", "X: " + "y" * 20_000), 431),
        (head(COMPLETIONS, "Content-Length: -1"), 400),
        (head(COMPLETIONS, "Content-Length: " + "9" * 5000), 400),
        (head(COMPLETIONS, "Content-Length: 1", "Content-Length: 2"), 400),
        (head(COMPLETIONS, "Transfer-Encoding: gzip"), 400),
        (head(COMPLETIONS, "Transfer-Encoding: chunked") + b"zz\r\n", 400),
        (head(COMPLETIONS, "Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 5000, 400),
    ],
)
def test_what_is_no_http_gets_an_error_in_the_apis_shape(
    served: Running, sent: bytes, status: int
) -> None:
    answer = answered(served, sent)
    assert answer.status == status
    assert answer.message
    assert answer.headers["connection"] == "close"


def test_a_body_in_ordinary_chunks_is_read(served: Running) -> None:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (ASKED[:9], ASKED[9:]))
    sent = head(COMPLETIONS, "Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n"
    assert answered(served, sent).status == 200


# -- time-outs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hasty(engine: Engine) -> Iterator[Running]:
    config = ServerConfig(header_timeout_s=0.2, body_timeout_s=0.2, write_timeout_s=0.2)
    with running(engine, config) as made:
        yield made


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", head("/health", method="GET")[:-2]])
def test_without_a_header_in_time_the_connection_is_closed(hasty: Running, sent: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(sent)
        assert is_closed(connection)
    assert 'closed_connections_total{reason="header_timeout"}' in metrics_of(hasty)


@pytest.mark.parametrize("length", [len(ASKED), 4 * MIB])
def test_without_its_body_in_time_a_request_is_told_so(hasty: Running, length: int) -> None:
    # A large one has started: it takes a turn of the long requests, and must release it.
    sent = ASKED[:20] if length < MIB else b'{"prompt":"' + b"x" * 100_000
    for _ in range(bodies.NUM_LARGE + 1):
        answer = answered(hasty, head(COMPLETIONS, f"Content-Length: {length}") + sent)
        assert answer.status == 408
        assert "did not arrive within 0.2 s" in answer.message
        assert answer.headers["connection"] == "close"


def test_who_leaves_an_answer_unread_is_closed(engine: Engine) -> None:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with (
        running(Wordy(engine), ServerConfig(write_timeout_s=0.2)) as made,
        connect(made) as connection,
    ):
        connection.sendall(request(COMPLETIONS, json.dumps(asked).encode()))
        wait_until(
            lambda: 'closed_connections_total{reason="write_timeout"} 1.0' in metrics_of(made),
            "the connection is closed",
        )
        wait_until(lambda: engine.num_running == engine.num_waiting == 0, "its request ends")
