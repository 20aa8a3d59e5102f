"""KV is found by the weights that a model computes with, however they were changed."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.connectors.transformers.reach import ModelReach
from kvtier.connectors.transformers.weights_in_memory import (
    TensorContents,
    WeightsInMemory,
    _device_checksum,
    _digest,
)
from tests.connectors.transformers.models import answer, are_equal, on_grid, prompt, small_model
from tests.connectors.transformers.test_attach import attached, on_grid_of_a_copy

pytestmark = pytest.mark.engine

IDS = prompt(0)
WHOLE = 96
"""Tokens of the prompt that are found if its KV is known."""
NAME = "model.layers.1.mlp.up_proj.weight"


def reused(model: Any, cache: Any = None) -> int:
    """Return the tokens that an answer reuses. It equals that of a copy that is not attached."""
    cache = cache or model.kvtier
    before = cache.stats().num_reused_tokens
    assert are_equal(answer(model, IDS), on_grid_of_a_copy(model, IDS))
    found: int = cache.stats().num_reused_tokens - before
    return found


# -- changes -------------------------------------------------------------------------------------


def step_of_an_optimiser(model: Any) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    model.eval()


def average(model: Any) -> None:
    """Do what libraries for training do: change ``data`` in place."""
    for weight, other in zip(model.parameters(), small_model(5).parameters(), strict=True):
        weight.data.mul_(0.999).add_(other.data, alpha=0.001)


def two_new_storages(model: Any) -> None:
    weight = model.get_parameter(NAME)
    for _ in range(2):
        weight.data = weight.data * 1.5  # the second may be where the first was


def another_method(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 0.9, mlp)


CHANGES: dict[str, Callable[[Any], object]] = {
    "other state dict": lambda model: model.load_state_dict(small_model(5).state_dict()),
    "average": average,
    "rounded": lambda model: model.half().float(),
    "two new storages": two_new_storages,
    "another method": another_method,
    "buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(1.01),
}
OF_GRADIENTS: dict[str, Callable[[Any], object]] = {
    "step of an optimiser": step_of_an_optimiser,
    "assigned state dict": lambda model: model.load_state_dict(
        small_model(5).state_dict(), assign=True
    ),
}


def check_that_nothing_is_found(change: Callable[[Any], object]) -> None:
    model = small_model()
    with attached(model):
        assert (reused(model), reused(model)) == (0, WHOLE)
        change(model)
        assert (reused(model), reused(model)) == (0, WHOLE)


@pytest.mark.parametrize("change", [*CHANGES, *OF_GRADIENTS])
def test_a_changed_model_finds_nothing(change: str) -> None:
    check_that_nothing_is_found({**CHANGES, **OF_GRADIENTS}[change])


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_of_inference_tensors_finds_nothing(change: str) -> None:
    with torch.inference_mode():  # such tensors have no versions
        check_that_nothing_is_found(CHANGES[change])


class Scaled(torch.nn.Module):
    """A layer with a weight that is a plain attribute."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scales = [torch.ones(1)]

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden) * self.scales[0]


def test_a_tensor_that_is_a_plain_attribute_is_a_weight() -> None:
    model = small_model()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    with attached(model) as cache:
        assert (reused(model), reused(model)) == (0, WHOLE)
        model.model.layers[0].mlp.scales[0] = torch.full((1,), 0.9)
        assert (reused(model), reused(model)) == (0, WHOLE)
        assert cache.stats().weights == "read"


def reading_method(model: Any) -> None:
    """Set a method that reads what its code does not name."""
    mlp = model.model.layers[0].mlp
    factors = {"NAME": 0.9}

    def forward(self: Any, x: torch.Tensor) -> Any:
        return type(self).forward(self, x) * eval("factors['NAME']", {"factors": factors})

    mlp.forward = types.MethodType(forward, mlp)


@pytest.mark.parametrize(
    ("change", "num", "basis"), [(another_method, WHOLE, "read"), (reading_method, 0, "unknown")]
)
def test_code_that_looks_things_up_is_found_by_this_process_only(
    change: Callable[[Any], None], num: int, basis: str, tmp_path: Path
) -> None:
    disk = {"disk_path": str(tmp_path), "disk_capacity": "8MiB"}
    for expected in (0, num):
        model = small_model()
        change(model)
        with attached(model, **disk) as cache:
            assert (reused(model), reused(model)) == (expected, WHOLE)
            assert cache.stats().weights == basis


def test_settings_of_generation_and_moves_change_nothing() -> None:
    model = small_model()
    with attached(model):
        assert reused(model) == 0
        model.generation_config.temperature = 0.5
        model.to("cpu")
        model.float()
        assert reused(model) == WHOLE


