"""A real vLLM with ``KvtierConnector``, and models whose layers keep unlike KV: from every tier.

KVTIER_SHAPES: folder of models that were saved before (``python -m tests.engines.vllm.shapes``).
Engines may then run in the process of the tests, in a third of the time
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``): a model that is younger than its process is not shared. Not
for ranks, and for engines that are killed. Engines that are refused have their own in any case, and
engines that read directly unless ``THP_MEM_ALLOC_ENABLE=1`` is set from the start.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtier.connectors.vllm.kv_connector.connector import HAS_GROUPS
from tests.engines.vllm.engines import (
    BLOCK,
    DIFFERENT,
    are_close,
    bind_ranks,
    count,
    engine,
    moved_from_disk,
    one_by_one,
    own_connector,
    prompt,
    run,
)
from tests.engines.vllm.shapes import SHAPES, options_of, save_random
from tests.engines.vllm.test_pipeline import stages
from tests.kit.nodes import running
from tests.kit.servers import ValkeyServer

NUM_BLOCKS = 7
PROMPTS = [prompt(seed, NUM_BLOCKS * BLOCK + 50) for seed in range(3)]
SIZES: dict[str, object] = {"host_capacity": "64MiB"}
ROUNDING = 0.1
"""As ``DIFFERENT``, in bfloat16: logits of 4 to 8 are 1/32 apart."""
ONE, TENSOR, PIPELINE = "1 rank", "TP 2", "PP 2"
WITH_STATES = ("lfm2", "falcon-h1", "qwen3-next")
SERVED = [shape for shape in SHAPES if HAS_GROUPS or shape not in WITH_STATES]
MIXED = ("gpt-oss", "lfm2")
"""Full attention beside windows, and beside states, equally many layers in each half of a model."""
CASES = [(shape, ONE) for shape in SERVED] + [
    (shape, form) for shape in MIXED if shape in SERVED for form in (TENSOR, PIPELINE)
]
"""Shapes, and the ranks of their engines."""
TIERS = {
    "disk": ("host", "disk after a kill", "disk, direct"),
    "store": ("store", "store, compressed and encrypted", "store, shards"),
    "node": ("node",),
}
"""The columns of the table, by the settings that they need."""
cases = pytest.mark.parametrize(("shape", "form"), CASES, ids=["-".join(case) for case in CASES])

Shows = Callable[[str, str, str], None]


@pytest.fixture
def shows(record_property: Callable[[str, object], None]) -> Shows:
    """Return a function that notes which cell of the table in docs/versions.md a test shows.

    It gets a shape, a tier, and the ranks or who refuses. The table is written from the tests that
    passed.
    """
    return lambda shape, tier, form: record_property("shows", json.dumps([shape, tier, form]))


@contextmanager
def started(config: dict[str, Any], shape: str, form: str, folder: Path) -> Iterator[Any]:
    """Run an engine of a shape, whose model is saved at its first start."""
    model = Path(os.environ.get("KVTIER_SHAPES") or folder, shape)
    if not model.exists():
        save_random(SHAPES[shape], model)
    options = options_of(shape)
    if form == PIPELINE:
        half = SHAPES[shape].num_hidden_layers // 2
        with stages(config, (half, half), model=model, **options) as llm:
            yield llm
        return
    with pytest.MonkeyPatch.context() as patch:
        num_ranks = 2 if form == TENSOR else 1
        bind_ranks(patch, num_ranks)
        with engine(config, model, tensor_parallel_size=num_ranks, **options) as llm:
            yield llm


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
@cases
def test_shape_comes_from_host_and_from_disk_after_a_kill(
    shape: str, form: str, tmp_path: Path, shows: Shows
) -> None:
    shows(shape, "host", form)
    shows(shape, "disk after a kill", form)
    slab = str(tmp_path / "slab")
    config = own_connector(disk_path=slab, disk_capacity="64MiB", **SIZES)
    with started(config, shape, form, tmp_path) as llm:
        cold = one_by_one(llm, PROMPTS)
        on_device = one_by_one(llm, PROMPTS)
        # Blocks are longer where a state takes more than the KV of 128 tokens.
        assert all(cached >= 5 * BLOCK for cached, _ in on_device)
        assert llm.reset_prefix_cache()
        assert one_by_one(llm, PROMPTS) == on_device
        _kill(llm)
    assert len({tuple(answer[0]) for _, answer in cold}) == 3, "every prompt is answered alike"
    with started(config, shape, form, tmp_path) as llm:
        assert one_by_one(llm, PROMPTS) == on_device


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["store", "node"])
@cases
def test_shape_comes_from_what_another_engine_has_left(
    shape: str,
    form: str,
    place: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    shows: Shows,
) -> None:
    shows(shape, place, form)
    if place == "store":
        valkey = request.getfixturevalue("valkey")
        config = own_connector(storage=valkey, lookup_deadline_s=5, **SIZES)
        _compare(config, shape, form, tmp_path)
        return
    with running(tmp_path, segments=256) as node:
        config = own_connector(node=str(node.socket), node_deadline_s=1.0)
        _compare(config, shape, form, tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SERVED)
def test_shape_comes_from_a_store_that_is_compressed_and_encrypted(
    shape: str, tmp_path: Path, server: ValkeyServer, valkey: str, shows: Shows
) -> None:
    for name in ("zstandard", "cryptography"):
        pytest.importorskip(name)
    shows(shape, "store, compressed and encrypted", ONE)
    key = tmp_path / "keys"
    key.write_text("0a" * 32)
    coded = {"codec": "lossless", "encryption_key": f"file:{key}"}
    config = own_connector(storage=valkey, lookup_deadline_s=5, **SIZES, **coded)
    _compare(config, shape, ONE, tmp_path)
    names = server.tell(b"KEYS", b"*")
    assert isinstance(names, list)
    values = [server.tell(b"GET", name) for name in names]
    assert values
    assert all(isinstance(value, bytes) and value[:8] == b"kvtierB2" for value in values)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SERVED)
def test_shape_comes_directly_from_disk_after_a_restart(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shows: Shows
) -> None:
    shows(shape, "disk, direct", ONE)
    if os.environ.get("THP_MEM_ALLOC_ENABLE") != "1":  # torch reads it once per process
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # vLLM's memory begins at a page
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    slab = str(tmp_path / "slab")
    config = own_connector(disk_path=slab, disk_capacity="64MiB", disk_direct="on", **SIZES)
    with started(config, shape, ONE, tmp_path) as llm:
        one_by_one(llm, PROMPTS)
        on_device = one_by_one(llm, PROMPTS)
    with started(config, shape, ONE, tmp_path) as llm:
        before = moved_from_disk()
        assert one_by_one(llm, PROMPTS) == on_device
        past_host, through = moved_from_disk(before)
        assert past_host > 0
        assert through == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in WITH_STATES])
def test_ranks_load_shards_that_one_rank_has_stored(
    shape: str, tmp_path: Path, valkey: str, shows: Shows
) -> None:
    """Another number of ranks sums in another order, so the answers are equal up to rounding.

    The control has the tokens of another prompt in one block.
    """
    shows(shape, "store, shards", f"{ONE} and {TENSOR}")
    within = ROUNDING if options_of(shape).get("dtype") == "bfloat16" else DIFFERENT
    config = own_connector(storage=valkey, lookup_deadline_s=5, storage_shards=2, **SIZES)
    with started(config, shape, ONE, tmp_path) as llm:
        cold = one_by_one(llm, PROMPTS)
        on_device = one_by_one(llm, PROMPTS)
        for seed in range(100, 140):  # vLLM handles stores only in its steps
            run(llm, prompt(seed, 20))
        mixed = [each["prompt_token_ids"] for each in PROMPTS[:2]]
        mixed[0] = mixed[0][: 5 * BLOCK] + mixed[1][5 * BLOCK : 6 * BLOCK] + mixed[0][6 * BLOCK :]
        ((_, wrong),) = run(llm, {"prompt_token_ids": mixed[0]})
    with started(config, shape, TENSOR, tmp_path) as llm:
        found = one_by_one(llm, PROMPTS)
    assert [cached for cached, _ in found] == [cached for cached, _ in on_device]
    for (_, answer), (_, other) in zip(found, cold, strict=True):
        assert are_close(answer, other, within)
    assert not are_close(found[0][1], wrong, within)


@pytest.mark.skipif(HAS_GROUPS, reason="this version serves them")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", TIERS)
@pytest.mark.parametrize("shape", WITH_STATES)
def test_early_versions_of_vllm_refuse_states(
    shape: str, place: str, tmp_path: Path, shows: Shows, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a connector for one KV group vLLM does not start: these layers can't be one group.

    It says so before it makes the connector, so nothing need listen at the store or the node.
    """
    for tier in TIERS[place]:
        shows(shape, tier, "refused by vLLM")
    settings: dict[str, dict[str, object]] = {
        "disk": {"disk_path": str(tmp_path / "slab"), "disk_direct": "on"},
        "store": {"storage": "valkey://127.0.0.1:1", "codec": "lossless", "storage_shards": 2},
        "node": {"node": str(tmp_path / "node.sock")},
    }
    said = _refusal(own_connector(**settings[place]), shape, tmp_path, capfd)
    assert "failed to convert the KV cache specs to one unified type" in said


@pytest.mark.skipif(not HAS_GROUPS, reason="vLLM refuses them")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", WITH_STATES)
def test_shards_of_states_are_refused(
    shape: str, tmp_path: Path, valkey: str, shows: Shows, capfd: pytest.CaptureFixture[str]
) -> None:
    shows(shape, "store, shards", "refused")
    config = own_connector(storage=valkey, storage_shards=2, **SIZES)
    said = _refusal(config, shape, tmp_path, capfd)
    assert "keeps a recurrent state, which has no KV heads" in said


def _refusal(
    config: dict[str, Any], shape: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> str:
    """Return what an engine says that does not start.

    It has a process of its own: the next engine could not start beside what it leaves there.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with pytest.raises(RuntimeError), started(config, shape, ONE, folder):
            pass
    return "".join(capfd.readouterr())


def _compare(config: dict[str, Any], shape: str, form: str, folder: Path) -> None:
    with started(config, shape, form, folder) as llm:
        one_by_one(llm, PROMPTS)
        on_device = one_by_one(llm, PROMPTS)
        for seed in range(100, 140):  # vLLM handles stores only in its steps
            run(llm, prompt(seed, 20))
    with started(config, shape, form, folder) as llm:
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
