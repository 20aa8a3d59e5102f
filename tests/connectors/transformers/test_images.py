"""Prompts of multimodal models: text is reused as in text models, images by their content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvtier
from kvtier.connectors.transformers import images
from kvtier.connectors.transformers.attached import Attached
from kvtier.connectors.transformers.images import Images
from tests.connectors.transformers.models import (
    CHUNK,
    MULTIMODAL,
    answer,
    are_equal,
    multimodal_model,
    multimodal_prompt,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        images._slice_features is None, reason="transformers before 5.24 encodes with the prompt"
    ),
]


def attached(model: Any, **changes: Any) -> Attached:
    settings: dict[str, Any] = {"host_capacity": "4MiB", "chunk_tokens": CHUNK}
    return kvtier.attach(model, **settings | changes)


def ask(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[Any, torch.Tensor]:
    given = {name: value for name, value in inputs.items() if name != "input_ids"}
    return answer(model, inputs["input_ids"], **given, **options)


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_text_alone_is_reused(kind: str) -> None:
    model, inputs = multimodal_model(kind), multimodal_prompt(kind, 0)
    right = ask(model, inputs, prefill_chunk_size=CHUNK)
    with attached(model) as cache:
        for num_reused in (0, 96):
            assert are_equal(ask(model, inputs), right)
            assert cache.stats().num_reused_tokens == num_reused
        assert not cache.stats().passed


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_images_are_reused_by_content_and_what_is_before_them_by_text(
    kind: str, tmp_path: Path
) -> None:
    model = multimodal_model(kind)
    one, other = (multimodal_prompt(kind, 0, image) for image in (1, 2))
    expected = [ask(model, inputs, prefill_chunk_size=CHUNK) for inputs in (one, other)]
    assert not torch.equal(expected[0][1], expected[1][1])
    disk = {"disk_path": str(tmp_path), "disk_capacity": "8MiB"}
    with attached(model, **disk) as cache:
        for inputs, right, num_reused in (
            (one, expected[0], 0),
            (other, expected[1], 32),
            (one, expected[0], 96),
            (other, expected[1], 96),
        ):
            before = cache.stats().num_reused_tokens
            assert are_equal(ask(model, inputs), right)
            assert cache.stats().num_reused_tokens - before == num_reused
        assert not cache.stats().passed
    with attached(model, **disk) as cache:
        assert are_equal(ask(model, one), expected[0])
        assert cache.stats().reused_tokens == {"disk": 96}


def test_an_audited_prompt_with_an_image_is_found_equal() -> None:
    model, inputs = multimodal_model("qwen3_vl"), multimodal_prompt("qwen3_vl", 0, 1)
    with attached(model, audit=1.0) as cache:
        for _ in range(8):  # each time another chunk
            ask(model, inputs)
        assert dict(cache.stats().audits) == {"equal": 7}


def test_kv_of_another_image_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chunk with a part of it: what is behind it follows from the cached KV before it."""
    model = multimodal_model("qwen3_vl")
    one, other = (multimodal_prompt("qwen3_vl", 0, image) for image in (1, 2))
    right = ask(model, other, prefill_chunk_size=CHUNK)
    monkeypatch.setattr(Images, "labelled", lambda self, tokens, chunk_tokens: tokens)
    with attached(model, audit=1.0) as cache:
        auditor: Any = cache._auditor
        auditor.piece = lambda num_pieces: 2
        ask(model, one)
        assert are_equal(ask(model, other), right)
        assert dict(cache.stats().audits) == {"different": 1}


def test_prompts_that_cannot_be_divided_are_passed_through() -> None:
    kind = "llava"
    model, inputs = multimodal_model(kind), multimodal_prompt(kind, 0, 1)
    two = {name: torch.cat([value, value]) for name, value in inputs.items()}
    with attached(model, chunk_tokens=4) as cache:
        ask(model, inputs)
        assert dict(cache.stats().passed) == {images.UNDIVIDED: 1}
    with attached(model) as cache:
        right = ask(multimodal_model(kind), two)
        assert are_equal(ask(model, two), right)
        assert dict(cache.stats().passed) == {images.UNDIVIDED: 1}
    gemma = multimodal_model("gemma3")
    with attached(gemma) as cache:
        ask(gemma, multimodal_prompt("gemma3", 0, 1))
        assert dict(cache.stats().passed) == {"token_type_ids was given": 1}


def test_a_digest_rests_on_features_positions_and_ids() -> None:
    kind = "qwen3_vl"
    model, inputs = multimodal_model(kind), multimodal_prompt(kind, 0, 1)
    ids, types = inputs["input_ids"], inputs["mm_token_type_ids"]
    positions = torch.arange(100).expand(4, 1, 100) + 1
    encode = model.model.get_image_features
    with torch.no_grad():
        features = encode(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)

    def labels(ids: torch.Tensor = ids, **changes: Any) -> list[int]:
        given = {"positions": positions, "types": types} | changes
        held = Images({"image": features}, ids, model.config, **given)
        return held.labelled(ids[0].tolist(), CHUNK)

    first = labels()
    assert labels() == first
    assert [*first[96:]] == ids[0, 96:].tolist()  # no whole chunk
    others = ids.clone()
    others[0, 35] += 1
    moved = positions.clone()
    moved[2, 0, 35] += 1
    found = [labels(others), labels(positions=moved)]
    features.deepstack_features[0][0][0, 0] += 1
    for changed in (*found, labels()):
        chunks = [changed[at : at + CHUNK] != first[at : at + CHUNK] for at in range(0, 96, CHUNK)]
        assert chunks == [False, False, True, False, False, False]
