"""llm-d's precise prefix cache finds each prompt's server, tier and length by kvtier's events."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from kvtier.core.config import CacheConfig
from kvtier.core.keys import grid_labels
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.index import State
from kvtier.observe.publisher import END
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams
from tests.kit.llmd import DEFAULT_WEIGHTS, LlmdIndex
from tests.kit.waiting import wait_until

from .conftest import MODEL

pytestmark = pytest.mark.engine

PODS = ("10.0.0.1:8000", "10.0.0.2:8000")
SALTS = ("", "tenant", "other")
WEIGHTS = {**DEFAULT_WEIGHTS, "storage": 0.4}
WEIGHT_OF = {DEVICE: 1.0, HOST: 0.8, DISK: 0.4}


def engine(pod: str, folder: Path) -> Engine:
    """Return an engine whose tiers all have to evict."""
    cache = CacheConfig(
        host_capacity="24MiB", disk_path=str(folder), disk_capacity="32MiB", strict=True
    )
    config = EngineConfig(
        MODEL,
        device_capacity="16MiB",
        threads=1,
        cache=cache,
        events="tcp://127.0.0.1:*",
        events_replay="tcp://127.0.0.1:*",
        events_topic=f"kv@{pod}@{MODEL}",
    )
    return Engine(config)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        yield {
            pod: stack.enter_context(engine(pod, tmp_path_factory.mktemp("disk"))) for pod in PODS
        }


Asked = list[tuple[list[int], str]]


@pytest.fixture(scope="module")
def asked(engines: dict[str, Engine]) -> Asked:
    """Serve random prompts with random salts, each by one of the engines. Return them."""
    size = engines[PODS[0]].info.block_size  # half a chunk: prompts part in the middle of one, too
    chosen = random.Random(2)
    beginnings = [[chosen.randrange(250) for _ in range(6 * size)] for _ in range(6)]
    asked = []
    for _ in range(120):
        begins = chosen.choice(beginnings)[: chosen.randrange(1, 7) * size]
        prompt = begins + [chosen.randrange(250) for _ in range(chosen.randrange(3 * size))]
        asked.append((prompt, chosen.choice(SALTS)))
        made = engines[chosen.choice(PODS)]
        made.submit(prompt, SamplingParams(max_tokens=1), salt=asked[-1][1]).result(60)
    assert all(made.drain() for made in engines.values())
    return asked


def index_of(engines: dict[str, Engine], block_size: int, weights: dict[str, float]) -> LlmdIndex:
    """Return an index that has read all events of the engines."""
    index, context = LlmdIndex(block_size, weights), zmq.Context()
    for made in engines.values():
        assert made._publisher is not None
        with context.socket(zmq.DEALER) as asking:
            asking.connect(made._publisher.endpoints[1])
            asking.send_multipart([b"", struct.pack(">Q", 0)])
            while asking.poll(10_000):
                _, *frames = asking.recv_multipart()
                if frames[1] == END:
                    break
                index.read(frames)
    context.destroy(linger=0)
    return index


def expected(made: Engine, prompt: list[int], salt: str, weight_of: dict[str, float]) -> float:
    """Return the weights of the prompt's first chunks, each in the best tier that has it."""
    info, score = made.info, 0.0
    labels = grid_labels(prompt, info.block_size, info.chunk_tokens)
    columns = {
        tier: made.cache._index.states(made.namespace_of(salt), labels, tier) for tier in weight_of
    }
    size = info.chunk_tokens // info.block_size
    for at in range(0, len(labels), size):
        here = [
            weight_of[tier]
            for tier, states in columns.items()
            if states[at : at + size].count(State.READY) == size
        ]
        if not here:
            break
        score += max(here)
    return score


def test_it_scores_prompts_with_salts_by_server_tier_and_length(
    engines: dict[str, Engine], asked: Asked
) -> None:
    chunk_tokens = engines[PODS[0]].info.chunk_tokens

    def differences() -> list[tuple[str, str, float, float]]:
        index, found = index_of(engines, chunk_tokens, WEIGHTS), []
        for prompt, salt in asked:
            scores = index.scores(MODEL, prompt, salt)
            for pod, made in engines.items():
                there = expected(made, prompt, salt, WEIGHT_OF)
                if scores.get(pod, 0.0) != pytest.approx(there):
                    found.append((pod, salt, scores.get(pod, 0.0), there))
        assert not index.num_dropped
        return found

    wait_until(lambda: not differences(), "the index has all scores")
    best = [expected(made, *at, WEIGHT_OF) for at in asked for made in engines.values()]
    assert 0.0 in best
    assert len(set(best)) > 10, "lengths and tiers differ"


def test_a_salt_and_an_unlisted_medium_decide(engines: dict[str, Engine], asked: Asked) -> None:
    """Without a weight for the disk it counts as much as the device."""
    chunk_tokens = engines[PODS[0]].info.chunk_tokens
    index = index_of(engines, chunk_tokens, DEFAULT_WEIGHTS)
    as_device = {**WEIGHT_OF, DISK: 1.0}
    for prompt, salt in asked:
        for pod, made in engines.items():
            score = index.scores(MODEL, prompt, salt).get(pod, 0.0)
            assert score == pytest.approx(expected(made, prompt, salt, as_device))
        assert not index.scores(MODEL, prompt, "unknown")
        assert not index.scores("another", prompt, salt)


def test_a_block_size_other_than_the_chunk_misleads(
    engines: dict[str, Engine], asked: Asked
) -> None:
    """The guide gives the block size for these reasons."""
    chunk_tokens = engines[PODS[0]].info.chunk_tokens
    smaller = index_of(engines, chunk_tokens // 2, WEIGHTS)
    for prompt, salt in asked:
        if salt:  # the salt is repeated with each part of the first block, and asked for once
            assert max(smaller.scores(MODEL, prompt, salt).values(), default=0.0) <= 1.0
    assert index_of(engines, 3 * chunk_tokens, WEIGHTS).num_dropped
