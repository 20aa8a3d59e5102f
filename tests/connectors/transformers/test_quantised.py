"""Quantised models: their KV is found by the quantised weights, and has the grid's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

from kvtier.connectors.transformers.weights_in_memory import WeightsInMemory
from kvtier.identity import Basis, Identity
from tests.connectors.transformers.models import answer, are_equal, on_grid, small_model
from tests.connectors.transformers.test_attach import attached
from tests.connectors.transformers.test_weights import IDS, WHOLE, reused

pytestmark = pytest.mark.engine


class Int8Linear(nn.Module):
    """Weights of one byte, with a scale per row, as many quantisers have them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.scale = nn.Buffer(weight.abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Buffer((weight / self.scale).round().to(torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ (self.weight * self.scale).T


def by_hand(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, inner in module.named_children():
            if isinstance(inner, nn.Linear) and name != "lm_head":
                setattr(module, name, Int8Linear(inner))


def by_torchao(kind: str) -> Callable[[Any], None]:
    def quantise(model: Any) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model, getattr(quantization, kind)())

    return quantise


KINDS = {
    "by hand": by_hand,
    "torchao int8": by_torchao("Int8WeightOnlyConfig"),
    "torchao int8, activations too": by_torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao intx": by_torchao("IntxWeightOnlyConfig"),
    "torchao float8": by_torchao("Float8WeightOnlyConfig"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_equals_the_grid_and_finds_its_kv_on_disk(
    kind: str, tmp_path: Path
) -> None:
    disk = {"disk_path": str(tmp_path), "disk_capacity": "8MiB"}
    plain = on_grid(small_model(), IDS)
    for seed, num in ((0, 0), (0, WHOLE), (1, 0)):
        model = small_model(seed)
        KINDS[kind](model)
        right = on_grid(model, IDS)
        assert not are_equal(right, plain)
        with attached(model, **disk) as cache:
            for expected in (num, WHOLE):
                before = cache.stats().num_reused_tokens
                assert are_equal(answer(model, IDS), right)
                assert cache.stats().num_reused_tokens - before == expected
            assert cache.stats().weights == "read"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_quantised_while_it_is_attached_finds_nothing(kind: str) -> None:
    model = small_model()
    with attached(model) as cache:
        assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
        KINDS[kind](model)
        assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)


def test_a_part_of_a_quantised_weight_is_changed() -> None:
    model = small_model()
    KINDS["torchao int8"](model)
    with attached(model) as cache:
        assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.scale[3] *= 1.5
        assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)


def test_a_model_that_is_loaded_quantised(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    pytest.importorskip("accelerate")
    small_model().save_pretrained(tmp_path / "model")
    disk = {"disk_path": str(tmp_path / "disk"), "disk_capacity": "8MiB"}
    for num in (0, WHOLE):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model",
            quantization_config=TorchAoConfig(quantization.Int8WeightOnlyConfig()),
        )
        right = on_grid(model, IDS)
        with attached(model, **disk) as cache:
            assert are_equal(answer(model, IDS), right)
            assert cache.stats().num_reused_tokens == num
            assert cache.stats().weights == "read"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_packed_weights_are_known_by_this_process_only() -> None:
    """torch.ao's packed weights are no tensors. Activations are scaled per call: refused."""
    from torch.ao.quantization import quantize_dynamic

    model = small_model()
    model.model.layers[1].mlp = quantize_dynamic(model.model.layers[1].mlp, {nn.Linear})
    weights = WeightsInMemory(model)
    found = weights.current()
    assert isinstance(found, Identity)
    assert found.basis is Basis.UNKNOWN
    assert weights.current() == found
    assert WeightsInMemory(model).current() != found
    packed = model.model.layers[1].mlp.up_proj
    packed.set_weight_bias(copy.deepcopy(packed.weight()), packed.bias())
    assert weights.current() != found
    with attached(model) as cache:
        assert "in two parts" in cache.stats().refused
