"""Phases of a request under vLLM, in any order of what vLLM and the ranks report."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.block_cache import BlockState
from kvtier.connectors.vllm.shared.key_scope import Doubt
from kvtier.connectors.vllm.shared.prompt import RequestBlocks
from kvtier.connectors.vllm.shared.request_state import LEGAL, Phase, RequestState, Way
from kvtier.plan.decide import Wait

KEYS = [b"first", b"second"]


def _state() -> RequestState:
    return RequestState(RequestBlocks("r", {key: 16 * at for at, key in enumerate(KEYS, 1)}))


def _do(state: RequestState, event: str) -> Phase:
    """Report an event to a request. Return the phase that it leads to."""
    match event:
        case "look up":
            state.begin_look_up(0)
            return Phase.LOOKING_UP
        case "wait":
            state.begin_wait(Wait(1.0))
            return Phase.WAITING
        case "load":
            state.begin_load(KEYS, 0.0)
            return Phase.LOADING
        case _:
            state.finish()
            return Phase.FINISHED


EVENTS = ["look up", "wait", "load", "finish"]


@given(st.lists(st.sampled_from([*EVENTS, "end of load", "reset"]), max_size=12))
def test_only_legal_phases_follow_each_other(events: list[str]) -> None:
    state = _state()
    expected: Phase
    for event in events:
        before = state.phase
        if event == "end of load":
            since_s = state.since_s
            assert state.end_load() == since_s
            assert state.since_s is None
            expected = Phase.LOOKING_UP if before is Phase.LOADING else before
        elif event == "reset":
            state.reset(has_new_weights=False)
            is_idle = before in (Phase.NEW, Phase.FINISHED)
            expected = before if is_idle else Phase.LOOKING_UP
        else:
            try:
                expected = _do(state, event)
            except AssertionError:
                assert state.phase is before
                return
            assert expected in LEGAL[before]
        assert state.phase is expected
        assert (state.wait is not None) == (state.phase is Phase.WAITING)
        assert (state.since_s is None) == (state.phase is not Phase.LOADING) or (
            state.phase is Phase.FINISHED  # its load may end later
        )


def test_a_reset_request_may_load_all_again() -> None:
    state = _state()
    state.begin_look_up(0)
    state.limit, state.since_s = 16, 5.0
    state.ways[KEYS[0]] = Way.PROMOTED
    state.reset(has_new_weights=False)
    assert (state.limit, state.since_s, state.ways) == (_state().limit, None, {})


@pytest.mark.parametrize("event", EVENTS)
def test_engine_goes_on_after_an_illegal_phase(
    event: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = _state()
    state.finish()
    with pytest.raises(AssertionError, match="from finished to"):
        _do(state, event)
    monkeypatch.setattr(RequestState, "is_strict", False)
    assert state.phase is Phase.FINISHED
    assert _do(state, event) is state.phase
    assert "no change of phase request=r" in caplog.text


def test_block_is_read_directly_once() -> None:
    state = _state()
    state.begin_look_up(0)
    state.ways = dict.fromkeys(KEYS, Way.DIRECT)
    state.lookup.met = {KEYS[0]: BlockState.STORAGE, KEYS[1]: BlockState.MEMORY}
    assert state.begin_load(KEYS, 0.0) == {KEYS[0]: 0}
    assert state.ways == {KEYS[0]: Way.READ}
    state.end_load()
    state.begin_look_up(0)
    state.lookup.met = dict.fromkeys(KEYS, BlockState.MEMORY)
    assert state.begin_load(KEYS, 0.0) == {}
    assert not state.ways, "it is loaded from memory"


def test_nothing_of_earlier_weights_is_kept() -> None:
    state = _state()
    assert state.is_kept(KEYS[0])
    state.reset(has_new_weights=True)
    assert not state.is_kept(KEYS[0])
    assert not state.scope.is_computed_right()
    state.scope.doubts = Doubt.PAGES
    assert state.is_kept(KEYS[0]), "only what was copied meanwhile is doubted"
    assert not state.scope.is_computed_right()


def test_state_has_at_most_ten_fields() -> None:
    assert len(fields(RequestState)) <= 10
