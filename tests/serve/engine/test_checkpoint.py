"""A checkpoint that would be served as another model is refused, in one sentence."""

from __future__ import annotations

import ast
import builtins
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kvtier.core.errors import ConfigError
from kvtier.serve.engine.model_names import BUILTIN, DEFAULT
from kvtier.serve.engine.models import choose_dtype, load_model
from kvtier.serve.engine.random_models import random_config
from kvtier.serve.engine.tokenizer import Tokenizer

from .checkpoints import Tensors, change_json, change_tensors, checkpoint

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
ROOT = Path(__file__).parents[3]
LAYERS = 5
"""Layers of the built-in model."""

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [4.0] * 32,
    "original_max_position_embeddings": 512,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def with_layers(num: int) -> dict[str, object]:
    return {"num_hidden_layers": num, "layer_types": ["full_attention"] * num}


def refusal(model: Path) -> str:
    """Return the one-line message with which ``model`` is refused, whatever the library raised."""
    with pytest.raises(ConfigError) as refused:
        load_model(str(model), CPU, "auto")
    message = str(refused.value)
    assert message.startswith("model: ")
    assert "\n" not in message
    assert len(message) < 700
    return message


def save(module: PreTrainedModel, folder: Path) -> None:
    """Write a checkpoint of ``module``, with the built-in model's tokenizer."""
    module.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUILTIN / DEFAULT / name, folder / name)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    change_tensors(model, lambda tensors: tensors.pop(K_PROJ))
    assert f"lacks {K_PROJ};" in refusal(model)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (with_layers(LAYERS + 1), "lacks model.layers.5.input_layernorm.weight, "),
        (with_layers(LAYERS + 1), " and 8 more;"),
        (with_layers(LAYERS - 1), "has no place for: model.layers.4.input_layernorm.weight, "),
        (
            {"num_key_value_heads": 1},
            f"{K_PROJ} ([128, 256] in the file, [64, 256] by config.json)",
        ),
        ({"tie_word_embeddings": False}, "lacks lm_head.weight;"),
        ({"rope_parameters": LONGROPE}, "rotary embeddings of type 'longrope'"),
        ({"rope_parameters": DYNAMIC}, "rotary embeddings of type 'dynamic'"),
        # The older name of rotary settings counts, and so do those of each type of layer.
        (
            {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "'dynamic'",
        ),
        ({"rope_parameters": {"full_attention": LONGROPE}}, "'longrope'"),
        ({"model_type": "own"}, "'own', which is unknown to the installed transformers"),
        ({"model_type": None}, "has the model_type None; it has to be the name"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised (awq);"),
        ({"hidden_size": "x"}, "config.json can't be read"),
        ({"num_hidden_layers": "x"}, "config.json can't be read"),
        ({"quantization_config": "x"}, "config.json can't be read"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    assert sentence in refusal(checkpoint(tmp_path / "model", **changes))


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", tie_word_embeddings=False)
    change_tensors(model, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 256)}))
    assert "lacks lm_head.weight;" in refusal(model)


EXPERT = "model.layers.1.mlp.experts.2.gate_proj.weight"
MERGED = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop(EXPERT),
        lambda tensors: tensors.update({EXPERT: torch.zeros(3, 5)}),
        lambda tensors: [tensors.pop(key) for key in list(tensors) if ".1.mlp.experts.2." in key],
    ],
    ids=["tensor", "shape", "expert"],
)
def test_experts_that_are_not_whole_are_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Tensors], object]
) -> None:
    """transformers merges experts' weights, and only logs which ones it could not merge."""
    config = random_config("random-mla", 64)
    save(AutoModelForCausalLM.from_config(config), tmp_path / "model")
    change_tensors(tmp_path / "model", change)
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(caplog.handler)
    try:
        assert MERGED in refusal(tmp_path / "model")
    finally:
        transformers_log.removeHandler(caplog.handler)
    assert "LOAD REPORT" not in caplog.text


def sharded(model: Path, name: str) -> Path:
    """Move the weights to the file ``name``, listed by an index. Return that file."""
    weights = model / "model.safetensors"
    names = dict.fromkeys(load_file(weights), name)
    index = {"metadata": {}, "weight_map": names}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / name).parent.mkdir(exist_ok=True)
    return weights.rename(model / name)


