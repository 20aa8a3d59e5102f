"""Weights that vLLM replaces while it serves: the calls that count, and their effect on a rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.connectors.vllm.shared import rank_weights
from kvtier.connectors.vllm.shared.new_weights import NewWeights
from kvtier.connectors.vllm.shared.rank_weights import (
    NUM_PARAMETERS,
    ParameterWatch,
    digests,
    model_of_caller,
)


class Core:
    """vLLM's engine core with one rank. A call into it may change its model."""

    def __init__(self, model: torch.nn.Module, sleeps: bool = False) -> None:
        self.model = model
        self.num_readings = 0
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        )
        self.model_executor = self

    def get_model(self) -> torch.nn.Module:
        return self.model

    def collective_rpc(self, method: Callable[[Any], Any]) -> list[Any]:
        self.num_readings += 1
        return [method(self)]


class Told:
    """A connector that counts the notices that it gets."""

    def __init__(self) -> None:
        self.num_new_weights = 0
        self.num_emptied = 0

    def reset_for_weights(self) -> None:
        self.num_new_weights += 1

    def pool_was_emptied(self) -> None:
        self.num_emptied += 1


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def weights(told: Told) -> NewWeights:
    made = NewWeights()
    made.watch(told)
    return made


@pytest.fixture
def model() -> torch.nn.Module:
    """Return a model of several dtypes, with sizes that are no multiples of 8 bytes."""
    made = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(7, 1, dtype=torch.bfloat16))
    made.register_buffer("scale", torch.ones((), dtype=torch.float64))
    return made


@pytest.mark.parametrize("method", ["reload_weights", "update_weights", "sleep", "reset_weights"])
def test_calls_that_replace_weights_by_name_are_told_without_reading(
    weights: NewWeights, told: Told, model: torch.nn.Module, method: str
) -> None:
    core: Any = Core(model)
    assert weights.call_ranks(core, method, lambda: "done") == "done"
    assert (told.num_new_weights, core.num_readings) == (1, 0)


def test_unknown_call_is_told_only_if_it_changed_some_weight(
    weights: NewWeights, told: Told, model: torch.nn.Module
) -> None:
    core: Any = Core(model)
    weights.call_ranks(core, "get_status", lambda: None)
    assert told.num_new_weights == 0
    (*_, last) = model.parameters()
    weights.call_ranks(core, "train", lambda: last.data[-1:].add_(1))
    assert told.num_new_weights == 1
    num_readings = core.num_readings
    weights.call_ranks(core, "train", lambda: None)
    assert (told.num_new_weights, core.num_readings) == (2, num_readings), "as it did before"
    weights.call_ranks(core, "get_status", lambda: None)
    assert told.num_new_weights == 2


def test_doubt_is_told(weights: NewWeights, told: Told, model: torch.nn.Module) -> None:
    asleep: Any = Core(model, sleeps=True)
    weights.call_ranks(asleep, lambda _: None, lambda: None)
    assert (told.num_new_weights, asleep.num_readings) == (1, 0), "its weights can't be read"
    broken: Any = Core(torch.nn.Linear(2, 2, device="meta"))
    weights.call_ranks(broken, "get_status", lambda: None)
    assert told.num_new_weights == 2

    def fail() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        weights.call_ranks(Core(model), "another", fail)
    assert told.num_new_weights == 3


def test_calls_that_leave_weights_cost_nothing(
    weights: NewWeights, told: Told, model: torch.nn.Module
) -> None:
    core: Any = Core(model)
    weights.call_ranks(core, "check_health", lambda: None)
    assert (told.num_new_weights, core.num_readings) == (0, 0)


@pytest.mark.parametrize("is_empty", [True, False])
def test_pool_counts_as_emptied_only_if_vllm_says_so(
    weights: NewWeights, told: Told, model: torch.nn.Module, is_empty: bool
) -> None:
    core: Any = Core(model)
    assert weights.reset_pool(core, lambda: is_empty) is is_empty
    assert told.num_emptied == is_empty


def test_digests_show_every_element(model: torch.nn.Module, monkeypatch: Any) -> None:
    monkeypatch.setattr(rank_weights, "PIECE_WORDS", 8)
    rank_weights._factors.cache_clear()
    try:
        before = digests(Core(model))
        assert before == digests(Core(model))
        for tensor in (*model.parameters(), *model.buffers()):
            for at in range(tensor.numel()):
                held = tensor.detach().clone()
                tensor.data.view(-1)[at] += 1
                assert digests(Core(model)) != before
                tensor.data.copy_(held)
        assert digests(Core(model)) == before
        first = next(model.parameters())
        first.data.copy_(first.data.flip(0))
        assert digests(Core(model)) != before, "other places"
    finally:
        rank_weights._factors.cache_clear()


def _replace(model: Any) -> None:
    model[0].weight = torch.nn.Parameter(model[0].weight.detach().clone())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.data.add_(1),
        lambda model: model[1].bias.data.fill_(float("nan")),
        lambda model: model[0].weight.detach()[0, 0].copy_(model[0].weight[0, 0].detach()),
        _replace,
    ],
    ids=["data", "nan", "version", "replaced"],
)
def test_look_finds_a_change_once(
    model: torch.nn.Module, change: Callable[[torch.nn.Module], object]
) -> None:
    watch = ParameterWatch(model)
    for _ in range(3):
        look = watch.look()
        assert look is not None
        assert not look.has_changed
    change(model)
    changed, after = watch.look(), watch.look()
    assert changed is not None
    assert after is not None
    assert (changed.has_changed, after.has_changed) == (True, False)


def test_all_parameters_have_their_turn_and_a_look_reads_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(NUM_PARAMETERS + 1))
    watch = ParameterWatch(model)
    watch.look()
    read: list[torch.Tensor] = []
    samples = rank_weights._samples

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        read.append(tensor)
        return samples(tensor)

    monkeypatch.setattr(rank_weights, "_samples", noted)
    sizes = []
    for _ in range(3):
        before = len(read)
        watch.look()
        sizes.append(len(read) - before)
    assert max(sizes) == NUM_PARAMETERS
    assert {id(each) for each in read} == {id(parameter) for parameter in model.parameters()}


def test_watch_keeps_no_parameter_alive() -> None:
    model = torch.nn.Linear(2, 2)
    watch = ParameterWatch(model)
    watch.look()
    reference = weakref.ref(model.weight)
    del model
    gc.collect()
    assert reference() is None
    look = watch.look()
    assert look is not None
    assert look.has_changed


def test_weights_that_the_scheduler_knows_of_are_no_change() -> None:
    model = torch.nn.Linear(2, 2)
    watch = ParameterWatch(model)
    watch.look()
    model.weight.data.add_(1)
    watch.begin_anew()
    look = watch.look()
    assert look is not None
    assert not look.has_changed


def test_model_is_found_where_its_runner_registers_the_kv(model: torch.nn.Module) -> None:
    class Runner:
        def get_model(self) -> torch.nn.Module:
            return model

        def register(self) -> torch.nn.Module | None:
            return Connector().register_kv_caches()

    class Connector:
        def register_kv_caches(self) -> torch.nn.Module | None:
            return model_of_caller()

    assert Runner().register() is model
    assert model_of_caller() is None
