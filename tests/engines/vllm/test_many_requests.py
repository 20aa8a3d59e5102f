"""A real vLLM with many requests, whose KV groups are evicted and loaded all the time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import vllm

from tests.engines.vllm.drafts import make_mtp_of_windows
from tests.engines.vllm.engines import BLOCK, Prompt, count, engine, own_connector, prompt
from tests.engines.vllm.shapes import OPTIONS, SHAPES, options_of, save_random

NUM_REQUESTS = 1000
BATCH = 50


def _prompts() -> list[Prompt]:
    """Return prompts of some conversations, which have a beginning in common."""
    rng = random.Random(1)
    begins = [prompt(seed, 2 * BLOCK)["prompt_token_ids"] for seed in range(4)]
    made: list[Prompt] = []
    for number in range(40):
        own = prompt(100 + number, rng.randrange(20, 2 * BLOCK))["prompt_token_ids"]
        made.append({"prompt_token_ids": begins[number % len(begins)] + own})
    return made


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", ["lfm2", "gpt-oss", "mtp"])
def test_no_request_is_lost_among_a_thousand(shape: str, tmp_path: Path) -> None:
    if shape == "mtp":
        make_mtp_of_windows(tmp_path / "model")
        drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
        options, num_pages = {**OPTIONS, **drafting}, 48  # for a KV group more
    else:
        save_random(SHAPES[shape], tmp_path / "model")
        options, num_pages = options_of(shape), 24
    prompts, rng = _prompts(), random.Random(2)
    config = own_connector(
        host_capacity="2MiB",
        disk_path=str(tmp_path / "slab"),
        disk_capacity="8MiB",
        eviction_policy="lru",
    )
    options = {**options, "num_gpu_blocks_override": num_pages}
    params = vllm.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with engine(config, tmp_path / "model", max_model_len=5 * BLOCK, **options) as llm:
        evicted = count("vllm:kvtier_evicted_chunks_total")
        loaded = count("vllm:kvtier_loaded_chunks_total")
        drafted = count("vllm:spec_decode_num_draft_tokens_total")
        for _ in range(NUM_REQUESTS // BATCH):
            asked = rng.choices(prompts, k=BATCH)
            outputs = llm.generate(asked, params, use_tqdm=False)
            assert [len(each.outputs[0].token_ids) for each in outputs] == [3] * BATCH
        assert count("vllm:kvtier_evicted_chunks_total") > evicted, "or it would show nothing"
        assert count("vllm:kvtier_loaded_chunks_total") > loaded, "or it would show nothing"
        has_drafted = count("vllm:spec_decode_num_draft_tokens_total") > drafted
        assert has_drafted == (shape == "mtp")
