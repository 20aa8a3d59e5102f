"""Kinds of models: served exactly as by transformers, or refused by the self-check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.connectors.transformers import cache_layers
from kvtier.core.errors import ConfigError
from kvtier.serve.engine import Engine
from kvtier.serve.engine.attention import AttentionParams
from kvtier.serve.engine.batch import BatchKV
from kvtier.serve.engine.models import load_model
from kvtier.serve.engine.paged import PagedKV, PromptKV, paged_attention
from kvtier.serve.engine.profile import NUM_TOKENS, ProbeKV
from kvtier.serve.engine.self_check import check_in_float32, examine
from scripts.model_coverage import (
    BLOCK,
    CHUNK,
    WINDOW,
    attempt,
    kinds,
    outcomes_of,
    read_record,
    save,
    write_tables,
)
from tests.serve.engine.conftest import changed

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
WINDOWED = "mistral, window"
DIFFER = r"differ from transformers' own by \d\.\de[+-]\d\d of"
SERVED = {
    WINDOWED: "full, windows of 48 tokens",
    "gemma2": "full, windows of 48 tokens, soft caps",
    "gpt_oss": "full, windows of 48 tokens, sinks",
    "gemma3n_text": "full, windows of 48 tokens, 4 layers with shared KV",
    "gpt2": "full",
    "falcon": "full",
    "lfm2": "full, 3 recurrent layers",
    "qwen3_next": "full, 3 recurrent layers",
}
LAYERS = ("falcon", "lfm2", "qwen3_next")
"""Models served by transformers' own attention and cache layers."""


def made(name: str, folder: Path) -> str:
    """Return the path of a small checkpoint."""
    save(name, kinds()[name], folder / "model")
    return str(folder / "model")


@pytest.mark.parametrize("name", SERVED)
def test_it_is_served_as_transformers_computes_it(tmp_path: Path, name: str) -> None:
    made(name, tmp_path)
    outcome = attempt(name, tmp_path / "model", tmp_path / "disk")
    assert outcome.attention == SERVED[name], outcome
    assert outcome.served == ("layers" if name in LAYERS else "paged")
    assert not outcome.is_wrong, outcome


def test_what_cannot_be_restored_is_refused_by_name(tmp_path: Path) -> None:
    why = "no layer of it has attention|it uses no DynamicCache"  # transformers 5.24, or before
    with pytest.raises(ConfigError, match=why):
        load_model(made("mamba", tmp_path), CPU, "auto")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("falcon", "does not go through transformers' attention interface"),
        ("lfm2", "has conv layers"),
    ],
)
def test_the_slower_runner_is_a_warning_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, why: str
) -> None:
    served = load_model(made(name, tmp_path), CPU, "auto")
    assert served.profile.runner_name == "layers"
    (record,) = [
        record for record in caplog.records if record.name.startswith("kvtier.serve.engine")
    ]
    assert record.levelname == "WARNING"
    assert "one sequence at a time" in record.getMessage()
    assert why in record.getMessage()


# -- the self-check --------------------------------------------------------------------------------


def with_form(
    kv: type[PagedKV],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[AttentionParams], AttentionParams],
) -> None:
    """Make a KV class attend with changed attention parameters."""
    attend = kv.attend

    def changed_attend(
        self: Any, layer: int, query: Any, key: Any, value: Any, form: AttentionParams
    ) -> Any:
        return attend(self, layer, query, key, value, change(form))

    monkeypatch.setattr(kv, "attend", changed_attend)


@pytest.mark.parametrize("kv", [PromptKV, BatchKV])
@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        (WINDOWED, lambda form: replace(form, window=0), "reads more tokens than the window"),
        (WINDOWED, lambda form: replace(form, window=WINDOW - 1), DIFFER),
        (WINDOWED, lambda form: replace(form, scaling=form.scaling * 1.1), DIFFER),
        ("gemma2", lambda form: replace(form, softcap=0.0), DIFFER),
        ("gpt_oss", lambda form: replace(form, sinks=None), DIFFER),
    ],
    ids=["no window", "a shorter window", "scale", "no soft cap", "no sinks"],
)
def test_a_model_whose_attention_is_computed_otherwise_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[AttentionParams], AttentionParams],
    why: str,
    kv: type[PagedKV],
) -> None:
    config = changed(model=made(name, tmp_path), threads=1, max_model_tokens=300)
    with Engine(config) as engine:
        assert engine.check.num_tokens > WINDOW
        assert engine.check.difference < engine.check.tolerance / 10
    with_form(kv, monkeypatch, change)
    with pytest.raises(ConfigError, match=why):
        Engine(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["jamba", "blenderbot-small", "plbart"])
