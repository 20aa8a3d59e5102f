"""A checkpoint that would be served as another model is refused, in one sentence."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from kvtier.engine.models import load_model
from kvtier.engine.random_models import random_config
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ConfigError

from .checkpoints import change_json, change_tensors, checkpoint

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
LAYERS = 5
"""Of the built-in model."""

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [4.0] * 32,
    "original_max_position_embeddings": 512,
}


def refusal(model: Path) -> str:
    """Return why ``model`` is not loaded: one line, whatever the library below had to say."""
    with pytest.raises(ConfigError) as refused:
        load_model(str(model), CPU, "auto")
    message = str(refused.value)
    assert message.startswith("model: ")
    assert "\n" not in message
    assert len(message) < 700
    return message


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    change_tensors(model, lambda tensors: tensors.pop(K_PROJ))
    assert f"lacks {K_PROJ};" in refusal(model)


def test_more_layers_than_the_file_has_are_refused(tmp_path: Path) -> None:
    layers = ["full_attention"] * (LAYERS + 1)
    model = checkpoint(tmp_path / "model", num_hidden_layers=LAYERS + 1, layer_types=layers)
    message = refusal(model)
    assert "lacks model.layers.5.input_layernorm.weight, " in message
    assert " and 8 more;" in message


def test_fewer_layers_than_the_file_has_are_refused(tmp_path: Path) -> None:
    layers = ["full_attention"] * (LAYERS - 1)
    model = checkpoint(tmp_path / "model", num_hidden_layers=LAYERS - 1, layer_types=layers)
    message = refusal(model)
    assert "has no place for: model.layers.4.input_layernorm.weight, " in message


def test_a_shape_that_the_configuration_does_not_have_is_refused(tmp_path: Path) -> None:
    message = refusal(checkpoint(tmp_path / "model", num_key_value_heads=1))
    assert f"{K_PROJ} ([128, 256] in the file, [64, 256] by config.json)" in message


def test_a_head_that_is_not_tied_has_to_be_in_the_file(tmp_path: Path) -> None:
    assert "lacks lm_head.weight;" in refusal(checkpoint(tmp_path / "m", tie_word_embeddings=False))


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", tie_word_embeddings=False)
    change_tensors(model, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 256)}))
    assert "lacks lm_head.weight;" in refusal(model)


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_that_are_all_there_are_loaded(
    tmp_path: Path, family: type[LlamaConfig], is_tied: bool
) -> None:
    config = family(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=is_tied,
    )
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), CPU, "auto").module.state_dict()
    for name, tensor in made.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


def test_layers_that_predict_further_tokens_are_no_fault(tmp_path: Path) -> None:
    config = random_config("random-mla", 64)
    config.num_nextn_predict_layers = 1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    def add(layer: int) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda tensors: tensors.update(
            {f"model.layers.{layer}.eh_proj.weight": torch.zeros(2, 2)}
        )

    change_tensors(tmp_path / "model", add(config.num_hidden_layers))
    load_model(str(tmp_path / "model"), CPU, "auto")
    change_tensors(tmp_path / "model", add(config.num_hidden_layers + 1))
    assert "eh_proj" in refusal(tmp_path / "model")


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "adapter_config.json").write_text("{}")
    assert "merge it" in refusal(model)


@pytest.mark.parametrize("rotary", [LONGROPE, {"rope_type": "dynamic", "factor": 4.0}])
def test_frequencies_that_depend_on_the_context_are_refused(
    tmp_path: Path, rotary: dict[str, object]
) -> None:
    model = checkpoint(tmp_path / "model", rope_parameters={"rope_theta": 10000.0, **rotary})
    assert f"rotary embeddings of type {rotary['rope_type']!r}" in refusal(model)


def test_the_older_name_of_rotary_settings_counts_too(tmp_path: Path) -> None:
    scaling = {"type": "dynamic", "factor": 4.0}
    model = checkpoint(tmp_path / "model", rope_parameters=None, rope_scaling=scaling)
    assert "'dynamic'" in refusal(model)


def test_frequencies_that_are_fixed_are_served(tmp_path: Path) -> None:
    rotary = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    model = checkpoint(tmp_path / "model", rope_parameters=rotary)
    load_model(str(model), CPU, "auto")


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question on the terminal fails the test."""

    def ask(prompt: str = "") -> str:
        pytest.fail(f"asked on the terminal: {prompt}")

    monkeypatch.setattr(builtins, "input", ask)