def test_weights_in_several_files_are_loaded(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    sharded(model, "model-00001-of-00001.safetensors")
    load_model(str(model), CPU, "auto")


def test_a_shard_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    shard = sharded(model, "model-00001-of-00001.safetensors")
    save_file({k: v for k, v in load_file(shard).items() if k != K_PROJ}, shard, {"format": "pt"})
    assert f"lacks {K_PROJ};" in refusal(model)
    shard.unlink()
    assert "can't be read (FileNotFoundError: " in refusal(model)


@pytest.mark.parametrize("name", ["sub/w.safetensors", "../w.safetensors", "weights.dat"])
def test_weights_that_the_identity_does_not_cover_are_refused(tmp_path: Path, name: str) -> None:
    model = checkpoint(tmp_path / "model")
    sharded(model, name)
    assert f"index.json names the file {name!r}; weights have to be files of" in refusal(model)


def test_weights_that_the_configuration_places_elsewhere_are_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", transformers_weights="sub/w.safetensors")
    sharded(model, "sub/w.safetensors")
    (model / "model.safetensors.index.json").unlink()
    assert "config.json names the file 'sub/w.safetensors'" in refusal(model)


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
    save(made, tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), CPU, "auto").module.state_dict()
    for name, tensor in made.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


def test_layers_that_predict_further_tokens_are_no_fault(tmp_path: Path) -> None:
    config = random_config("random-mla", 64)
    config.num_nextn_predict_layers = 1
    save(AutoModelForCausalLM.from_config(config), tmp_path / "model")

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


def test_frequencies_that_are_fixed_are_served(tmp_path: Path) -> None:
    rotary = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    model = checkpoint(tmp_path / "model", rope_parameters=rotary)
    load_model(str(model), CPU, "auto")


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if anything prompts on the terminal."""

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


def test_pickled_code_does_not_run(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "model.safetensors").unlink()
    has_run = tmp_path / "has-run"

    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(has_run),)

    torch.save({K_PROJ: Runs()}, model / "pytorch_model.bin")
    assert "the file holds more than tensors" in refusal(model)
    assert not has_run.exists()


def test_every_load_of_a_checkpoint_says_that_its_code_is_not_trusted() -> None:
    """Without an explicit choice, transformers prompts on the terminal."""
    loads = [
        (path, call)
        for folder in ("src", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "from_pretrained"
        if ast.unparse(call.func) != "Tokenizer.from_pretrained"  # of tokenizers: has no code
    ]
    assert len(loads) >= 3
    for path, call in loads:
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert said.get("trust_remote_code") == "False", f"{path}:{call.lineno}"


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


def test_a_number_of_further_layers_that_is_none_is_no_number(tmp_path: Path) -> None:
    load_model(str(checkpoint(tmp_path / "model", num_nextn_predict_layers="x")), CPU, "auto")


def test_a_dtype_that_is_not_served_is_refused() -> None:
    config = random_config("random-gqa", 64)
    config.dtype = torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="'float8_e4m3fn' is unknown; use auto, float32"):
        choose_dtype("auto", torch.device("cuda"), config)


@pytest.mark.parametrize(
    ("given", "expected"), [(0, (0,)), ([3, 0], (3, 0)), (None, (2, 0)), ([], ())]
)
def test_the_end_of_an_answer_is_what_the_generation_config_says(
    tmp_path: Path, given: object, expected: tuple[int, ...]
) -> None:
    """``None`` selects the end tokens of config.json; 0 is an ordinary token id."""
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
    """For some model types transformers makes an empty tokenizer instead of raising an error."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match="has no tokenizer; put the model's tokenizer.json there"):
        Tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no tokenizer|tokenizer in .* can't be read") as why:
        Tokenizer(tmp_path)
    assert "\n" not in str(why.value)


def test_a_missing_tokenizer_is_found_out_before_weights_are_read(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    (model / "model.safetensors").unlink()
    assert "has no tokenizer; put the model's tokenizer.json there" in refusal(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}'])
def test_a_broken_tokenizer_is_refused(tmp_path: Path, name: str, content: str) -> None:
    model = checkpoint(tmp_path / "model")
    (model / name).write_text(content)
    if (name, content) == ("tokenizer_config.json", '{"a": 1}'):
        assert Tokenizer(model).encode("def") != []  # it needs no field of the file
        return
    with pytest.raises(ConfigError, match="tokenizer in .* can't be read"):
        Tokenizer(model)
