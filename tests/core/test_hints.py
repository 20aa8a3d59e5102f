"""Hints on prompts, through the whole cache: who is still there after a flood of others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvtier.core.hints import (
    MAX_ACTIONS,
    MAX_BACK_S,
    MAX_TTL_S,
    Hint,
    Retain,
    parse_hint,
    parse_kv_hints,
)
from kvtier.core.keys import token_labels
from kvtier.core.types import HOST
from tests.cache.tokens.harness import BLOCK_SIZE, NS, Harness

TALK, OTHER = [1] * 8, [2] * 8
HOSTILE = b"hostile"


@pytest.fixture
def harness() -> Iterator[Harness]:
    """One tenant may raise four blocks of its host tier."""
    made = Harness(device_blocks=10, host_blocks=16)
    yield made
    made.close()


def hint(harness: Harness, tokens: list[int], hint: Hint) -> None:
    harness.cache.hint(NS, token_labels(tokens, BLOCK_SIZE), hint)
    harness.check()


def wait(harness: Harness, tokens: list[int], is_waiting: bool) -> None:
    harness.cache.wait(NS, token_labels(tokens, BLOCK_SIZE), is_waiting)
    harness.check()


def test_hints_of_clients_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(device_blocks=10, host_blocks=16)
    config = replace(harness.cache.config, client_hints="off")  # type: ignore[arg-type]
    monkeypatch.setattr(harness.cache, "config", config)
    for token in (1, 2):
        harness.serve([token] * 8)
    hint(harness, TALK, Hint(retain=(Retain(100),), back_in_s=60))
    wait(harness, OTHER, True)
    flood(harness)
    assert harness.matched(TALK) == []
    assert harness.matched(OTHER) == [HOST] * 4, "what the engine knows counts"
    wait(harness, OTHER, False)
    harness.close()


@pytest.mark.parametrize("policy", ["runs", "lru"])
def test_a_hostile_client_leaves_others_their_hits(policy: str) -> None:
    """It marks all its prompts with the highest priority for a day, and sends new ones for ever."""
    harness = Harness(device_blocks=10, host_blocks=60, eviction_policy=policy)
    theirs = [[token] * 8 for token in range(1, 5)]
    num_found = 0
    for step in range(60):
        if step >= 20:
            flood = [1000 + step] * 8
            harness.serve(flood)
            hint(harness, flood, Hint(retain=(Retain(100, ttl_s=MAX_TTL_S),), back_in_s=MAX_BACK_S))
        harness.lose_the_device()
        num_found += len(harness.matched(theirs[step % 4])) * (step >= 40)
        harness.serve(theirs[step % 4])
    assert num_found >= 0.95 * 4 * 20
    harness.close()


def test_what_one_tenant_raises_is_bounded(harness: Harness) -> None:
    """A hostile one marks all that it asks for; what others use stays."""
    for token in (3, 4, 5):
        harness.serve([token] * 8, HOSTILE)
        said = Hint(retain=(Retain(100, ttl_s=MAX_TTL_S),), back_in_s=MAX_BACK_S)
        harness.cache.hint(HOSTILE, token_labels([token] * 8, BLOCK_SIZE), said)
        harness.check()
    harness.serve(TALK)
    hint(harness, TALK, Hint(retain=(Retain(60),)))
    flood(harness)
    assert harness.matched(TALK) == [HOST] * 4, "another tenant has a share of its own"
    assert harness.matched([3] * 8, HOSTILE) == [HOST] * 4, "so far its words are followed"
    assert harness.matched([4] * 8, HOSTILE) == harness.matched([5] * 8, HOSTILE) == []


def flood(harness: Harness, first: int = 10, num_prompts: int = 10) -> None:
    for token in range(first, first + num_prompts):
        harness.serve([token] * 8)
    harness.lose_the_device()


@pytest.mark.parametrize(
    ("said", "is_there"),
    [
        (None, False),
        (Hint(back_in_s=60), True),
        (Hint(retain=(Retain(90),)), True),
        (Hint(retain=(Retain(90, ttl_s=0.01),)), False),
        (Hint(retain=(Retain(50),)), False),
    ],
    ids=["nothing", "back", "priority", "short", "usual"],
)
def test_after_a_flood_a_conversation_is_there_if_somebody_said_so(
    harness: Harness, said: Hint | None, is_there: bool
) -> None:
    harness.serve(TALK)
    if said is not None:
        hint(harness, TALK, said)
    flood(harness)
    assert harness.matched(TALK) == ([HOST] * 4 if is_there else [])


def test_only_the_tokens_that_were_named_stay(harness: Harness) -> None:
    harness.serve(TALK)
    hint(harness, TALK, Hint(retain=(Retain(90, last_token=3),)))
    flood(harness)
    assert harness.matched(TALK) == [HOST] * 2


def test_a_conversation_that_is_late_is_as_any_other(harness: Harness) -> None:
    harness.serve(TALK)
    hint(harness, TALK, Hint(back_in_s=10))
    harness.clock.now += 21
    flood(harness)
    assert harness.matched(TALK) == []


def test_an_ended_session_leaves_first_but_for_what_others_have() -> None:
    harness = Harness(device_blocks=10, host_blocks=12)
    ended = [7, 7, 7, 7, 1, 1, 1, 1]
    harness.serve(OTHER)
    harness.serve([7, 7, 7, 7, 2, 2, 2, 2])
    harness.serve(ended)
    hint(harness, ended, Hint(ended=True))
    harness.serve([9] * 8)  # there is room for two of its blocks
    harness.lose_the_device()
    assert harness.matched(ended) == [HOST] * 2
    assert harness.matched(OTHER) == [HOST] * 4
    assert harness.matched([7, 7, 7, 7, 2, 2, 2, 2]) == [HOST] * 4
    harness.close()


def test_what_waits_is_there_when_its_turn_comes_and_not_for_ever(harness: Harness) -> None:
    harness.serve(TALK)
    for _ in range(3):
        wait(harness, TALK, True)
    flood(harness)
    assert harness.matched(TALK) == [HOST] * 4
    for _ in range(2):
        wait(harness, TALK, False)
    flood(harness, 30)
    assert harness.matched(TALK) == [HOST] * 4
    wait(harness, TALK, False)
    flood(harness, 50)
    assert harness.matched(TALK) == []


def test_a_tier_half_full_of_what_must_not_leave_takes_others(harness: Harness) -> None:
    for token in (1, 2, 3):
        tenant = bytes([token])
        harness.serve([token] * 8, tenant)
        said = Hint(retain=(Retain(100, ttl_s=MAX_TTL_S),))
        harness.cache.hint(tenant, token_labels([token] * 8, BLOCK_SIZE), said)
    flood(harness)
    found = [len(harness.matched([token] * 8, bytes([token]))) for token in (1, 2, 3)]
    assert found == [4, 4, 0], "of all tenants together half of the tier"
    harness.clock.now += MAX_TTL_S
    flood(harness, 30)
    assert harness.matched([39] * 8) == [HOST] * 4


def test_many_that_wait_cost_nothing_in_between(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the engine does not go through those that wait."""
    harness.serve(TALK)
    calls = 0
    retain = harness.cache._index.retain

    def counted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        retain(*arguments)

    monkeypatch.setattr(harness.cache._index, "retain", counted)
    for _ in range(500):
        wait(harness, TALK, True)
    harness.serve(OTHER)
    harness.cache.poll()
    assert calls == 500