def test_what_float32_refuses_is_refused_in_every_dtype(
    tmp_path: Path, name: str, dtype: str
) -> None:
    """transformers drops Jamba's state if several tokens follow it.

    The other models take the position from the cache, but the tokens of a batch have several.
    """
    with pytest.raises(ConfigError, match=DIFFER):
        Engine(changed(model=made(name, tmp_path), threads=1, max_model_tokens=300, dtype=dtype))


def test_a_check_in_float32_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    model = load_model(made("qwen3", tmp_path), CPU, "bfloat16")
    before = [(weight.data_ptr(), weight.clone()) for weight in model.module.parameters()]
    check_in_float32("it", model, BLOCK, CHUNK, 80)
    for weight, (address, copy) in zip(model.module.parameters(), before, strict=True):
        assert weight.dtype is torch.bfloat16
        assert weight.data_ptr() == address
        assert torch.equal(weight, copy)


def test_without_memory_for_float32_a_model_is_checked_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(made("qwen3", tmp_path), CPU, "bfloat16")
    monkeypatch.setattr(
        cache_layers, "available_bytes", lambda: (cache_layers.RESERVE_BYTES, "a limit")
    )
    check_in_float32("it", model, BLOCK, CHUNK, 80)
    assert "checked in bfloat16 only" in caplog.text
    assert "0.0 GiB in float32, and 1.0 GiB are left" in caplog.text


def test_doctor_tells_what_a_model_would_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = made("gemma2", tmp_path)
    found = {each.topic: each for each in examine(name, "cpu")}
    assert found["served"].found == "yes"
    assert found["attention"].found == SERVED["gemma2"]
    assert found["KV of a token"].found == "1.0 KiB"  # 4 layers of K and V, 2 heads of 16 floats
    held = found["device memory of a sequence"]
    assert held.found == "2.1 MiB"  # two layers of all 4,096 tokens, two of 48 and a chunk
    assert held.note.startswith("4096 tokens; 4.0 MiB with the KV that windows have passed")
    assert "of the logits' scale" in found["self-check"].found
    with_form(PromptKV, monkeypatch, lambda form: replace(form, softcap=0.0))
    found = {each.topic: each for each in examine(name, "cpu")}
    assert found["served"].found == "no"
    assert "differ from transformers' own by" in found["served"].note
    (refused,) = examine(str(tmp_path), "cpu")
    assert refused.found == "no"


# -- strictness ------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    layer_idx = 0


def ask(**more: Any) -> None:
    key = torch.zeros(1, 2, NUM_TOKENS, 8)
    mask = more.pop("attention_mask", None)
    paged_attention(Layer(), key, key, key, mask, kv=ProbeKV(), scaling=1.0, **more)


@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": torch.zeros(1, 1, 3, 3)},
        {"is_causal": False},
        {"dropout": 0.1},
        {"position_bias": torch.zeros(1)},
        {"block_indices": 3},
    ],
    ids=lambda given: next(iter(given)),
)
def test_an_argument_that_attention_does_not_compute_is_an_error(given: dict[str, Any]) -> None:
    ask(dropout=0.0, is_causal=True, position_ids=torch.zeros(1), position_bias=None)
    with pytest.raises(ConfigError, match=next(iter(given))):
        ask(**given)


# -- the table -------------------------------------------------------------------------------------


def test_the_table_is_what_was_measured_and_has_nothing_wrong() -> None:
    assert write_tables(is_check=True)
    found = outcomes_of(read_record())
    assert not [name for name, each in found.items() if each.is_wrong]
    assert len(found) > 70
    assert {name: found[name].attention for name in SERVED} == SERVED
