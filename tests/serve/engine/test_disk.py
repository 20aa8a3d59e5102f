"""The disk tier under the engine: a restarted engine loads prompts from disk, bit for bit."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from typing import Any

import numpy as np
import pytest

import kvtier.cache.tokens
import kvtier.core.keys
from kvtier.core.errors import ConfigError
from kvtier.core.keys import next_keys
from kvtier.core.types import DEVICE, DISK, HOST, BlockKey, Label, LoadPolicy
from kvtier.index import native_index
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.tiers.disk.bounce import Bounce
from tests.tiers.disk.faulty_disk import FaultyDisk

from .asking import GREEDY, ask, restarted, same
from .conftest import SMALL, changed

pytestmark = pytest.mark.engine

MODELS = ["random-gqa", "random-mla"]
GIVEN_UP_S = 0.3


def with_disk(folder: Path, model: str = "random-gqa", **settings: Any) -> EngineConfig:
    cache = replace(
        SMALL.cache,
        disk_path=str(folder),
        disk_capacity="16MiB",
        load_policy=LoadPolicy.ALWAYS,
        **settings,
    )
    return replace(SMALL, model=model, cache=cache)


def direct_config(folder: Path, model: str = "random-gqa", **settings: object) -> EngineConfig:
    """Return settings without host memory. In blocks of 64 tokens every piece is whole pages."""
    config = with_disk(folder, model, **{"host_capacity": 0, "disk_direct": "on", **settings})
    return replace(config, block_size=64, chunk_tokens=64)


@pytest.mark.parametrize("model", MODELS)
def test_after_a_restart_prompts_come_from_disk(
    tmp_path: Path, prompt: list[int], model: str
) -> None:
    with Engine(with_disk(tmp_path / "slab", model)) as engine:
        cold = ask(engine, prompt)
    with Engine(with_disk(tmp_path / "slab", model)) as engine:
        warm, again = ask(engine, prompt), ask(engine, prompt)
    assert cold.num_cached_tokens == 0
    assert warm.hit_tokens == {DISK: 288}
    assert again.hit_tokens == {DEVICE: 288}
    assert same(cold, warm)
    assert same(cold, again)


def test_a_long_prompt_is_hashed_by_whoever_submits_it(
    tmp_path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed_by: list[str] = []

    def note(previous: bytes, labels: Sequence[Label]) -> Sequence[BlockKey]:
        hashed_by.append(current_thread().name)
        return next_keys(previous, labels)

    for module in (kvtier.core.keys, native_index):
        monkeypatch.setattr(module, "next_keys", note)
    with Engine(with_disk(tmp_path / "slab")) as engine:
        cold = ask(engine, prompt)
        assert set(hashed_by) <= {"kvtier-engine"}, "nothing in storage can be his yet"
    monkeypatch.setattr(kvtier.cache.tokens, "LONG_PROMPT", 4)
    hashed_by.clear()
    with Engine(with_disk(tmp_path / "slab")) as engine:
        warm = ask(engine, prompt)
    assert warm.hit_tokens == {DISK: 288}
    assert same(cold, warm)
    assert hashed_by == [current_thread().name]


@pytest.mark.parametrize("settings", [{"disk_path": ("one", "two")}, {"host_capacity": 0}])
def test_prompts_may_be_cut_over_several_disks_or_have_no_host_tier(
    tmp_path: Path, prompt: list[int], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = with_disk(tmp_path / "slab")
    config = replace(config, cache=replace(config.cache, **settings))
    cold, warm = restarted(config, prompt)
    assert warm.hit_tokens == {DISK: 288}
    assert same(cold, warm)


def test_a_prompt_may_come_from_three_tiers(tmp_path: Path, prompt: list[int]) -> None:
    with Engine(with_disk(tmp_path / "slab")) as engine:
        cold = ask(engine, prompt)
    with Engine(with_disk(tmp_path / "slab")) as engine:
        ask(engine, prompt[:200])
        engine.clear_tier(DEVICE)
        ask(engine, prompt[:100])
        warm = ask(engine, prompt)
    assert warm.hit_tokens == {DEVICE: 96, HOST: 96, DISK: 96}
    assert same(cold, warm)


def test_storage_is_read_while_a_request_waits_for_its_turn(
    tmp_path: Path, prompt: list[int]
) -> None:
    """Only one of two requests may run. The other one finds its blocks in host memory."""
    other = prompt[::-1]
    with Engine(with_disk(tmp_path / "slab")) as engine:
        cold = [ask(engine, each) for each in (prompt, other)]
    narrow = replace(with_disk(tmp_path / "slab"), max_running=1)
    with Engine(narrow) as engine:
        handles = [engine.submit(each, replace(GREEDY, max_tokens=20)) for each in (prompt, other)]
        warm = [handle.result(60) for handle in handles]
    assert [each.hit_tokens for each in warm] == [{DISK: 288}, {HOST: 288}]
    for one, another in zip(cold, warm, strict=True):
        assert one.logits is not None
        assert another.logits is not None
        assert np.array_equal(one.logits, another.logits[: len(one.logits)])


@pytest.mark.parametrize(
    ("policy", "source"), [("best_effort", DISK), ("wait_complete", HOST), ("timeout", HOST)]
)
def test_prefetch_policies_say_what_a_request_waits_for(
    tmp_path: Path, prompt: list[int], policy: str, source: str
) -> None:
    slab = tmp_path / "slab"
    then = with_disk(slab, prefetch_policy=policy, prefetch_timeout_s=30.0)
    cold, warm = restarted(with_disk(slab), prompt, then)
    assert warm.hit_tokens == {source: 288}
    assert same(cold, warm)


def test_a_client_that_leaves_the_queue_takes_its_prefetch_along(
    tmp_path: Path, prompt: list[int]
) -> None:
    with Engine(with_disk(tmp_path / "slab")) as engine:
        ask(engine, prompt)
    with Engine(replace(with_disk(tmp_path / "slab"), max_running=1)) as engine:
        first = engine.submit(prompt[::-1], replace(GREEDY, max_tokens=100))
        second = engine.submit(prompt, GREEDY)
        second.abort()
        assert second.result(60).finish_reason == "abort"
        first.abort()
        first.result(60)
        assert engine.drain()
        engine.clear_tier(HOST)
        assert engine.call(lambda: engine.cache.used_slots()[HOST]) == 0


# -- without host memory ---------------------------------------------------------------------------


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
        warm = ask(engine, prompt)
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


# -- faults, with and without host memory ----------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "block", "tokens"), [(with_disk, 7, 288), (direct_config, 2, 256)]
)
def test_damage_on_disk_is_recomputed(
    tmp_path: Path,
    prompt: list[int],
    make: Callable[[Path], EngineConfig],
    block: int,
    tokens: int,
) -> None:
    """Damaged content that reached the device is never used."""
    config = make(tmp_path / "slab")
    with Engine(config) as engine:
        cold = ask(engine, prompt)
        block_bytes = engine.info.bytes_per_block
    with (tmp_path / "slab" / "data.slab").open("r+b") as file:
        file.seek(block * -(-block_bytes // 4096) * 4096 + 100)
        file.write(b"x")
    with Engine(config) as engine:
        warm = ask(engine, prompt)
        at = block * config.block_size
        assert warm.num_cached_tokens == at // config.chunk_tokens * config.chunk_tokens
        assert same(cold, warm)
        for tier in (DEVICE, HOST) if config.cache.host_capacity else (DEVICE,):
            engine.clear_tier(tier)
        again = ask(engine, prompt)
        assert again.hit_tokens == {DISK: tokens}, "what was recomputed is stored again"


def _eio_reads(disk: FaultyDisk) -> None:
    disk.fail("read", nth=3)
    disk.fail("read", nth=20, count=2)


def _eio_writes(disk: FaultyDisk) -> None:
    disk.fail("write", nth=5, count=3)


def _broken_at_last(disk: FaultyDisk) -> None:
    disk.fail("read", nth=30, count=1000)
    disk.fail("write", nth=30, count=1000)


def _full(disk: FaultyDisk) -> None:
    disk.fail("write", nth=10, code=errno.ENOSPC, count=1000)


def _short(disk: FaultyDisk) -> None:
    for nth in (2, 9, 25):
        disk.cut_short("read", nth)
        disk.cut_short("write", nth)


def _flipped(disk: FaultyDisk) -> None:
    for nth in (1, 4, 30):
        disk.flip("read", nth)
        disk.flip("write", nth)


def _journal(disk: FaultyDisk) -> None:
    disk.fail("journal", nth=4, count=2)


FAULTS = [_eio_reads, _eio_writes, _broken_at_last, _full, _short, _flipped, _journal]


@pytest.mark.parametrize(
    ("make", "model"),
    [(with_disk, "random-gqa"), *((direct_config, model) for model in MODELS)],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_answers_are_the_same_whatever_the_disk_does(
    tmp_path: Path,
    text: str,
    make: Callable[[Path, str], EngineConfig],
    model: str,
    fault: Callable[[FaultyDisk], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make(tmp_path / "slab", model)
    plain = replace(config, cache=changed(host=0).cache, prefix_cache=False)
    with Engine(plain) as engine:
        tokens = engine.tokenizer.encode(text)
        prompts = [tokens[start : start + 200] for start in range(0, 1600, 200)]
        expected = [ask(engine, prompt) for prompt in prompts]
    disk = FaultyDisk()
    monkeypatch.setattr("kvtier.tiers.disk.blocks.DiskSystem", lambda: disk)
    with Engine(config) as engine:
        fault(disk)
        num_hits = 0
        for turn in range(3):
            for prompt, cold in zip(prompts, expected, strict=True):
                answer = ask(engine, prompt)
                assert same(cold, answer)
                num_hits += turn * answer.num_cached_tokens
            for tier in (DEVICE, HOST) if config.cache.host_capacity else (DEVICE,):
                engine.clear_tier(tier)
        assert num_hits > 0 or fault in (_broken_at_last, _full)
        engine.call(engine.cache.check_invariants)