@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_weights_are_read_once_and_change_together(is_tied: bool) -> None:
    model = small_model(tie_word_embeddings=is_tied)
    marks = TensorContents(
        {"in": model.get_input_embeddings().weight, "out": model.lm_head.weight}
    ).marks
    assert len({*marks.values()}) == 2 - is_tied
    with attached(model):
        assert (reused(model), reused(model)) == (0, WHOLE)
        with torch.no_grad():
            model.lm_head.weight[7] += 1
        assert (reused(model), reused(model)) == (0, WHOLE)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        assert reused(model) in (0, WHOLE)


def test_only_changed_tensors_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    weights = WeightsInMemory(model)
    read: list[torch.Tensor] = []

    def digest(tensor: torch.Tensor, threads: int) -> bytes:
        read.append(tensor)
        return _digest(tensor, threads)

    monkeypatch.setattr("kvtier.connectors.transformers.weights_in_memory._digest", digest)
    first = weights.current()
    assert len(read) == len(ModelReach(model).tensors)
    read.clear()
    model.model.layers[0].self_attn.scaling *= 2
    assert weights.current() != first
    assert not read
    model.model.layers[0].self_attn.scaling /= 2
    with torch.no_grad():
        model.get_parameter(NAME)[3, 5] += 1
    assert weights.current() != first
    assert len(read) == 1


def test_equal_models_have_one_identity() -> None:
    one, other = WeightsInMemory(small_model()).current(), WeightsInMemory(small_model()).current()
    assert one == other
    assert WeightsInMemory(small_model(1)).current() != one


def test_layers_out_of_order_in_memory_are_read() -> None:
    weight = torch.arange(1000.0).view(10, 100)
    for tensor in (weight.t(), weight[:, ::2], weight[3:4].expand(5, 100), weight[:0]):
        model: Any = torch.nn.Linear(1, 1)
        model.weight = torch.nn.Parameter(tensor)
        before = TensorContents(dict(model.named_parameters()))
        assert before.is_same()
        weight.data.add_(1)
        is_same = before.is_same()
        assert is_same == (tensor.numel() == 0)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_of_other_layouts_fail_no_prompt() -> None:
    model = small_model()
    model.register_buffer("sparse", torch.eye(4).to_sparse())
    model.register_buffer("rows", torch.eye(4).to_sparse_csr())
    model.register_buffer("nothing", torch.empty(0, 3))
    right = on_grid(model, IDS)
    with attached(model) as cache:
        assert are_equal(answer(model, IDS), right)
        assert are_equal(answer(model, IDS), right)
        assert cache.stats().num_reused_tokens == WHOLE
        assert cache.stats().weights == "read"


def test_a_model_of_another_dtype_is_passed_through_until_it_is_attached_again() -> None:
    model = small_model()
    with attached(model) as cache:
        assert (reused(model), reused(model)) == (0, WHOLE)
        model.to(torch.bfloat16)
        alone = answer(model, IDS)
        assert are_equal(answer(model, IDS), alone)
        [(reason, num)] = cache.stats().passed.items()
        assert "another dtype" in reason
        assert num == 2
        model.float()
        assert (reused(model), reused(model)) == (0, WHOLE)  # it was rounded meanwhile
    model.to(torch.bfloat16)
    with attached(model):
        assert (reused(model), reused(model)) == (0, WHOLE)


def test_dropout_is_no_reuse() -> None:
    model = small_model()
    dropout = torch.nn.Dropout(0.5).eval()
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, dropout)
    with attached(model) as cache:
        assert (reused(model), reused(model)) == (0, WHOLE)
        dropout.train()  # as that of an adapter that was added after ``model.eval()``
        answer(model, IDS)
        assert dict(cache.stats().passed) == {"a dropout is in training mode": 1}
        dropout.p = 0.0
        assert (reused(model), reused(model)) == (0, WHOLE)


@pytest.mark.parametrize("num_columns", [3, 1024, 5000])
def test_a_checksum_on_a_device_differs_after_any_change_of_a_row(num_columns: int) -> None:
    weight = torch.randn(40, num_columns, generator=torch.Generator().manual_seed(0))
    before = _device_checksum(weight)
    assert _device_checksum(weight.clone()) == before
    changed = [weight.clone() for _ in range(3)]
    changed[0][7, 2] += 1e-3
    changed[1][[3, 5]] = changed[1][[5, 3]]
    changed[2][:, [0, 1]] = changed[2][:, [1, 0]]
    assert len({before, *map(_device_checksum, changed)}) == 4
    for part in (weight[:0], weight[1:, 1:], weight.half()[0, 1:], torch.tensor(True)):
        assert _device_checksum(part) == _device_checksum(part.clone())


class Failing:
    """An object whose attributes can't be read."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_a_model_that_cannot_be_read_is_passed_through() -> None:
    model = small_model()
    vars(model)["failing"] = Failing()
    alone = answer(model, IDS)
    with attached(model) as cache:
        assert are_equal(answer(model, IDS), alone)
        [reason] = cache.stats().passed
        assert "the model can't be read" in reason
