"""The embedded engine with a direct disk instead of host memory: equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.tiers.disk.bounce import Bounce
from tests.tiers.disk.faulty_disk import FaultyDisk

from .asking import GREEDY, ask, same
from .conftest import changed
from .test_disk import FAULTS, _broken_at_last, _full, with_disk

pytestmark = pytest.mark.engine

MODELS = ["random-gqa", "random-mla"]
GIVEN_UP_S = 0.3


def direct_config(folder: Path, model: str = "random-gqa", **settings: object) -> EngineConfig:
    """Return settings without host memory. In blocks of 64 tokens every piece is whole pages."""
    config = with_disk(folder, model, **{"host_capacity": 0, "disk_direct": "on", **settings})
    return replace(config, block_size=64, chunk_tokens=64)


@pytest.fixture
def prompt(text: str) -> list[int]:
    with Engine(changed()) as engine:
        return engine.tokenizer.encode(text)[:300]


@pytest.mark.parametrize("io", ["uring", "preadv"])
@pytest.mark.parametrize("verify", ["always", "sampled", "off"])
@pytest.mark.parametrize("model", MODELS)
def test_after_a_restart_prompts_come_straight_from_disk(
    tmp_path: Path,
    prompt: list[int],
    model: str,
    verify: str,
    io: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for way in ("copy_in", "copy_out"):
        monkeypatch.delattr(Bounce, way)  # no copy uses a bounce buffer
    config = direct_config(tmp_path / "slab", model, disk_verify=verify, disk_io=io)
    with Engine(config) as engine:
        cold = ask(engine, prompt)
    with Engine(config) as engine:
        warm, again = ask(engine, prompt), ask(engine, prompt)
        findings = {line.topic: line for line in engine.call(engine.cache.findings)}
    assert warm.hit_tokens == {DISK: 256}
    assert again.hit_tokens == {DEVICE: 256}
    assert same(cold, warm)
    assert same(cold, again)
    assert findings["disk to device"].found == "direct"


def test_a_disk_beside_host_memory_may_be_read_straight(tmp_path: Path, prompt: list[int]) -> None:
    config = direct_config(tmp_path / "slab", host_capacity="16MiB")
    with Engine(config) as engine:
        cold = ask(engine, prompt)
    with Engine(config) as engine:
        handle = engine.submit(prompt, GREEDY)
        warm = handle.result(60)
        assert engine.drain()
        engine.clear_tier(DEVICE)
        again = ask(engine, prompt)
    assert warm.hit_tokens == {DISK: 256}
    assert again.hit_tokens == {HOST: 256}, "what is on the device is stored there as ever"
    assert same(cold, warm)
    assert same(cold, again)


def test_on_is_refused_where_pieces_are_no_pages(tmp_path: Path) -> None:
    config = replace(direct_config(tmp_path / "slab", "random-mla"), block_size=16, chunk_tokens=32)
    with pytest.raises(ConfigError, match="is not a multiple of 4096"):
        Engine(config)


def test_damage_on_disk_is_recomputed(tmp_path: Path, prompt: list[int]) -> None:
    """Damaged content that reached the device is never used."""
    config = direct_config(tmp_path / "slab")
    with Engine(config) as engine:
        cold = ask(engine, prompt)
        block_bytes = engine.info.bytes_per_block
    with (tmp_path / "slab" / "data.slab").open("r+b") as file:
        file.seek(2 * block_bytes + 100)
        file.write(b"x")
    with Engine(config) as engine:
        warm = ask(engine, prompt)
        assert 0 < warm.num_cached_tokens < 256
        assert same(cold, warm)
        engine.clear_tier(DEVICE)
        assert ask(engine, prompt).hit_tokens == {DISK: 256}, "what was recomputed is stored again"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fault", FAULTS)
def test_answers_are_the_same_whatever_the_disk_does(
    tmp_path: Path,
    text: str,
    model: str,
    fault: Callable[[FaultyDisk], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = changed(host=0, prefix_cache=False, model=model, block_size=64, chunk_tokens=64)
    with Engine(without) as engine:
        tokens = engine.tokenizer.encode(text)
        prompts = [tokens[start : start + 200] for start in range(0, 1000, 200)]
        expected = [ask(engine, prompt) for prompt in prompts]
    disk = FaultyDisk()
    monkeypatch.setattr("kvtier.tiers.disk.blocks.DiskSystem", lambda: disk)
    with Engine(direct_config(tmp_path / "slab", model)) as engine:
        fault(disk)
        num_hits = 0
        for turn in range(3):
            for prompt, cold in zip(prompts, expected, strict=True):
                answer = ask(engine, prompt)
                assert answer.finish_reason == "length"
                assert same(cold, answer)
                num_hits += turn * answer.num_cached_tokens
            engine.clear_tier(DEVICE)
        assert num_hits > 0 or fault in (_broken_at_last, _full)
        engine.call(engine.cache.check_invariants)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_disk_that_hangs_holds_nobody_up(
    tmp_path: Path, prompt: list[int], operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = direct_config(tmp_path / "slab", load_deadline_s=GIVEN_UP_S)
    with Engine(config) as engine:
        cold = ask(engine, prompt)
    disk = FaultyDisk()
    monkeypatch.setattr("kvtier.tiers.disk.blocks.DiskSystem", lambda: disk)
    with Engine(config) as engine:
        disk.stall(operation)
        other = engine.submit(prompt[::-1], GREEDY).result(60)
        warm = engine.submit(prompt, GREEDY).result(60)
        assert other.finish_reason == "length"
        assert same(cold, warm)
        disk.release("read", "write")
        assert engine.drain()
        engine.call(engine.cache.check_invariants)
