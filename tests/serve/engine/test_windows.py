"""Models with windows in the engine: rings are as exact as a whole pool, and KV is reused.

The oracle is a pool that keeps all tokens of all layers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.states import WindowCache
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy, Slot, WritePolicy
from kvtier.devices import Direction
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import DType, full_attention
from kvtier.serve.engine import Engine
from kvtier.serve.engine.attention import AttentionParams
from kvtier.serve.engine.batch import BatchKV
from kvtier.serve.engine.models import load_model
from kvtier.serve.engine.paged import PagedKV, PromptKV, Span
from kvtier.serve.engine.pool import KVPool, Place
from kvtier.serve.engine.profile import KVProfile
from kvtier.serve.engine.runner import ModelRunner
from kvtier.serve.engine.windows import MAX_BUNDLES, WindowLayers, WindowRunner
from kvtier.testing import FaultyDevice
from scripts.model_coverage import WINDOW, kinds, save

from .asking import GREEDY, always_loading, ask, cold, random_prompt, same
from .conftest import SMALL

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

CHUNK, BLOCK = SMALL.chunk_tokens, SMALL.block_size
MODELS = {
    "gemma3_text": WindowLayers(
        (*(Place(0, bundle) for bundle in range(5)), Place(0)), 1, 5, WINDOW
    ),
    "gpt_oss": WindowLayers((Place(0, 0), Place(0), Place(1, 0), Place(1)), 2, 1, WINDOW),
    "mistral, window": WindowLayers(
        (Place(0), *(Place(0, bundle) for bundle in range(3))), 1, 3, WINDOW
    ),
}
"""Places of the layers, by model."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the checkpoints by name."""
    found = {name: tmp_path_factory.mktemp("windows") / "model" for name in MODELS}
    for name, folder in found.items():
        save(name, kinds()[name], folder)
    return {name: str(folder) for name, folder in found.items()}


# -- places ----------------------------------------------------------------------------------------


def test_layers_have_places_in_blocks_of_as_many_as_attend_to_all_tokens(
    models: Mapping[str, str],
) -> None:
    for name, expected in MODELS.items():
        profile = load_model(models[name], torch.device("cpu"), "auto").profile
        assert isinstance(profile, KVProfile)
        assert profile.window_layers == expected
        whole, block = profile.group(BLOCK), profile.pool_group(BLOCK)
        num_blocks = whole.num_layers // block.num_layers
        assert block.bytes_per_block * num_blocks == whole.bytes_per_block


