"""Real vLLM engines of tensor parallel sizes 1 and 2 on the CPU, over one store.

Another number of ranks sums in another order, so engines of two sizes compute different bits for a
prompt. The tests therefore read the KV from vLLM's own tensors, and compare what one engine has
computed with what the other one has loaded, bit for bit. Answers are compared up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engines import (
    BLOCK,
    Answer,
    Connects,
    Prompt,
    are_close,
    bind_ranks,
    count,
    engine,
    one_by_one,
    own_connector,
    prompt,
)
from tests.engines.vllm.shapes import OPTIONS, save_random
from tests.engines.vllm.test_attention import KINDS
from tests.engines.vllm.test_pipeline import stages
from tests.kit.servers import ValkeyServer

NUM_HEADS, NUM_LAYERS = 2, 5
"""KV heads and layers of the built-in model."""
PROMPTS = [prompt(seed, 3 * BLOCK + 50) for seed in range(7000, 7002)]
OTHERS = [prompt(seed, 3 * BLOCK + 50) for seed in range(7100, 7102)]
NUM_BLOCKS = 3 * len(PROMPTS)

Opens = Callable[[dict[str, Any]], AbstractContextManager[Any]]
"""Starts an engine of some size."""
Pages = dict[str, set[str]]
"""Digests of the bytes that pages have, by layer and KV head."""


def of_size(num_ranks: int, **options: Any) -> Opens:
    """Return what starts an engine with so many tensor parallel ranks."""

    @contextmanager
    def opens(config: dict[str, Any]) -> Iterator[Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # a function goes to the ranks
            bind_ranks(patch, num_ranks)
            with engine(config, tensor_parallel_size=num_ranks, **options) as llm:
                yield llm

    return opens


def kv_of(worker: Any) -> dict[str, list[str]]:
    """Return the KV in a rank's pages: digests of each page's bytes, by layer and KV head."""
    model, parallel = worker.model_runner.model_config, worker.parallel_config
    first_layer, _ = model.get_layers_start_end_indices(parallel)
    found = {}
    for layer, cache in enumerate(worker.model_runner.kv_caches, first_layer):
        if model.use_mla:  # latents, of no head
            cache = cache.unsqueeze(1) if cache.ndim == 3 else cache
        own = cache.size(1)
        first = 0 if model.use_mla else worker.rank % parallel.tensor_parallel_size * own
        for head in range(own):
            found[f"layer {layer} head {first + head}"] = [
                sha256(page.contiguous().numpy().tobytes()).hexdigest()
                for page in cache[:, head]
                if page.any(dim=1).all()  # each of its tokens was computed, or loaded
            ]
    return found


def run_all(llm: Any, prompts: list[Prompt]) -> tuple[list[tuple[int, Answer]], list[Pages]]:
    """Return cached tokens and answers, and the KV that was in pages after any of them, by rank.

    The KV is read after each prompt, since the next prompt may overwrite it.
    """
    found, ranks = [], list[Pages]()
    for each in prompts:
        found += one_by_one(llm, [each])
        now = [
            {name: set(pages) for name, pages in rank.items()} for rank in llm.collective_rpc(kv_of)
        ]
        for rank, before in zip(now, ranks, strict=False):
            for name, pages in before.items():
                rank[name] |= pages
        ranks = now
    return found, ranks


def assert_loaded(ours: list[Pages], theirs: list[Pages], num_pages: int) -> None:
    """Assert that so many pages of each rank have the bytes of the other engine's."""
    computed = {name: pages for rank in theirs for name, pages in rank.items()}
    assert {name for rank in ours for name in rank} == computed.keys()
    for rank in ours:
        for name, pages in rank.items():
            assert len(pages & computed[name]) == num_pages, name


