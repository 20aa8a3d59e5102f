"""Kinds of models: served exactly as by transformers, or refused by the self-check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.core.errors import ConfigError
from kvtier.serve.engine import Engine
from kvtier.serve.engine.models import load_model
from kvtier.serve.engine.paged import paged_attention
from kvtier.serve.engine.profile import NUM_TOKENS, ProbeKV
from kvtier.serve.engine.self_check import TOLERANCES, examine
from scripts.model_coverage import (
    attempt,
    kinds,
    outcomes_of,
    read_record,
    save,
    write_tables,
)
from tests.serve.engine.checkpoints import change_json
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
        Engine(changed(model=made("mamba", tmp_path)))


def test_without_a_longest_context_one_is_assumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = made("bloom", tmp_path)
    assert load_model(model, CPU, "auto").max_tokens == 2048
    assert "2048 tokens are assumed; if it takes more" in caplog.text
    change_json(Path(model, "config.json"), seq_length=100)
    assert load_model(model, CPU, "auto").max_tokens == 100
    change_json(Path(model, "config.json"), seq_length=0)
    with pytest.raises(ConfigError, match="has the seq_length 0"):
        load_model(model, CPU, "auto")
    assert load_model(made("mpt", tmp_path / "mpt"), CPU, "auto").max_tokens == 4096


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
    with Engine(changed(model=made(name, tmp_path))) as engine:
        assert engine.profile.runner_name == "layers"
    (record,) = [
        record for record in caplog.records if record.name.startswith("kvtier.serve.engine")
    ]
    assert record.levelname == "WARNING"
    assert "one sequence at a time" in record.getMessage()
    assert why in record.getMessage()


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
    monkeypatch.setitem(TOLERANCES, torch.float32, 0.0)
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
    wrong = [name for name, kind in found.items() if any(each.is_wrong for each in kind.values())]
    assert not wrong
    served = {name: kind for name, kind in found.items() if kind["float32"].served}
    assert len(served) >= 125
    assert all(outcome.served for kind in served.values() for outcome in kind.values())
    assert {name: found[name]["float32"].attention for name in SERVED} == SERVED