@given(windows=st.lists(st.sampled_from([0, 0, 100, 4096]), min_size=1, max_size=70))
def test_no_two_layers_share_a_place(windows: list[int]) -> None:
    layers = WindowLayers.of(windows)
    if layers is None:
        assert not any(windows) or len(windows) == 1
        return
    assert len(set(layers.places)) == len(windows)
    assert all(place.layer < layers.num_layers for place in layers.places)
    bundles = {place.bundle for place in layers.places} - {None}
    assert bundles == set(range(layers.num_bundles))
    assert layers.num_bundles <= MAX_BUNDLES
    for window, place in zip(windows, layers.places, strict=True):
        assert place.bundle is None or 0 < window <= layers.window
    num_whole = sum(not window for window in windows)
    assert layers.num_layers == max(num_whole, -(-len(windows) // (1 + MAX_BUNDLES)))


# -- forward passes --------------------------------------------------------------------------------


class Pair:
    """A model over a pool of all tokens, and over rings."""

    def __init__(self, path: str, num_blocks: int = 400) -> None:
        loaded = load_model(path, torch.device("cpu"), "auto")
        profile = loaded.profile
        assert isinstance(profile, KVProfile)
        layers = profile.window_layers
        assert layers is not None
        self.shape = layers.shape(BLOCK, CHUNK)
        pool = KVPool(profile.group(BLOCK), num_blocks, torch.device("cpu"), torch.float32)
        self.whole = ModelRunner(loaded.module, pool, CHUNK)
        self.runner = profile.make_runner(loaded.module, BLOCK, 4 * num_blocks, CHUNK)
        assert isinstance(self.runner, WindowRunner)
        self.free = list(range(4 * num_blocks))
        self.free_whole = list(range(num_blocks))
        self.runner._pool.memory.owner.fill_(float("nan"))  # type: ignore[attr-defined]

    def sequence(self, num_tokens: int, rng: random.Random) -> tuple[Span, Span]:
        """Return scattered places of a sequence in both pools."""
        num_blocks = -(-num_tokens // BLOCK)
        num_ring = self.shape.ring_blocks(num_blocks)
        taken = [Slot(self.free.pop(rng.randrange(len(self.free)))) for _ in range(num_blocks)]
        ring = [Slot(self.free.pop(rng.randrange(len(self.free)))) for _ in range(num_ring)]
        whole = [Slot(self.free_whole.pop()) for _ in range(num_blocks)]
        return Span(whole, 0, 0), Span(taken, 0, 0, ring)

    def prefill(self, both: tuple[Span, Span], tokens: list[int]) -> None:
        for start in range(0, len(tokens), CHUNK):
            end = min(start + CHUNK, len(tokens))
            expected, found = (
                runner.prefill_tail(
                    tokens[start:end], replace(span, start=start, end=end), end - start
                )
                for runner, span in zip((self.whole, self.runner), both, strict=True)
            )
            assert torch.equal(expected, found), f"other logits in {start} .. {end}"

    def decode(
        self, all_of_them: list[tuple[Span, Span]], tokens: list[int], at: list[int]
    ) -> None:
        expected, found = (
            runner.decode(
                tokens,
                [
                    replace(both[which], start=end - 1, end=end)
                    for both, end in zip(all_of_them, at, strict=True)
                ],
            )
            for which, runner in enumerate((self.whole, self.runner))
        )
        assert torch.equal(expected, found), f"other logits after {at}"


@pytest.mark.parametrize("name", MODELS)
def test_a_ring_computes_what_a_pool_of_all_tokens_does(
    models: Mapping[str, str], name: str
) -> None:
    """Prompts of several windows, then batched decode steps across the windows' edges."""
    pair, rng = Pair(models[name]), random.Random(1)
    lengths = [1, CHUNK, WINDOW - 3, WINDOW, 4 * CHUNK, 5 * WINDOW + 7]
    num_new = 2 * WINDOW + 5
    sequences = [pair.sequence(length + num_new, rng) for length in lengths]
    for both, length in zip(sequences, lengths, strict=True):
        pair.prefill(both, random_prompt(length, length))
    for step in range(num_new):
        tokens = [rng.randrange(3, 1000) for _ in lengths]
        pair.decode(sequences, tokens, [length + step + 1 for length in lengths])


HEADS, DIM = 2, 8


def attend_all(
    kv: PagedKV, windows: list[int], num_tokens: int, made: torch.Generator
) -> list[torch.Tensor]:
    """Return what each layer attends to, for random queries, keys and values."""
    found = []
    for layer, window in enumerate(windows):
        query = torch.randn(1, 2 * HEADS, num_tokens, DIM, generator=made)
        key, value = torch.randn(2, 1, HEADS, num_tokens, DIM, generator=made)
        found.append(
            kv.attend(layer, query, *kv.update(key, value, layer), AttentionParams(0.3, window))
        )
    return [each.clone() for each in found]


@given(
    windows=st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 49, 100]), min_size=2, max_size=12),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    num_steps=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_layers_of_any_windows_attend_to_the_same(
    windows: list[int], lengths: list[int], num_steps: int, seed: int
) -> None:
    layers = WindowLayers.of(windows)
    if layers is None:
        return
    shape = layers.shape(BLOCK, CHUNK)
    cpu, rng = torch.device("cpu"), random.Random(seed)
    group = full_attention(len(windows), HEADS, DIM, DType.FLOAT32, BLOCK)
    block = replace(group, num_layers=layers.num_layers)
    sizes = [-(-(length + num_steps) // BLOCK) for length in lengths]
    total = sum(size + shape.ring_blocks(size) for size in sizes)
    pools = (
        KVPool(group, total, cpu, torch.float32),
        KVPool(block, total, cpu, torch.float32, layers.places),
    )
    for pool in pools:
        pool.memory.owner.fill_(float("nan"))  # type: ignore[attr-defined]
    slots = [Slot(slot) for slot in rng.sample(range(total), total)]
    sequences = []
    for size in sizes:
        own, slots = slots[:size], slots[size:]
        ring, slots = slots[: shape.ring_blocks(size)], slots[shape.ring_blocks(size) :]
        sequences.append(Span(own, 0, 0, ring))
    for sequence, length in zip(sequences, lengths, strict=True):
        for start in range(0, length, CHUNK):
            span = replace(sequence, start=start, end=min(start + CHUNK, length))
            num = span.end - start
            expected, found = (
                attend_all(PromptKV(pool, span), windows, num, torch.manual_seed(seed))
                for pool in pools
            )
            assert all(map(torch.equal, expected, found))
    for step in range(num_steps):
        ends = sorted((length + step + 1, at) for at, length in enumerate(lengths))
        spans = [replace(sequences[at], start=end - 1, end=end) for end, at in ends]
        expected, found = (
            attend_all(BatchKV(pool, spans), windows, len(spans), torch.manual_seed(step))
            for pool in pools
        )
        assert all(map(torch.equal, expected, found))


def test_a_ring_that_is_too_short_for_its_attention_is_an_error() -> None:
    layers = WindowLayers.of([0, 20])
    assert layers is not None
    block = full_attention(layers.num_layers, HEADS, DIM, DType.FLOAT32, BLOCK)
    pool = KVPool(block, 30, torch.device("cpu"), torch.float32, layers.places)
    slots = [Slot(slot) for slot in range(30)]
    ring = slots[20 : 20 + layers.shape(BLOCK, CHUNK).ring_blocks(20)]
    chunk, token = (Span(slots[:20], start, 192, ring) for start in (160, 191))
    for window in (20, 120):
        for kv, num in ((PromptKV(pool, chunk), CHUNK), (BatchKV(pool, [token]), 1)):
            if window == 20:
                attend_all(kv, [0, window], num, torch.manual_seed(0))
                continue
            with pytest.raises(ConfigError, match="more tokens than the window"):
                attend_all(kv, [0, window], num, torch.manual_seed(0))


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_kv_comes_back_from_every_tier_at_any_cut(
    models: Mapping[str, str], tmp_path: Path, name: str
) -> None:
    first = random_prompt(0, 9 * CHUNK + 5)
    others = [
        random_prompt(1, 12 * CHUNK, shared=9 * CHUNK + 5),  # its next turn
        random_prompt(2, 8 * CHUNK + 1, shared=5 * CHUNK + 7),  # branches off inside it
        random_prompt(3, 3 * CHUNK, shared=CHUNK),  # branches off before a window is full
        first,
    ]
    reused = [9, 5, 1, 9]
    expected = cold(models[name], *others)
    memory = CacheConfig(host_capacity="16MiB", load_policy=LoadPolicy.ALWAYS, strict=True)
    disk = replace(memory, disk_path=str(tmp_path), disk_capacity="64MiB")
    for tier, cache in ((DEVICE, memory), (HOST, disk)):
        with Engine(always_loading(models[name], cache=cache)) as engine:
            ask(engine, first)
            for other, right, num in zip(others, expected, reused, strict=True):
                if tier == HOST:
                    engine.clear_tier(DEVICE)
                found = ask(engine, other)
                assert same(found, right), tier
                assert found.hit_tokens == {tier: num * CHUNK}
    with Engine(always_loading(models[name], cache=disk)) as engine:
        for other, right in zip(others, expected, strict=True):
            found = ask(engine, other)
            assert same(found, right)
            assert found.num_cached_tokens == (len(other) - 1) // CHUNK * CHUNK
            assert found.hit_tokens[DISK]
            engine.clear_tier(DEVICE)
            engine.clear_tier(HOST)


@pytest.mark.parametrize("name", MODELS)
def test_the_cost_of_a_prompt_is_that_of_its_request(models: Mapping[str, str], name: str) -> None:
    asked = random_prompt(0, 4 * CHUNK + 3)
    with Engine(always_loading(models[name])) as engine:
        for tier in ("", DEVICE, HOST):
            (preview,) = engine.preview([(asked, GREEDY)]).result(60)
            cost = preview.cost()
            assert cost.reused_tokens == ask(engine, asked).hit_tokens
            assert cost.reused_tokens == ({tier: 4 * CHUNK} if tier else {})
            assert cost.compute_s is not None
            if tier == DEVICE:
                engine.clear_tier(DEVICE)


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_longer_than_a_window_continues_what_was_loaded(
    models: Mapping[str, str], name: str
) -> None:
    params = replace(GREEDY, max_tokens=2 * WINDOW + 9)
    asked = random_prompt(0, 4 * CHUNK + 3)
    (expected,) = cold(models[name], asked, params=params)
    with Engine(always_loading(models[name])) as engine:
        for tier in ("", DEVICE, HOST):
            found = engine.submit(asked, params).result(60)
            assert same(found, expected)
            assert found.hit_tokens == ({tier: 4 * CHUNK} if tier else {})
            assert engine.drain()
            if tier == DEVICE:
                engine.clear_tier(DEVICE)


def test_requests_at_once_share_a_prefix_and_leave_nothing(models: Mapping[str, str]) -> None:
    """The pool fits few of the requests, so KV is evicted all the time."""
    model = models["gemma3_text"]
    params = replace(GREEDY, max_tokens=1)
    prompts = [
        random_prompt(seed, CHUNK * (7 + seed % 4) + seed, 6 * CHUNK) for seed in range(1, 13)
    ]
    expected = cold(model, *prompts, params=params)
    small = replace(SMALL.cache, host_capacity="512KiB", load_policy=LoadPolicy.ALWAYS)
    changes = {"cache": small, "device_capacity": "1MiB", "max_model_tokens": 0}
    with Engine(always_loading(model, **changes)) as engine:
        for _ in range(3):
            handles = [engine.submit(each, params) for each in prompts]
            found = [handle.result(60) for handle in handles]
            assert all(map(same, found, expected))
        assert any(each.num_cached_tokens for each in found)
        assert engine.drain()
        evicted = engine.cache.metrics.registry.get_sample_value(
            "kvtier_evicted_blocks_total", {"tier": HOST}
        )
        assert evicted
        for tier in (DEVICE, HOST):
            engine.clear_tier(tier)
        assert engine.call(engine.cache.used_slots) == {DEVICE: 0, HOST: 0}


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_running_request_holds_its_ring_and_no_more(
    models: Mapping[str, str], policy: WritePolicy
) -> None:
    cache = replace(SMALL.cache, write_policy=policy, load_policy=LoadPolicy.ALWAYS)
    asked = random_prompt(0, 14 * CHUNK)
    most = 5 * (-(-(WINDOW - 1) // BLOCK) + CHUNK // BLOCK)  # bundles of a window and a chunk
    seen = []
    with Engine(always_loading(models["gemma3_text"], cache=cache)) as engine:

        def look(_: object) -> None:
            (request,) = engine._scheduler.running
            assert request.lease is not None
            index = engine.cache._index
            leased = sum(index.num_leases(node.block, DEVICE) for node in index.nodes())
            is_copied = bool(engine.cache._ladder._transfers.in_flight.all)
            seen.append((len(request.lease.ring), 0 if is_copied else leased))

        for _ in range(2):
            engine.submit(asked, replace(GREEDY, max_tokens=40), on_token=look).result(60)
            assert engine.drain()
    assert len(seen) == 80
    assert {ring for ring, _ in seen} == {most}
    num_blocks = 14 * CHUNK // BLOCK
    assert {leased for _, leased in seen} <= {0, num_blocks}, "cells are held"
    assert seen[-1][1] == num_blocks


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_request_whose_load_fails_begins_again(
    models: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The first copies load cells, the others the path."""
    device = FaultyDevice(CpuDevice(threads=1))
    monkeypatch.setattr("kvtier.serve.engine.engine.find_device", lambda name: device)
    asked = random_prompt(0, 5 * CHUNK + 3)
    (expected,) = cold(models["gpt_oss"], asked)
    with Engine(always_loading(models["gpt_oss"])) as engine:
        ask(engine, asked)
        engine.clear_tier(DEVICE)
        device.fail(Direction.LOAD, nth)
        assert same(ask(engine, asked), expected)
        assert same(ask(engine, asked), expected)
        engine.call(engine.cache.check_invariants)


def test_a_request_without_room_for_its_ring_waits_and_too_long_ones_are_refused(
    models: Mapping[str, str],
) -> None:
    changes = {"device_capacity": "300KiB", "max_model_tokens": 0, "max_running": 4}
    with Engine(always_loading(models["gemma3_text"], **changes)) as engine:
        longest = engine.info.max_model_tokens
        assert CHUNK < longest < 700
        prompts = [random_prompt(seed, longest - 4) for seed in range(4)]
        found = [each.result(60) for each in [engine.submit(each, GREEDY) for each in prompts]]
        assert {each.finish_reason for each in found} == {"length"}
        assert isinstance(engine.cache, WindowCache)
    with pytest.raises(ConfigError, match=r"less than one chunk of 32 tokens and \d+ blocks of"):
        Engine(always_loading(models["gemma3_text"], device_capacity="40KiB"))
