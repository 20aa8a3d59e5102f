"""Dynamo's indexer reads the events of kvtier's servers, and knows where each prompt's KV is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.core.config import CacheConfig
from kvtier.core.keys import grid_labels
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.index import State
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams
from tests.kit.dynamo import DynamoIndexer, needs_routers
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.engine, needs_routers]

TIERS = {DEVICE: "gpu", HOST: "cpu", DISK: "disk"}
SALTS = ("", "tenant", "other")


def engine(folder: Path) -> Engine:
    """Return an engine whose tiers all have to evict."""
    cache = CacheConfig(
        host_capacity="24MiB", disk_path=str(folder), disk_capacity="32MiB", strict=True
    )
    return Engine(
        EngineConfig(
            model="kvtier-tiny",
            device_capacity="16MiB",
            threads=1,
            cache=cache,
            events="tcp://127.0.0.1:*",
            events_replay="tcp://127.0.0.1:*",
        )
    )


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(engine(tmp_path / str(at))) for at in range(2)]


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    with DynamoIndexer(tmp_path) as made:
        yield made


def held(engine: Engine, prompt: list[int], salt: str) -> dict[str, int]:
    """Return how many tokens of a prompt lie in the device, in it or the host, in any of all tiers.

    Whole chunks count, since these are what can be reused. A tier that adds nothing to an empty
    beginning is left out.
    """
    info, found, num = engine.info, {}, 0
    labels = grid_labels(prompt, info.block_size, info.chunk_tokens)
    for tier, name in TIERS.items():
        states = engine.cache._index.states(engine.namespace_of(salt), labels, tier)
        size = info.chunk_tokens // info.block_size
        while states[num : num + size].count(State.READY) == size:
            num += size
        if num:
            found[name] = num * info.block_size
    return found


def test_it_finds_engine_tier_and_length_of_random_prompts_with_salts(
    engines: list[Engine], indexer: DynamoIndexer
) -> None:
    size = engines[0].info.block_size  # half a chunk: prompts part in the middle of one, too
    for at, made in enumerate(engines):
        assert made._publisher is not None
        indexer.register(at, made._publisher.endpoints, engines[0].info.chunk_tokens)
    chosen = random.Random(1)
    beginnings = [[chosen.randrange(250) for _ in range(6 * size)] for _ in range(8)]
    asked = []
    for _ in range(200):
        begins = chosen.choice(beginnings)[: chosen.randrange(1, 7) * size]
        prompt = begins + [chosen.randrange(250) for _ in range(chosen.randrange(3 * size))]
        asked.append((chosen.choice(engines), prompt, chosen.choice(SALTS)))
    for made, prompt, salt in asked:
        made.submit(prompt, SamplingParams(max_tokens=1), salt=salt).result(60)
    assert all(made.drain() for made in engines)

    def differences() -> list[tuple[int, str, dict[str, int], dict[str, int]]]:
        found = []
        for _, prompt, salt in asked:
            answer = indexer.found(prompt, salt)
            for at, made in enumerate(engines):
                known, there = answer.get(at, {}), held(made, prompt, salt)
                if known != there:
                    found.append((at, salt, known, there))
        return found

    wait_until(lambda: not differences(), "the indexer knows what is there")
    there = [held(made, prompt, salt) for made, prompt, salt in asked]
    for name in TIERS.values():
        assert any(known.get(name) for known in there)
        assert any(not known.get(name) for known in there), f"{name} evicts"