ENVELOPE = {"protocol_version": "0.1", "message_id": "7"}
FETCH = {
    "action_id": "1",
    "action_type": "kv.fetch",
    "action_version": "1.0",
    "payload": {"source_control_endpoint": "tcp://host-a:25000", "block_hashes": [5, 2**63]},
}
ENDED = {**FETCH, "action_type": "kvtier.hint", "payload": {"ended": True}}


def action(name: str, **payload: float) -> dict[str, Any]:
    """Return an action of kvtier's."""
    return {**FETCH, "action_type": f"kvtier.{name}", "payload": payload}


class Action(msgspec.Struct, frozen=True):
    """As vLLM has it after the front has parsed the JSON."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class Envelope(msgspec.Struct, frozen=True):
    protocol_version: str
    message_id: str
    actions: list[Action]


@pytest.mark.parametrize(
    ("actions", "kinds", "hint"),
    [
        ([FETCH], ["kv.fetch"], None),
        ([FETCH, ENDED], ["kv.fetch", "kvtier.hint"], Hint(ended=True)),
        ([{**ENDED, "payload": {"ended": 5}}], ["invalid"], None),
        ([{**FETCH, "payload": {}}], ["invalid"], None),
        (
            [{**FETCH, "action_type": "kv.evict"}, ENDED],
            ["unknown", "kvtier.hint"],
            Hint(ended=True),
        ),
        ([{**ENDED, "action_version": "2.0"}], ["unknown"], None),
        ([{**ENDED, "action_version": "1.4"}], ["kvtier.hint"], Hint(ended=True)),
        ([FETCH] * 1000, ["kv.fetch"] * MAX_ACTIONS, None),
        (
            [action("pin", ttl_s=60, first_token=4), action("prefetch", within_s=2)],
            ["kvtier.pin", "kvtier.prefetch"],
            Hint((Retain(100, 4, ttl_s=60),), prefetch_within_s=2),
        ),
        (
            [action("pin"), action("pin", first_token=8), action("demote", first_token=16)],
            ["kvtier.pin", "kvtier.pin", "kvtier.demote"],
            Hint((Retain(100), Retain(100, 8)), demote_from=16),
        ),
        (
            [action("release"), action("prefetch", within_s=2), action("demote")],
            ["kvtier.release", "invalid", "kvtier.demote"],
            Hint(ended=True, demote_from=0),
        ),
        ([action("prefetch"), action("pin", ttl_s=0)], ["invalid", "invalid"], None),
    ],
)
def test_known_actions_of_an_envelope_are_read_and_others_counted(
    actions: list[dict[str, Any]], kinds: list[str], hint: Hint | None
) -> None:
    given = {**ENVELOPE, "actions": actions}
    assert parse_kv_hints(given) == (hint, tuple(kinds))
    assert parse_kv_hints(msgspec.convert(given, Envelope)) == (hint, tuple(kinds))


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (None, ()),
        ({"evict_session": True}, ("invalid",)),
        (5, ("invalid",)),
        ({**ENVELOPE, "actions": 5}, ("invalid",)),
        ({**ENVELOPE, "actions": [5]}, ("invalid",)),
        ({**ENVELOPE, "protocol_version": "1.0", "actions": [ENDED]}, ("unknown",)),
    ],
)
def test_an_envelope_that_cant_be_understood_fails_no_request(
    given: object, kinds: tuple[str, ...]
) -> None:
    assert parse_kv_hints(given) == (None, kinds)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"prefetch": {}}, "prefetch has no time; give within_s, a number of seconds"),
        ({"prefetch": 5}, "prefetch is 5, but must be an object of within_s"),
        ({"prefetch": {"within_s": -1}}, "within_s is -1, but must be a number of seconds"),
        ({"prefetch": {"within_s": 1}, "ended": True}, "ended and prefetch say two things"),
        ({"demote": {"first_token": "x"}}, "first_token is 'x', but must be a whole number"),
        ({"demote": {}, "back_in_s": 1}, "demote and back_in_s say two things"),
    ],
)
def test_a_malformed_action_is_refused_with_one_sentence(given: object, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_hint(given)