@pytest.mark.usefixtures("nobody_answers")
def test_code_of_a_checkpoint_is_refused_without_a_question(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    model = checkpoint(tmp_path / "model", model_type="own", auto_map=auto_map)
    has_run = tmp_path / "has-run"
    (model / "own.py").write_text(f"open({str(has_run)!r}, 'w')\n")
    message = refusal(model)
    assert "'own', which is known only to code in the checkpoint (auto_map)" in message
    assert not has_run.exists()


@pytest.mark.usefixtures("nobody_answers")
def test_a_known_type_is_served_without_its_code(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    model = checkpoint(tmp_path / "model", auto_map=auto_map)
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    change_json(model / "tokenizer_config.json", **tokenizer)
    has_run = tmp_path / "has-run"
    (model / "own.py").write_text(f"open({str(has_run)!r}, 'w')\n")
    load_model(str(model), CPU, "auto")
    assert Tokenizer(model).encode("def") != []
    assert not has_run.exists()


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes", "mxfp4", "unknown"])
def test_a_quantised_checkpoint_is_refused(tmp_path: Path, method: str) -> None:
    model = checkpoint(tmp_path / "model", quantization_config={"quant_method": method})
    assert f"is quantised ({method});" in refusal(model)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize("damage", [cut, lambda data: b"\xff" * 64 + data[64:], lambda data: b""])
def test_a_damaged_file_of_weights_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    model = checkpoint(tmp_path / "model")
    file = model / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    message = refusal(model)
    assert f"the weights in {model} can't be read" in message
    assert "fetch it again" in message


@pytest.mark.parametrize("content", [b"{", b"[]", b'"x"', b"\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_broken_configuration_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    model = checkpoint(tmp_path / "model")
    (model / name).write_bytes(content)
    assert str(model / name) in refusal(model)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "quantization_config"])
def test_a_field_of_another_type_is_refused(tmp_path: Path, field: str) -> None:
    assert "config.json can't be read" in refusal(checkpoint(tmp_path / "model", **{field: "x"}))


@pytest.mark.parametrize(
    ("given", "expected"), [(0, (0,)), ([3, 0], (3, 0)), (None, (2, 0)), ([], ())]
)
def test_the_end_of_an_answer_is_what_the_generation_config_says(
    tmp_path: Path, given: object, expected: tuple[int, ...]
) -> None:
    """``None`` says nothing, so the configuration's own counts; 0 is a token like any other."""
    model = checkpoint(tmp_path / "model")
    change_json(model / "generation_config.json", eos_token_id=given)
    assert load_model(str(model), CPU, "auto").eos_token_ids == expected


@pytest.mark.parametrize("given", ["x", [1, "x"], True, 1.5])
def test_an_end_that_is_no_token_is_refused(tmp_path: Path, given: object) -> None:
    model = checkpoint(tmp_path / "model")
    change_json(model / "generation_config.json", eos_token_id=given)
    assert f"is {given!r}; it has to be a token id" in refusal(model)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "deepseek_v3"])
def test_a_missing_tokenizer_is_refused(tmp_path: Path, model_type: str) -> None:
    """For some types transformers makes an empty tokenizer instead of an error."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=r"has no tokenizer|tokenizer in .* can't be read") as why:
        Tokenizer(tmp_path)
    assert "\n" not in str(why.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}'])
def test_a_broken_tokenizer_is_refused(tmp_path: Path, name: str, content: str) -> None:
    model = checkpoint(tmp_path / "model")
    (model / name).write_text(content)
    if (name, content) == ("tokenizer_config.json", '{"a": 1}'):
        assert Tokenizer(model).encode("def") != []  # no field of it is needed
        return
    with pytest.raises(ConfigError, match="tokenizer in .* can't be read"):
        Tokenizer(model)
