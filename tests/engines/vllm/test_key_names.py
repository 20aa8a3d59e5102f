"""A real vLLM: KV whose keys hold a name instead of content is not taken for other content's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.vllm.blip import make_blip, picture
from tests.engines.vllm.engines import (
    BLOCK,
    MODEL,
    Answer,
    are_close,
    engine,
    one_by_one,
    prompt,
    run,
    with_disk,
)

TEXT = prompt(4100, 3 * BLOCK + 50)


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_blip(tmp_path_factory.mktemp("blip"))


@pytest.fixture(scope="module")
def right(vision_model: Path) -> list[Answer]:
    """Return vLLM's own answers to the first image, and to the second one."""
    with engine(None, vision_model) as llm:
        first, other = (run(llm, _seen(seed))[0][1] for seed in (1, 2))
    assert not are_close(first, other), "or the test would not notice"
    return [first, other]


def _seen(seed: int, name: str | None = None) -> dict[str, Any]:
    """A prompt with an image, which the client gives a name or not."""
    asked: dict[str, Any] = {**TEXT, "multi_modal_data": {"image": picture(seed)}}
    if name is not None:
        asked["multi_modal_uuids"] = {"image": [name]}
    return asked


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["cat", None], ids=["named by the client", "counted"])
def test_image_does_not_get_the_kv_of_another_of_its_name(
    vision_model: Path, right: list[Answer], tmp_path: Path, name: str | None
) -> None:
    """vLLM counts images, and starts again in each process, where all its caches are off."""
    options = {} if name else {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    first, other = right
    with engine(with_disk(tmp_path), vision_model, **options) as llm:
        cached, answer = run(llm, _seen(1, name))[0]
        assert cached == 0
        assert are_close(answer, first)
        assert run(llm, TEXT)[0][0] == 0
        assert run(llm, prompt(4101, 2 * BLOCK))[0][0] == 0  # what was stored before is on disk
    with engine(with_disk(tmp_path), vision_model, **options) as llm:
        cached, answer = run(llm, _seen(2, name))[0]
        assert cached == 0
        assert are_close(answer, other)
        assert run(llm, TEXT)[0][0] == 3 * BLOCK, "text is found on disk"


@pytest.mark.timeout(900)
def test_image_is_found_in_host_memory_and_another_one_is_not(
    vision_model: Path, right: list[Answer], tmp_path: Path
) -> None:
    flood = [prompt(4200 + seed, 6 * BLOCK + 50) for seed in range(12)]
    with engine(with_disk(tmp_path), vision_model) as llm:
        assert run(llm, _seen(1))[0][0] == 0
        warm = run(llm, _seen(1))[0]
        assert warm[0] == 3 * BLOCK
        assert are_close(warm[1], right[0])
        assert llm.reset_prefix_cache()
        assert run(llm, _seen(1))[0] == warm
        one_by_one(llm, flood)
        assert run(llm, _seen(1))[0] == warm, "after it was evicted from vLLM's pool"
        cached, answer = run(llm, _seen(2))[0]
        assert cached == 0
        assert are_close(answer, right[1])


@pytest.mark.timeout(900)
def test_embeddings_are_found_in_their_process_alone(tmp_path: Path) -> None:
    """vLLM hashes their bytes, without their type and shape."""
    hidden = json.loads((MODEL / "config.json").read_text())["hidden_size"]
    made = torch.Generator().manual_seed(1)
    embedded: dict[str, Any] = {
        "prompt_embeds": torch.randn(3 * BLOCK + 50, hidden, generator=made)
    }
    with engine(with_disk(tmp_path), enable_prompt_embeds=True) as llm:
        assert run(llm, TEXT)[0][0] == 0
        assert run(llm, embedded)[0][0] == 0
        assert llm.reset_prefix_cache()
        assert run(llm, embedded)[0][0] == 3 * BLOCK, "from host memory"
        assert run(llm, prompt(4101, 2 * BLOCK))[0][0] == 0  # what was stored before is on disk
    with engine(with_disk(tmp_path), enable_prompt_embeds=True) as llm:
        assert run(llm, embedded)[0][0] == 0
        assert run(llm, TEXT)[0][0] == 3 * BLOCK, "text is found on disk"
