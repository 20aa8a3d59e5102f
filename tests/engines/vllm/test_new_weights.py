"""A real vLLM whose weights are replaced while it serves gets no KV of the old ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engines.vllm.engines import (
    BLOCK,
    MODEL,
    Answer,
    Connects,
    are_close,
    engine,
    one_by_one,
    prompt,
)
from tests.kit.nodes import running

PROMPTS = [prompt(1700 + seed, 4 * BLOCK + 50) for seed in range(2)]
TIERS = ("disk", "node")
ALL = [4 * BLOCK] * len(PROMPTS)
NONE = [0] * len(PROMPTS)


def _replace_files(model: Path, layers: tuple[str, ...] = ("",)) -> None:
    """Change what K and V of some layers are made with."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if any(layer in name for layer in layers) and (".k_proj." in name or ".v_proj." in name):
            tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(MODEL, tmp_path / "model")


@pytest.fixture(scope="module")
def answers_of_others(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Return vLLM's own answers with the other weights."""
    folder = shutil.copytree(MODEL, tmp_path_factory.mktemp("others") / "model")
    _replace_files(folder)
    with engine(None, folder) as llm:
        return [answer for _, answer in one_by_one(llm, PROMPTS)]


@contextmanager
def _settings(tmp_path: Path, tier: str) -> Iterator[dict[str, object]]:
    """Yield the settings of host memory and a disk, of the engine's own or a node's."""
    folder = str(tmp_path / "disk")
    if tier == "disk":
        yield {"host_capacity": "64MiB", "disk_path": folder, "disk_capacity": "64MiB"}
        return
    with running(tmp_path, "--disk-path", folder, "--disk-capacity=64MiB", segments=256) as node:
        yield {"node": str(node.socket), "node_deadline_s": 1.0}


def _run(llm: Any) -> tuple[list[int], list[Answer]]:
    found = one_by_one(llm, PROMPTS)
    return [cached for cached, _ in found], [answer for _, answer in found]


def _equal(answers: list[Answer], expected: list[Answer]) -> bool:
    return all(are_close(*pair) for pair in zip(answers, expected, strict=True))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tier", TIERS)
def test_reloaded_weights_never_meet_kv_of_the_old_ones(
    tmp_path: Path, model: Path, connects: Connects, tier: str, answers_of_others: list[Answer]
) -> None:
    with _settings(tmp_path, tier) as settings:
        config = connects(**settings)
        with engine(config, model) as llm:
            _, old = _run(llm)
            assert llm.reset_prefix_cache()
            assert _run(llm)[0] == ALL, "kvtier has it"
            llm.collective_rpc("reset_mm_cache")  # one that kvtier does not know
            assert llm.reset_prefix_cache()
            assert _run(llm)[0] == ALL, "a call that changes nothing"

            _replace_files(model)
            llm.collective_rpc("reload_weights")
            assert _run(llm)[0] == ALL, "vLLM's own memory, which nobody has emptied"
            assert llm.reset_prefix_cache()
            found, answers = _run(llm)
            assert found == NONE, "what came from vLLM's own memory is not kept"
            assert _equal(answers, answers_of_others)
            assert not _equal(answers, old)
            assert llm.reset_prefix_cache()
            found, answers = _run(llm)
            assert (found, _equal(answers, answers_of_others)) == (ALL, True)
        shutil.copytree(MODEL, model, dirs_exist_ok=True)
        with engine(config, model) as llm:
            found, answers = _run(llm)
            assert _equal(answers, old), "after a restart with the first files"
            assert found == (NONE if tier == "disk" else ALL)


@pytest.mark.timeout(900)
def test_rank_notices_weights_that_were_written_past_the_engine_core(
    tmp_path: Path, model: Path, connects: Connects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with _settings(tmp_path, "disk") as settings, engine(connects(**settings), model) as llm:
        _, old = _run(llm)
        assert llm.reset_prefix_cache()
        assert _run(llm)[0] == ALL, "kvtier has it"
        ranks = llm.llm_engine.model_executor
        ranks.collective_rpc(_flip)
        assert llm.reset_prefix_cache()
        found, new = _run(llm)
        assert found[1] == 0, "the first load shows it, and fails"
        assert llm.reset_prefix_cache()
        found, again = _run(llm)
        assert _equal(again, new)
        assert not _equal(new, old)


def _flip(worker: Any) -> None:
    """Write other weights as vLLM's loaders do, which leaves no trace in a tensor's version."""
    for name, parameter in worker.get_model().named_parameters():
        if "embed_tokens" in name:  # on a CPU those of linear layers are copies in another layout
            parameter.data.copy_(parameter.data.flip(0))
