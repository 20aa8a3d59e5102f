"""A real vLLM with ``KvtierConnector``, and models whose layers keep unlike KV: from every tier."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.vllm.engines import BLOCK, count, engine, one_by_one, own_connector, prompt, run
from tests.engines.vllm.shapes import SHAPES, options_of, save_random
from tests.kit.nodes import running

NUM_BLOCKS = 7
PROMPTS = [prompt(seed, NUM_BLOCKS * BLOCK + 50) for seed in range(3)]
SIZES: dict[str, object] = {"host_capacity": "64MiB"}


def _kill(llm: Any) -> None:
    """Kill the engine and its ranks once all blocks are on disk."""
    for seed in range(100, 160):
        used = [count("vllm:kvtier_used_chunks", tier=tier) for tier in ("host", "disk")]
        if used[0] == used[1] > 0:
            break
        run(llm, prompt(seed, 20))
    else:
        pytest.fail(f"{used} blocks are in host memory and on disk")
    for process in psutil.Process().children(recursive=True):
        if any(part in " ".join(process.cmdline()) for part in ("EngineCore", "Worker")):
            os.kill(process.pid, signal.SIGKILL)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SHAPES)
def test_shape_comes_from_host_and_from_disk_after_a_kill(shape: str, tmp_path: Path) -> None:
    save_random(SHAPES[shape], tmp_path / "model")
    slab = str(tmp_path / "slab")
    config = own_connector(disk_path=slab, disk_capacity="64MiB", **SIZES)
    with engine(config, tmp_path / "model", **options_of(shape)) as llm:
        cold = one_by_one(llm, PROMPTS)
        on_device = one_by_one(llm, PROMPTS)
        # Blocks are longer where a state takes more than the KV of 128 tokens.
        assert all(cached >= 5 * BLOCK for cached, _ in on_device)
        assert llm.reset_prefix_cache()
        assert one_by_one(llm, PROMPTS) == on_device
        _kill(llm)
    assert len({tuple(answer[0]) for _, answer in cold}) == 3, "every prompt is answered alike"
    with engine(config, tmp_path / "model", **options_of(shape)) as llm:
        assert one_by_one(llm, PROMPTS) == on_device


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["store", "node"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shape_comes_from_what_another_engine_has_left(
    shape: str, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    save_random(SHAPES[shape], tmp_path / "model")
    if place == "store":
        valkey = request.getfixturevalue("valkey")
        _compare(own_connector(storage=valkey, lookup_deadline_s=5, **SIZES), shape, tmp_path)
        return
    with running(tmp_path, segments=256) as node:
        _compare(own_connector(node=str(node.socket), node_deadline_s=1.0), shape, tmp_path)


def _compare(config: dict[str, Any], shape: str, folder: Path) -> None:
    with engine(config, folder / "model", **options_of(shape)) as llm:
        one_by_one(llm, PROMPTS)
        on_device = one_by_one(llm, PROMPTS)
        for seed in range(100, 140):  # vLLM handles stores only in its steps
            run(llm, prompt(seed, 20))
    with engine(config, folder / "model", **options_of(shape)) as llm:
        assert one_by_one(llm, PROMPTS) == on_device


@pytest.mark.timeout(900)
def test_failed_loads_of_several_groups_are_computed(tmp_path: Path) -> None:
    """vLLM forgets all pages of such a request. The first load fails, and the second does not."""
    save_random(SHAPES["gemma3"], tmp_path / "model")
    config = own_connector(**SIZES) | {
        "kv_connector": "FaultyConnector",
        "kv_connector_module_path": "tests.engines.vllm.faulty_connector",
    }
    with engine(config, tmp_path / "model", **options_of("gemma3")) as llm:
        ((_, cold),) = run(llm, PROMPTS[0])
        for _ in range(2):
            assert llm.reset_prefix_cache()
            ((cached, answer),) = run(llm, PROMPTS[0])
            assert list(answer[0]) == list(cold[0])
        assert cached == NUM_BLOCKS * BLOCK, "stored again, and loaded"
