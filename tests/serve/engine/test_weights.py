"""KV is reused only under the weights that computed it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.core.types import DEVICE, DISK
from kvtier.identity import Identification, Identity, WeightsMemory
from kvtier.identity.files import GRAIN_NS
from kvtier.serve.engine import Completion, Engine, EngineConfig, models

from .asking import GREEDY, ask, restarted, same
from .checkpoints import Tensors, change_tensors, checkpoint
from .conftest import SMALL

pytestmark = pytest.mark.engine

CACHED = 288
"""Tokens of the prompt of 300 in whole chunks."""


def change_projections(model: Path) -> None:
    """Change all K and V projections. Names, sizes and shapes stay, as with merged LoRA."""
    before = (model / "model.safetensors").stat()

    def flip(tensors: Tensors) -> None:
        changed = [name for name in tensors if ".k_proj." in name or ".v_proj." in name]
        assert changed
        tensors.update({name: tensors[name].flip(0).contiguous() for name in changed})

    change_tensors(model, flip)
    assert (model / "model.safetensors").stat().st_size == before.st_size


def config(model: Path, slab: Path, **changes: object) -> EngineConfig:
    cache = replace(SMALL.cache, disk_path=str(slab), disk_capacity="32MiB", load_policy="always")  # type: ignore[arg-type]
    return replace(SMALL, model=str(model), device_capacity="16MiB", cache=cache, **changes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_other_weights_in_a_folder_of_the_same_name_reuse_nothing(
    tmp_path: Path, prompt: list[int]
) -> None:
    first, second = checkpoint(tmp_path / "one" / "model"), checkpoint(tmp_path / "two" / "model")
    change_projections(second)
    with Engine(config(first, tmp_path / "slab")) as engine:
        ask(engine, prompt)
    with Engine(config(second, tmp_path / "slab")) as engine:
        other = ask(engine, prompt)
    assert other.num_cached_tokens == 0
    with Engine(config(second, tmp_path / "empty")) as engine:
        assert same(other, ask(engine, prompt))
    with Engine(config(first, tmp_path / "slab")) as engine:
        again = ask(engine, prompt)
    assert again.hit_tokens == {DISK: CACHED}
    assert not same(again, other), "or the test would not notice"


@pytest.mark.parametrize("name", ["two/model", "one/renamed"])
def test_equal_weights_in_another_folder_reuse_all(
    tmp_path: Path, prompt: list[int], name: str
) -> None:
    first, second = checkpoint(tmp_path / "one" / "model"), checkpoint(tmp_path / name)
    slab = tmp_path / "slab"
    before, after = restarted(config(first, slab), prompt, config(second, slab))
    assert after.hit_tokens == {DISK: CACHED}
    assert same(after, before)


def test_byte_that_changed_far_into_a_file_is_another_model(
    tmp_path: Path, prompt: list[int]
) -> None:
    model = checkpoint(tmp_path / "model")
    with Engine(config(model, tmp_path / "slab")) as engine:
        ask(engine, prompt)
    file = model / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(5 << 20)
        byte = opened.read(1)
        opened.seek(5 << 20)
        opened.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with Engine(config(model, tmp_path / "slab")) as engine:
        assert ask(engine, prompt).num_cached_tokens == 0


# -- remembered weights ----------------------------------------------------------------------------


class Gate:
    """Holds the check in the background until the test opens it, or the check is stopped."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def identification(self, memory: WeightsMemory) -> Callable[..., Identification]:
        """Return a replacement of the engine's identification that treats every model as large."""
        gate = self

        class Held(Identification):
            def read(self, threads: int | None = None, is_polite: bool = False) -> Identity:
                while is_polite and not (gate.opened.is_set() or self._stop.wait(0.001)):
                    pass
                return super().read(threads, is_polite)

        return lambda folders, _: Held(folders, memory, small_bytes=0)


@pytest.fixture
def memory(tmp_path: Path) -> WeightsMemory:
    return WeightsMemory(tmp_path / "memory")


@pytest.fixture
def gate(memory: WeightsMemory, monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 2 * GRAIN_NS)
    monkeypatch.setattr(models, "Identification", made.identification(memory))
    return made


def archives(engine: Engine) -> bool:
    return engine.call(lambda: engine.cache._archives)


def heard(engine: Engine) -> None:
    """Wait until the check has ended and the engine has applied its result."""
    assert engine._weights is not None
    assert engine._weights._reader is not None
    engine._weights._reader.join(60)
    engine.call(lambda: None)


def test_remembered_weights_reuse_at_once_and_write_once_they_are_checked(
    tmp_path: Path, prompt: list[int], gate: Gate
) -> None:
    model = checkpoint(tmp_path / "model")
    with Engine(config(model, tmp_path / "slab")) as engine:
        assert archives(engine), "all was read at the start"
        ask(engine, prompt)
    other = prompt[::-1]
    with Engine(config(model, tmp_path / "slab")) as engine:
        assert ask(engine, prompt).hit_tokens == {DISK: CACHED}
        ask(engine, other)
        before = engine.call(lambda: engine.cache.used_slots()[DISK])
        gate.opened.set()
        heard(engine)
        assert archives(engine)
        assert engine.drain()
        after = engine.call(lambda: engine.cache.used_slots()[DISK])
    blocks = CACHED // SMALL.block_size
    assert (before, after) == (blocks, 2 * blocks), "what had to wait is written"
    with Engine(config(model, tmp_path / "slab")) as engine:
        assert ask(engine, other).hit_tokens == {DISK: CACHED}