def hand_over(
    config: dict[str, Any],
    first: Opens,
    second: Opens,
    prompts: list[Prompt],
    is_stored: Callable[[], bool],
    are_alike: bool = True,
) -> None:
    """Let an engine compute prompts, and another one load them.

    The bytes of vLLM's pages are compared. If vLLM's own answers ``are_alike`` for any number of
    ranks, up to rounding, they are compared, too.
    """
    store = config["kv_connector_extra_config"]["storage"].partition(":")[0]
    with first(config) as llm:
        computed, theirs = run_all(llm, prompts)
        for seed in range(100, 160):  # vLLM looks after stores in its steps
            if is_stored():
                break
            one_by_one(llm, [prompt(seed, 10)])
        assert is_stored(), "not all of it is ever in the store"
    with second(config) as llm:
        before = count("vllm:kvtier_loaded_chunks_total", tier=store)
        found, ours = run_all(llm, prompts)
        num_loaded = count("vllm:kvtier_loaded_chunks_total", tier=store) - before
        num_tokens = sum(cached for cached, _ in found)
        assert num_tokens >= len(prompts) * 3 * BLOCK
        assert num_loaded * BLOCK >= num_tokens
    assert_loaded(ours, theirs, int(num_loaded))
    for (_, answer), (_, other) in zip(found, computed, strict=True):
        assert are_close(answer, other) or not are_alike


def settings(url: str, **more: object) -> dict[str, Any]:
    return {
        "host_capacity": "256MiB",
        "storage": url,
        "storage_shards": 8,
        "lookup_deadline_s": 5,
        **more,
    }


@pytest.mark.timeout(880)
def test_ranks_share_a_server_that_has_each_head_of_a_block_once(
    connects: Connects, server: ValkeyServer, valkey: str
) -> None:
    config = connects(**settings(valkey))
    one, two, num = of_size(1), of_size(2), NUM_BLOCKS * NUM_HEADS
    hand_over(config, one, two, PROMPTS, lambda: server.num_values >= num)
    hand_over(config, two, one, OTHERS, lambda: server.num_values >= 2 * num)
    assert server.num_values == 2 * num


@pytest.mark.timeout(880)
def test_ranks_share_a_bucket(s3: str) -> None:
    config, one, two = own_connector(**settings(s3)), of_size(1), of_size(2)
    num_bytes = NUM_BLOCKS * NUM_LAYERS * NUM_HEADS * 2 * BLOCK * 64 * 4

    def stored() -> float:
        """Return the bytes that the first rank has written."""
        return count("vllm:kvtier_moved_bytes_total", src="host", dst="s3")

    hand_over(config, one, two, PROMPTS, lambda: stored() >= num_bytes)
    before = stored()
    hand_over(config, two, one, OTHERS, lambda: stored() - before >= num_bytes // 2)


@pytest.mark.timeout(880)
def test_ranks_share_latents_which_are_stored_once(server: ValkeyServer, tmp_path: Path) -> None:
    save_random(KINDS["latent"], tmp_path / "model")
    options = {"model": tmp_path / "model", "block_size": 16, **OPTIONS}
    config = own_connector(**settings(f"valkey://127.0.0.1:{server.port}"))
    one, two = of_size(1, **options), of_size(2, **options)
    num = sum(len(each["prompt_token_ids"]) // 16 for each in PROMPTS)
    # Without kvtier, log-probabilities of one rank and of two differ by 0.1 with random weights.
    hand_over(config, one, two, PROMPTS, lambda: server.num_values >= num, are_alike=False)
    hand_over(config, two, one, OTHERS, lambda: server.num_values >= 2 * num, are_alike=False)
    assert server.num_values == 2 * num


@pytest.mark.timeout(880)
def test_stages_of_a_pipeline_share_with_an_engine_without(server: ValkeyServer) -> None:
    url = f"valkey://127.0.0.1:{server.port}"
    config = own_connector(**settings(url, storage_stages=NUM_LAYERS))
    num = NUM_BLOCKS * NUM_HEADS * NUM_LAYERS
    hand_over(config, of_size(1), staged, PROMPTS, lambda: server.num_values >= num)
    hand_over(config, staged, of_size(1), OTHERS, lambda: server.num_values >= 2 * num)
    assert server.num_values == 2 * num


@contextmanager
def staged(config: dict[str, Any]) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        with stages(config) as llm:
            yield llm
