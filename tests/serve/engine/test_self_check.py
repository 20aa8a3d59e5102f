"""The self-check: what a runner computes otherwise than transformers is noticed in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.connectors.transformers import cache_layers
from kvtier.connectors.transformers.cache_layers import CacheLayers, Piece
from kvtier.core.errors import ConfigError
from kvtier.serve.engine import Engine
from kvtier.serve.engine.attention import AttentionParams
from kvtier.serve.engine.batch import BatchKV
from kvtier.serve.engine.models import LoadedModel, load_model
from kvtier.serve.engine.paged import PagedKV, PromptKV
from kvtier.serve.engine.runner import ModelRunner
from kvtier.serve.engine.self_check import (
    SelfCheck,
    WrongModelError,
    check_model,
    choose_runner,
    examine,
)
from scripts.model_coverage import BLOCK, CHUNK, WINDOW, attempt, kinds, save
from tests.serve.engine.conftest import changed

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
WINDOWED = "mistral, window"
DTYPES = ["float32", "bfloat16", "float16"]
DIFFER = r"differ from transformers' own by \d\.\de[+-]\d\d of"

Mutate = Callable[[pytest.MonkeyPatch, Callable[[torch.dtype], bool]], None]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], LoadedModel]:
    """Return small models by kind and dtype; each is loaded once."""
    folder = tmp_path_factory.mktemp("models")
    found: dict[tuple[str, str], LoadedModel] = {}

    def load(name: str, dtype: str) -> LoadedModel:
        path = folder / name
        if not path.exists():
            save(name, kinds()[name], path)
        if (name, dtype) not in found:
            found[name, dtype] = load_model(str(path), CPU, dtype)
        return found[name, dtype]

    return load


def check(model: LoadedModel) -> SelfCheck:
    return check_model("it", model, BLOCK, CHUNK, 2 * WINDOW + CHUNK)


def choose(model: LoadedModel) -> LoadedModel:
    chosen, _ = choose_runner("it", model, BLOCK, CHUNK, lambda model: 300)
    return chosen


# -- mutations -------------------------------------------------------------------------------------


def form(change: Callable[[AttentionParams], AttentionParams], *kinds: type[PagedKV]) -> Mutate:
    """Attend with changed attention parameters."""

    def mutate(patch: pytest.MonkeyPatch, is_meant: Callable[[torch.dtype], bool]) -> None:
        for kind in kinds or (PromptKV, BatchKV):
            patch.setattr(kind, "attend", changed_attend(kind.attend, is_meant))

    def changed_attend(attend: Any, is_meant: Callable[[torch.dtype], bool]) -> Any:
        def attend_changed(
            self: Any, layer: int, query: torch.Tensor, key: Any, value: Any, own: AttentionParams
        ) -> Any:
            params = change(own) if is_meant(query.dtype) else own
            return attend(self, layer, query, key, value, params)

        return attend_changed

    return mutate


def lost_state(patch: pytest.MonkeyPatch, is_meant: Callable[[torch.dtype], bool]) -> None:
    """Continue a recurrent layer from nothing at the edges of chunks."""
    restore = CacheLayers.restore_states

    def restore_nothing(self: CacheLayers, cache: Any, blocks: torch.Tensor, slots: Any) -> None:
        is_lost = is_meant(self._made_for[0])
        restore(self, cache, torch.zeros_like(blocks) if is_lost else blocks, slots)

    patch.setattr(CacheLayers, "restore_states", restore_nothing)


def lost_window(patch: pytest.MonkeyPatch, is_meant: Callable[[torch.dtype], bool]) -> None:
    """Restore nothing of layers with a window."""
    put = CacheLayers._put

    def put_zeros(cache: Any, piece: Piece, tensor: torch.Tensor, num_tokens: int) -> None:
        is_lost = piece.window and is_meant(piece.dtype)
        put(cache, piece, torch.zeros_like(tensor) if is_lost else tensor, num_tokens)

    patch.setattr(CacheLayers, "_put", staticmethod(put_zeros))


def one_position(patch: pytest.MonkeyPatch, is_meant: Callable[[torch.dtype], bool]) -> None:
    """Decode all sequences of a batch at the position of the longest one."""
    forward = ModelRunner._forward

    def forward_at_one(
        self: ModelRunner, ids: torch.Tensor, positions: torch.Tensor, kv: PagedKV, keep: Any
    ) -> torch.Tensor:
        if isinstance(kv, BatchKV) and is_meant(self._model.dtype):
            positions = positions.max().expand(len(positions))
        return forward(self, ids, positions, kv, keep)

    patch.setattr(ModelRunner, "_forward", forward_at_one)


MUTATIONS: dict[str, tuple[str, Mutate]] = {
    "lost state": ("lfm2", lost_state),
    "lost state, delta rule": ("qwen3_next", lost_state),
    "lost window, layers": ("mimo_v2_flash", lost_window),
    "no window": (WINDOWED, form(lambda own: replace(own, window=0))),
    "shorter window": (WINDOWED, form(lambda own: replace(own, window=own.window - 1))),
    "no soft cap": ("gemma2", form(lambda own: replace(own, softcap=0.0))),
    "no sinks": ("gpt_oss", form(lambda own: replace(own, sinks=None))),
    "scale": ("qwen3", form(lambda own: replace(own, scaling=own.scaling * 1.1))),
    "one position": ("qwen3", one_position),
    "shorter window in batches": (
        WINDOWED,
        form(lambda own: replace(own, window=own.window - 1), BatchKV),
    ),
    "no soft cap in batches": ("gemma2", form(lambda own: replace(own, softcap=0.0), BatchKV)),
    "no sinks in batches": ("gpt_oss", form(lambda own: replace(own, sinks=None), BatchKV)),
    "scale in batches": (
        "qwen3",
        form(lambda own: replace(own, scaling=own.scaling * 1.1), BatchKV),
    ),
}
"""Faults of a runner, and a kind of model for each."""

IN_ROUNDING = {
    "float16": ("shorter window", "scale"),
    "bfloat16": ("shorter window", "scale", "no soft cap", "no sinks"),
}
"""Mutations whose effect on these small models is below the rounding of a dtype."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted({name for name, _ in MUTATIONS.values()}))
def test_a_model_that_is_computed_as_by_transformers_passes(
    loaded: Callable[[str, str], LoadedModel], name: str, dtype: str
) -> None:
    found = check(loaded(name, dtype))
    assert found.num_tokens > 2 * WINDOW
    assert found.difference < found.tolerance * (0.1 if dtype == "float32" else 0.8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_mutation_is_noticed_in_every_dtype(
    loaded: Callable[[str, str], LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    mutation: str,
    dtype: str,
) -> None:
    name, mutate = MUTATIONS[mutation]
    model = loaded(name, dtype)
    mutate(monkeypatch, lambda _: True)
    with pytest.raises(WrongModelError, match=f"{DIFFER}|reads more tokens than the window"):
        check(model)


@pytest.mark.parametrize(
    ("mutation", "dtype"),
    [
        (mutation, dtype)
        for dtype, small in IN_ROUNDING.items()
        for mutation in MUTATIONS
        if not mutation.startswith(small)
    ],
)
def test_a_mutation_of_16_bits_alone_is_noticed_against_float32(
    loaded: Callable[[str, str], LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    mutation: str,
    dtype: str,
) -> None:
    name, mutate = MUTATIONS[mutation]
    model = loaded(name, dtype)
    mutate(monkeypatch, lambda computed: computed is not torch.float32)
    with pytest.raises(WrongModelError, match=f"{DIFFER}|reads more tokens than the window"):
        check(model)


# -- another runner --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["blenderbot-small", "plbart"])
def test_what_paged_attention_computes_otherwise_is_served_by_the_other_runner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, dtype: str
) -> None:
    """These models take the position from the cache, but the tokens of a batch have several."""
    save(name, kinds()[name], tmp_path / "model")
    outcome = attempt(name, tmp_path / "model", tmp_path / "disk", dtype)
    assert outcome.served == "layers"
    assert not outcome.is_wrong, outcome
    assert "because with paged attention its logits" in caplog.text


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_no_runner_computes_is_refused_in_every_dtype(
    loaded: Callable[[str, str], LoadedModel], dtype: str
) -> None:
    """transformers drops Jamba's state if several tokens follow it."""
    with pytest.raises(ConfigError, match=DIFFER):
        choose(loaded("jamba", dtype))


def test_a_model_whose_buffers_are_made_while_it_runs_is_served_in_16_bits(
    loaded: Callable[[str, str], LoadedModel],
) -> None:
    assert choose(loaded("ctrl", "bfloat16")).profile.runner_name == "paged"


def test_an_engine_whose_paged_attention_is_wrong_serves_by_the_other_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("qwen3", "qwen3", tmp_path / "model")
    MUTATIONS["scale"][1](monkeypatch, lambda _: True)
    config = changed(model=str(tmp_path / "model"), threads=1, max_model_tokens=300)
    with Engine(config) as engine:
        assert engine.profile.runner_name == "layers"
        assert engine.check.difference < 1e-4
    found = {finding.topic: finding.note for finding in examine(config.model, "cpu")}
    assert "because with paged attention its logits" in found["served"]


# -- float32 ---------------------------------------------------------------------------------------


def test_a_check_in_float32_leaves_the_weights_as_they_were(
    loaded: Callable[[str, str], LoadedModel],
) -> None:
    model = loaded("qwen3", "bfloat16")
    before = [(weight, weight.clone()) for weight in model.module.parameters()]
    check(model)
    for weight, (same, copy) in zip(model.module.parameters(), before, strict=True):
        assert weight is same
        assert torch.equal(weight, copy)


def limit_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    left = cache_layers.RESERVE_BYTES + num_bytes
    monkeypatch.setattr(cache_layers, "available_bytes", lambda: (left, "a limit"))


@pytest.mark.parametrize("name", ["qwen3", "zamba2"])
def test_with_little_memory_one_layer_at_a_time_is_in_float32(
    loaded: Callable[[str, str], LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    model = loaded(name, "bfloat16")
    expected = check(model)
    most = sum(2 * weight.nbytes for weight in model.module.parameters())
    limit_memory(monkeypatch, most - 1)
    assert check(model).difference == expected.difference
    MUTATIONS["scale"][1](monkeypatch, lambda computed: computed is torch.float32)
    if model.profile.runner_name == "paged":
        with pytest.raises(WrongModelError, match=DIFFER):
            check(model)
    assert "only" not in caplog.text
    assert all(weight.dtype is torch.bfloat16 for weight in model.module.parameters())
    assert not any(layer._forward_pre_hooks for layer in model.module.modules())


def test_without_memory_for_float32_a_model_is_checked_as_it_is(
    loaded: Callable[[str, str], LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit_memory(monkeypatch, 0)
    check(loaded("qwen3", "bfloat16"))
    assert "checked in bfloat16 only" in caplog.text
    assert "0.0 GiB in float32, and 1.0 GiB are left" in caplog.text
    MUTATIONS["lost state"][1](monkeypatch, lambda _: True)
    with pytest.raises(WrongModelError, match=DIFFER):
        check(loaded("lfm2", "bfloat16"))
