"""Adapters of PEFT: KV is found by the weights in effect, however they were set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.connectors.transformers.models import answer, are_equal, on_grid, small_model
from tests.connectors.transformers.test_attach import attached, on_grid_of_a_copy
from tests.connectors.transformers.test_weights import IDS, WHOLE, reused

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of names in transformers
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

TARGETS = ["q_proj", "v_proj", "up_proj"]


def lora(**changes: Any) -> Any:
    """Return a configuration whose adapters change answers from the start."""
    settings = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False}
    return peft.LoraConfig(**settings | changes)


def adapted() -> Any:
    """Return a model with the adapters "one", which is active, and "two"."""
    model = small_model()
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, lora(), adapter_name="one")
    wrapped.add_adapter("two", lora(r=8))
    return wrapped.eval()


def scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling["one"] *= 2


def combined(model: Any) -> None:
    model.add_weighted_adapter(["one", "two"], [0.5, 0.5], "both", combination_type="cat")
    model.set_adapter("both")


def deleted(model: Any) -> None:
    model.set_adapter("two")
    model.delete_adapter("one")


def merged_and_back(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()  # to weights that were rounded


def trained(model: Any) -> None:
    optimiser = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], 0.1
    )
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    model.eval()


CHANGES: dict[str, Callable[[Any], object]] = {
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "switched": lambda model: model.set_adapter("two"),
    "scaled": scaled,
    "combined": combined,
    "deleted": deleted,
    "merged": lambda model: model.merge_adapter(),
    "merged and back": merged_and_back,
    "unloaded": lambda model: model.unload(),
    "merged and unloaded": lambda model: model.merge_and_unload(),
    "trained": trained,
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_in_effect_find_nothing(change: str) -> None:
    model = adapted()
    with attached(model) as cache:
        assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
        CHANGES[change](model)
        base = model.get_base_model()
        assert (reused(base, cache), reused(base, cache)) == (0, WHOLE)


def test_an_adapter_that_comes_back_finds_its_kv() -> None:
    model = adapted()
    with attached(model, audit=1.0) as cache:
        for name, num in (("one", 0), ("two", 0), ("one", WHOLE)):
            model.set_adapter(name)
            assert reused(model, cache) == num, name
        model.base_model.disable_adapter_layers()
        assert reused(model, cache) == 0
        model.base_model.enable_adapter_layers()
        for name in ("one", "two", "one"):
            model.set_adapter(name)
            assert reused(model, cache) == WHOLE, name
        with model.disable_adapter():
            assert reused(model, cache) == WHOLE
        assert reused(model, cache) == WHOLE
        assert cache.stats().audits == {"equal": 6}


def test_an_idle_adapter_hides_no_weight_of_its_name() -> None:
    model = small_model()
    wrapped = peft.get_peft_model(model, lora(), adapter_name="one")
    wrapped.add_adapter("weight", lora())
    with attached(wrapped.eval()) as cache:
        assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.base_layer.weight[3] *= 2
        assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)


def test_a_model_answers_as_the_plain_one_without_its_adapters() -> None:
    model = small_model()
    plain = on_grid(model, IDS)
    with attached(model) as cache:
        assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
        wrapped = peft.get_peft_model(model, lora()).eval()
        with wrapped.disable_adapter():
            assert are_equal(answer(wrapped, IDS), plain)
        assert not are_equal(answer(wrapped, IDS), plain)
        wrapped.unload()
        assert are_equal(answer(model, IDS), plain)


def test_a_hot_swapped_adapter_finds_nothing_of_the_one_before(tmp_path: Path) -> None:
    hotswap = pytest.importorskip("peft.utils.hotswap")
    for seed in (1, 2):
        model = small_model()
        torch.manual_seed(seed)
        peft.get_peft_model(model, lora()).save_pretrained(tmp_path / str(seed))
    model = peft.PeftModel.from_pretrained(small_model(), tmp_path / "1")
    hotswap.prepare_model_for_compiled_hotswap(
        model, target_rank=8
    )  # swaps are in place from now on
    with attached(model) as cache:
        assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
        for seed, num in ((2, 0), (1, WHOLE), (2, WHOLE)):
            hotswap.hotswap_adapter(model, str(tmp_path / str(seed)), adapter_name="default")
            assert reused(model, cache) == num


def test_adapters_of_transformers_itself(tmp_path: Path) -> None:
    torch.manual_seed(1)
    peft.get_peft_model(small_model(), lora()).save_pretrained(tmp_path)
    model = small_model()
    with attached(model) as cache:
        assert (reused(model), reused(model)) == (0, WHOLE)
        model.load_adapter(str(tmp_path), adapter_name="one")
        assert (reused(model), reused(model)) == (0, WHOLE)
        model.add_adapter(lora(r=2), adapter_name="two")
        model.set_adapter("two")
        assert (reused(model), reused(model)) == (0, WHOLE)
        model.set_adapter("one")
        assert reused(model) == WHOLE
        model.disable_adapters()
        assert (reused(model), reused(model)) == (0, WHOLE)
        assert not cache.stats().passed


def test_adapters_of_one_name_find_their_own_kv_on_disk(tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path), "disk_capacity": "8MiB"}
    for seed, num in ((1, 0), (2, 0), (1, WHOLE)):
        model = small_model()
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, lora()).eval()
        with attached(wrapped, **disk) as cache:
            assert reused(wrapped, cache) == num
            assert cache.stats().weights == "read"


def test_rows_of_a_batch_with_adapters_of_their_own_are_passed_through() -> None:
    model = adapted()
    ids = IDS.repeat(3, 1)
    names = {"adapter_names": ["one", "two", "__base__"]}
    alone = answer(model, ids, **names)
    with attached(model) as cache:
        assert reused(model, cache) == 0
        assert are_equal(answer(model, ids, **names), alone)
        assert dict(cache.stats().passed) == {"forward hooks": 1}
        assert reused(model, cache) == WHOLE


@pytest.mark.parametrize(
    "config",
    [
        lambda: lora(use_dora=True),
        lambda: lora(use_rslora=True),
        lambda: lora(lora_dropout=0.1),
        lambda: lora(target_modules=["embed_tokens", "lm_head"]),
        lambda: lora(trainable_token_indices=[3, 5]),
        lambda: peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        lambda: peft.VeraConfig(r=8, target_modules=["q_proj"], init_weights=False),
        lambda: peft.OFTConfig(r=4, oft_block_size=0, target_modules=["q_proj"]),
    ],
    ids=["dora", "rslora", "dropout", "embedding", "tokens", "ia3", "vera", "oft"],
)
def test_other_kinds_of_adapters_answer_as_they_would_alone(config: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    model = peft.get_peft_model(small_model(), config()).eval()
    right = on_grid(model, IDS)
    with attached(model) as cache:
        for _ in range(2):
            assert are_equal(answer(model, IDS), right)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "base_layer" not in name and weight.requires_grad:
                    weight.add_(0.1)
        assert are_equal(answer(model, IDS), on_grid_of_a_copy(model, IDS))
        assert cache.stats().num_reused_tokens == WHOLE
        assert not cache.stats().passed


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_learned_prompts_are_passed_through(kind: str) -> None:
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    torch.manual_seed(1)
    model = peft.get_peft_model(small_model(), config).eval()
    right = answer(model, IDS)
    with attached(model) as cache:
        for _ in range(2):
            assert are_equal(answer(model, IDS), right)
        assert cache.stats().num_prompts == 0


def test_an_adapter_is_found_again_beside_others(tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path), "disk_capacity": "8MiB"}
    with attached(adapted(), **disk) as cache:
        assert reused(cache.model, cache) == 0
    model = adapted()
    torch.manual_seed(7)
    model.add_adapter("three", lora(r=2))
    model.delete_adapter("two")
    with attached(model, **disk) as cache:
        assert reused(model, cache) == WHOLE
        model.set_adapter("three")
        assert reused(model, cache) == 0