@pytest.fixture
def mistaken(
    tmp_path: Path, prompt: list[int], gate: Gate, memory: WeightsMemory
) -> tuple[Path, Completion]:
    """Return a model folder whose files are wrongly remembered as other weights.

    KV of those other weights is on disk. Also return the answer by the folder's own weights.
    """
    first, second = checkpoint(tmp_path / "one" / "model"), checkpoint(tmp_path / "two" / "model")
    change_projections(second)
    with Engine(config(second, tmp_path / "empty")) as engine:
        right = ask(engine, prompt)
    with Engine(config(first, tmp_path / "slab")) as engine:
        ask(engine, prompt)
    told = {}
    for name in (first, second):
        weights = Identification([name], memory, small_bytes=0)
        told[name] = weights, memory.recall(weights._key)
    (_, of_first), (weights, of_second) = told[first], told[second]
    mixed = {
        path: (stamp, digest)
        for (path, (stamp, _)), (_, digest) in zip(
            of_second.items(), of_first.values(), strict=True
        )
    }
    assert mixed != of_second
    memory.remember(weights._key, mixed)
    return second, right


@pytest.mark.slow
def test_weights_that_were_remembered_wrongly_are_found_out(
    tmp_path: Path,
    prompt: list[int],
    gate: Gate,
    mistaken: tuple[Path, Completion],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, right = mistaken
    with Engine(config(model, tmp_path / "slab")) as engine:
        wrong = ask(engine, prompt)
        assert wrong.hit_tokens == {DISK: CACHED}, "nobody can know yet"
        assert not same(wrong, right)
        ask(engine, prompt[::-1])
        with caplog.at_level(logging.ERROR):
            gate.opened.set()
            heard(engine)
        assert sum("weights are not those" in record.message for record in caplog.records) == 1
        cold, warm = ask(engine, prompt), ask(engine, prompt)
        assert cold.num_cached_tokens == 0, "neither from the disk nor from memory"
        assert same(cold, right)
        assert warm.hit_tokens == {DEVICE: CACHED}, "its own KV it may reuse"
        assert same(warm, right)
        assert not archives(engine)
    with Engine(config(model, tmp_path / "slab")) as engine:
        again = ask(engine, prompt)
        assert again.num_cached_tokens == 0, "forgotten, and read again"
        assert same(again, right)


@pytest.mark.slow
def test_nothing_is_written_under_a_name_that_is_wrong(
    tmp_path: Path, prompt: list[int], gate: Gate, mistaken: tuple[Path, Completion]
) -> None:
    model, _ = mistaken
    other = prompt[::-1]
    with Engine(config(model, tmp_path / "slab")) as engine:
        ask(engine, other)
        gate.opened.set()
        heard(engine)
        ask(engine, other)
    with Engine(config(tmp_path / "one" / "model", tmp_path / "slab")) as engine:
        assert ask(engine, prompt).hit_tokens == {DISK: CACHED}
        assert ask(engine, other).num_cached_tokens == 0


def test_requests_under_way_begin_anew_or_end_with_an_error(
    tmp_path: Path, prompt: list[int], gate: Gate, mistaken: tuple[Path, Completion]
) -> None:
    """A request that streamed tokens from wrong KV fails; a waiting one restarts."""
    model, right = mistaken
    with Engine(config(model, tmp_path / "slab", max_running=1)) as engine:
        began = threading.Event()
        long = replace(GREEDY, max_tokens=2000, keep_logits=False)
        running = engine.submit(prompt, long, on_token=lambda _: began.set())
        assert began.wait(60)
        waiting = engine.submit(prompt, GREEDY)
        gate.opened.set()
        heard(engine)
        ended, anew = running.result(60), waiting.result(60)
    assert ended.finish_reason == "error"
    assert "other weights" in ended.error
    assert anew.num_cached_tokens == 0
    assert same(anew, right)


@pytest.mark.slow
def test_request_that_computed_all_of_its_kv_goes_on(
    tmp_path: Path, prompt: list[int], gate: Gate, mistaken: tuple[Path, Completion]
) -> None:
    model, _ = mistaken
    with Engine(config(model, tmp_path / "slab")) as engine:
        began = threading.Event()
        running = engine.submit(
            prompt[::-1], replace(GREEDY, max_tokens=200), on_token=lambda _: began.set()
        )
        assert began.wait(60)
        gate.opened.set()
        heard(engine)
        completion = running.result(60)
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 200


@pytest.mark.usefixtures("gate")
def test_engine_that_closes_waits_for_no_check(tmp_path: Path, prompt: list[int]) -> None:
    model = checkpoint(tmp_path / "model")
    with Engine(config(model, tmp_path / "slab")):
        pass
    with Engine(config(model, tmp_path / "slab")) as engine:
        assert ask(engine, prompt).num_cached_tokens == 0


def test_weights_that_nobody_can_name_keep_their_kv_to_this_process(
    tmp_path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(tmp_path / "model")
    file = model / "model.safetensors"

    class Touched(Identification):
        """An identification during which the file is touched."""

        def settle(self) -> Identity:
            os.utime(file, (5, 5))
            return super().settle()

    monkeypatch.setattr(models, "Identification", Touched)
    for _ in range(2):
        with Engine(config(model, tmp_path / "slab")) as engine:
            assert ask(engine, prompt).num_cached_tokens == 0
            assert ask(engine, prompt).hit_tokens == {DEVICE: CACHED}
            assert engine.call(lambda: engine.cache.used_slots()[DISK]) == 0
