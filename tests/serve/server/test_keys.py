"""API keys: several can be valid, and none is ever shown."""

from __future__ import annotations

import hmac
import json
import signal
from pathlib import Path

import httpx
import pytest

from kvtier.core.errors import ConfigError
from kvtier.node.client.control import ServerControlClient
from kvtier.serve.engine import Engine
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.gate import ApiKeys

from .conftest import running
from .program import program

pytestmark = pytest.mark.engine

FIRST, SECOND = "frobozz-first", "frobozz-second"


def status(url: str, path: str, key: str | None = None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{url}{path}", headers=headers, timeout=60).status_code


def test_each_of_several_keys_will_do(engine: Engine) -> None:
    with running(engine, ServerConfig(api_key=(FIRST, SECOND))) as made:
        assert [status(made.url, "/v1/models", key) for key in (FIRST, SECOND)] == [200, 200]
        for wrong in (None, f"{FIRST} {SECOND}", FIRST + SECOND, FIRST[:-1], FIRST.upper()):
            assert status(made.url, "/v1/models", wrong) == 401


@pytest.mark.parametrize("is_open", [False, True])
def test_metrics_are_behind_the_key_unless_told_otherwise(engine: Engine, is_open: bool) -> None:
    with running(engine, ServerConfig(api_key=FIRST, metrics_open=is_open)) as made:
        assert status(made.url, "/metrics") == (200 if is_open else 401)
        assert status(made.url, "/metrics", FIRST) == 200
        assert status(made.url, "/health") == 200
        for path in ("/v1/models", "/openapi.json", "/metrics/", "/nothing"):
            assert status(made.url, path) == 401


def test_every_key_is_compared_in_full_whatever_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    really = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return really(a, b)

    keys = ApiKeys(("short", "x" * 200, "another"))
    monkeypatch.setattr("kvtier.serve.server.gate.hmac.compare_digest", compare)
    found = [keys.has(sent) for sent in (b"short", b"another", b"", b"y" * 10_000)]
    assert found == [True, True, False, False]
    assert compared == [(32, 32)] * 12


def test_no_key_is_kept_or_shown() -> None:
    config = ServerConfig(api_key=(FIRST, SECOND))
    assert "frobozz" not in repr(config)
    keys = ApiKeys(config.api_keys)
    assert b"frobozz" not in repr(vars(keys)).encode()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((), "there is no key"),
        (("good", ""), "the key is empty"),
        (("good", "bad key"), "characters that no header can send"),
        ("schlüssel", "characters that no header can send"),
        ("a\tb", "characters that no header can send"),
    ],
)
def test_keys_that_cant_be_sent_are_refused_and_not_told(
    given: tuple[str, ...] | str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        ServerConfig(api_key=given)
    assert "good" not in str(caught.value)
    assert "bad" not in str(caught.value)
    assert "schl" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [(" ", "control_key: the key is empty"), ("good\n", "control_key: a key has characters")],
)
def test_the_message_names_the_setting_of_the_key(given: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        ServerConfig(api_key=FIRST, control_key=given)
    assert "good" not in str(caught.value)


def test_a_control_key_that_no_header_can_send_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="control_key: a key has characters") as caught:
        ServerControlClient("http://127.0.0.1:1", "good\n", 1.0)
    assert "good" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("how", ["options", "environment"])
def test_the_program_shows_its_keys_nowhere(how: str) -> None:
    options = [
        *("--encryption-key", f"command:echo {FIRST.encode().hex():0<64}"),
        *("--log-level", "debug", "--api-key", FIRST, f"--api-key={SECOND}"),
    ]
    variables = {} if how == "options" else {"KVTIER_API_KEY": f"{FIRST} {SECOND}"}
    with program(*options[: 7 if how == "options" else 4], **variables) as (process, url):
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"serve" in line
        assert b"frobozz" not in line
        assert FIRST.encode().hex().encode() not in line
        assert (b"*" * len(FIRST) in line.split(b"\0")) == (how == "options")
        metrics = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {SECOND}"})
        assert metrics.status_code == 200
        body = json.dumps({"model": "kvtier-tiny", "prompt": "x", "max_tokens": 1}).encode()
        answers = [
            httpx.post(
                f"{url}/v1/completions",
                content=body,
                headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
                timeout=60,
            )
            for key in (FIRST, "frobozz-wrong")
        ]
        assert [answer.status_code for answer in answers] == [200, 401]
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=60)
    assert "shutting down" in errors
    for text in (out, errors, metrics.text, *(answer.text for answer in answers)):
        assert "frobozz" not in text
        assert FIRST.encode().hex() not in text
