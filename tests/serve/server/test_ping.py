"""``kvtier ping`` and ``kvtier describe`` against a real server."""

from __future__ import annotations

import json

import pytest

from kvtier.serve.engine import Engine
from kvtier.serve.server.config import ServerConfig
from tests.kit.cli import kvtier

from .conftest import MODEL, Running, running

pytestmark = pytest.mark.engine


def test_ping_says_how_long_the_answer_took(served: Running) -> None:
    told = kvtier("ping", served.url)
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith(f"{served.url} answers in ")
    found = json.loads(kvtier("ping", f"{served.url}/v1", "--json").stdout)
    assert found["url"] == served.url
    assert 0 < found["seconds"] < 60


def test_describe_says_what_is_served(served: Running) -> None:
    told = kvtier("describe", served.url, "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert [each["name"] for each in found["models"]] == [MODEL]
    assert (found["engine"], found["note"]) == ("kvtier", "")
    assert {"device", "host"} <= {each["name"] for each in found["tiers"]}
    assert found["requests"] == {"running": 0.0, "waiting": 0.0}
    lines = kvtier("describe", served.url).stdout.splitlines()
    assert lines[0].startswith(f"{served.url}: kvtier")
    assert any(line.startswith(f"model: {MODEL}") for line in lines)


def test_describe_without_the_key_is_refused_in_one_sentence(engine: Engine) -> None:
    with running(engine, ServerConfig(api_key="k")) as made:
        refused = kvtier("describe", made.url)
        assert refused.exit_code == 2
        assert refused.stderr == f"kvtier describe: {made.url}/v1/models answers 401\n"
        assert kvtier("describe", made.url, "--api-key", "k").exit_code == 0
        assert kvtier("ping", made.url).exit_code == 0, "health asks for no key"
