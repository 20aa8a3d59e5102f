"""kvtier's eviction policy in vLLM's own host tier. ``make test-vllm``."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from kvtier.connectors.vllm.standalone.policy import KvtierPolicy

BLOCK_SIZE = 16
MODULE = "kvtier.connectors.vllm.standalone.policy"


def _manager(num_blocks: int, policy: str = "KvtierPolicy") -> CPUOffloadingManager:
    module = MODULE if policy == "KvtierPolicy" else None
    return CPUOffloadingManager(num_blocks, policy, module, enable_events=True)


def _keys(*numbers: int, group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(number.to_bytes(32, "big"), group) for number in numbers]


def _request(
    manager: CPUOffloadingManager,
    keys: Sequence[OffloadKey],
    params: dict[str, object] | None = None,
) -> ReqContext:
    """Begin a request whose blocks have these keys, in prompt order."""
    context = ReqContext("request", params)
    for place, key in enumerate(keys, start=1):
        context.set_offload_key_position(key, place * BLOCK_SIZE)
    manager.on_new_request(context)
    return context


def _ask(
    manager: CPUOffloadingManager,
    keys: Sequence[OffloadKey],
    step: int = 4,
    params: dict[str, object] | None = None,
) -> int:
    """Serve one request as vLLM's scheduler does; return the number of hits."""
    context = _request(manager, keys, params)
    hits = 0
    while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
        hits += 1
    manager.prepare_load(keys[:hits], context)
    manager.complete_load(keys[:hits], context)
    for first in range(hits, len(keys), step):
        output = manager.prepare_store(keys[first : first + step], context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    return hits


def _check(manager: CPUOffloadingManager) -> None:
    policy = manager._policy
    policy._settle()
    policy.tier.check_invariants()
    assert set(policy._blocks) == set(policy._keys.values())
    assert len(policy._blocks) == len(policy.tier)


def test_vllm_finds_the_policy_by_its_name_and_module() -> None:
    assert isinstance(_manager(4)._policy, KvtierPolicy)


def test_what_was_stored_is_found_and_the_oldest_leaves() -> None:
    manager = _manager(6)
    assert _ask(manager, _keys(1, 2, 3)) == 0
    assert _ask(manager, _keys(1, 2, 3)) == 3
    _ask(manager, _keys(4, 5, 6))
    _ask(manager, _keys(7, 8))
    assert _ask(manager, _keys(7, 8)) == 2
    assert _ask(manager, _keys(1, 2, 3)) == 1, "the start of the prompt leaves last"
    _check(manager)


@pytest.mark.parametrize(
    ("hint", "found"),
    [
        (None, 0),
        ({"back_in_s": 60}, 4),
        ({"retain": [{"priority": 90, "last_token": 2 * BLOCK_SIZE}]}, 2),
        ({"retain": [{"priority": 900}]}, 0),
        (5, 0),
    ],
)
def test_after_a_flood_a_conversation_is_there_if_its_request_said_so(
    hint: object, found: int, caplog: pytest.LogCaptureFixture
) -> None:
    manager = _manager(16)  # a quarter of it is what a tenant may raise
    _ask(manager, _keys(1, 2, 3, 4), params={"kvtier": hint})
    for first in range(10, 100, 4):
        _ask(manager, _keys(*range(first, first + 4)))
        _check(manager)
    assert _ask(manager, _keys(1, 2, 3, 4)) == found
    is_bad = hint == 5 or "900" in str(hint)
    assert ("hint ignored request=request" in caplog.text) == is_bad


def test_what_an_ended_session_had_leaves_first() -> None:
    manager = _manager(8)
    _ask(manager, _keys(1, 2, 3))
    _ask(manager, _keys(4, 5, 6), params={"kvtier": {"ended": True}})
    _ask(manager, _keys(7, 8, 9, 10, 11))
    assert _ask(manager, _keys(1, 2, 3)) == 3
    assert _ask(manager, _keys(4, 5, 6)) == 0
    _check(manager)


def test_block_that_is_copied_stays() -> None:
    manager = _manager(4)
    keys = _keys(1, 2, 3, 4)
    _ask(manager, keys)
    context = ReqContext("reader")
    manager.prepare_load(keys[:3], context)
    other = ReqContext("writer")
    assert manager.prepare_store(_keys(10, 11), other) is None
    output = manager.prepare_store(_keys(10), other)
    assert output is not None
    assert output.evicted_keys == _keys(4)
    manager.complete_store(_keys(10), other, success=False)
    manager.complete_load(keys[:3], context)
    assert manager.lookup(_keys(10)[0], other) is LookupResult.MISS
    assert _ask(manager, keys[:3]) == 3
    _check(manager)


def test_blocks_that_are_asked_for_together_do_not_drive_each_other_out() -> None:
    manager = _manager(4)
    _ask(manager, _keys(1, 2, 3))
    output = manager.prepare_store(_keys(1, 2, 3, 4, 5), ReqContext("more than fits"))
    assert output is None
    assert _ask(manager, _keys(1, 2, 3)) == 3


def test_emptied_cache_is_empty_and_fills_again() -> None:
    manager = _manager(4)
    _ask(manager, _keys(1, 2))
    manager.reset_cache()
    assert _ask(manager, _keys(1, 2)) == 0
    assert _ask(manager, _keys(1, 2)) == 2


def test_groups_are_chains_of_their_own() -> None:
    manager = _manager(8)
    keys = [*_keys(1, 2, 3, group=0), *_keys(1, 2, group=1)]
    _ask(manager, keys, step=8)
    assert _ask(manager, keys, step=8) == 5
    _check(manager)


def test_end_of_a_prompt_that_a_window_keeps_is_used_with_the_rest_of_it() -> None:
    """The first blocks of a group with a window are never stored."""
    manager = _manager(6)
    full, window = _keys(1, 2, 3, group=0), _keys(3, group=1)
    asked = [*full, *_keys(1, 2, 3, group=1)]
    context = _request(manager, asked)
    output = manager.prepare_store([*full, *window], context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    _ask(manager, _keys(11, 12))
    context = _request(manager, asked)
    manager.prepare_load([*full, *window], context)
    manager.complete_load([*full, *window], context)
    manager.on_request_finished(context)
    _ask(manager, _keys(21, 22))
    assert manager.lookup(window[0], context) is LookupResult.HIT
    assert manager.lookup(_keys(11)[0], context) is LookupResult.MISS
    _check(manager)


def test_a_prompt_longer_than_the_tier_keeps_its_beginning() -> None:
    manager = _manager(40)
    _ask(manager, _keys(*range(1000, 1020)))
    long = _keys(*range(200))
    assert _ask(manager, long) == 0
    assert _ask(manager, long) >= 32
    assert _ask(manager, long) >= 32
    _check(manager)


def test_what_vllms_own_pool_had_is_used_as_well() -> None:
    manager = _manager(6)
    first = _keys(1, 2, 3)
    _ask(manager, first)
    _ask(manager, _keys(11, 12, 13))
    manager.on_request_finished(_request(manager, first))
    _ask(manager, _keys(21, 22))
    assert _ask(manager, first) == 3
    _check(manager)


def test_request_that_lives_on_when_the_cache_is_emptied_is_told_of_anew() -> None:
    manager = _manager(8)
    keys = _keys(1, 2, 3, 4)
    context = _request(manager, keys)
    for part in (keys[:2], keys[2:]):
        output = manager.prepare_store(part, context)
        assert output is not None
        if part == keys[:2]:
            manager.reset_cache()
        else:
            manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    assert manager.lookup(keys[3], context) is LookupResult.HIT
    assert manager.lookup(keys[0], context) is LookupResult.MISS
    _check(manager)


def test_evicting_changes_nothing_where_it_can_not() -> None:
    policy = KvtierPolicy(4)
    for key in _keys(1, 2, 3):
        block = ChunkStatus(0)
        block.ref_cnt = 0
        policy.insert(key, block)
    assert policy.evict(3, set(_keys(2))) is None
    assert policy.evict(2, set(_keys(2))) is not None
    assert policy.get(_keys(2)[0]) is not None
    policy.tier.check_invariants()


@pytest.mark.parametrize("other", ["lru", "arc"])
def test_prompts_that_come_back_among_many_that_do_not(other: str) -> None:
    def hits(policy: str) -> int:
        rng = random.Random(5)
        manager, found = CPUOffloadingManager(60, policy, MODULE), 0
        fresh = iter(range(1000, 10**6))
        conversations = [_keys(*range(100 * n, 100 * n + 12)) for n in range(1, 9)]
        for _ in range(500):
            for _ in range(2):
                _ask(manager, _keys(*(next(fresh) for _ in range(12))))
            found += _ask(manager, rng.choice(conversations))
        return found

    assert hits("KvtierPolicy") > hits(other)


def test_prefix_that_a_request_has_loaded_outlives_what_it_stores() -> None:
    manager = _manager(8)
    first, second = _keys(1, 2, 3, 4), _keys(11, 12, 13, 14)
    _ask(manager, first)
    _ask(manager, second)
    _ask(manager, [*first, *_keys(5, 6)])
    _check(manager)
    assert _ask(manager, first) == 4
    assert _ask(manager, second) == 2
