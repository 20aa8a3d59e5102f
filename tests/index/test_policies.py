"""The built-in eviction policies: the suite of all policies, and their special cases."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.assembly import policy_maker
from kvtier.core import hot
from kvtier.core.errors import ConfigError
from kvtier.core.system import plugins
from kvtier.core.types import DEVICE, HOST, BlockId, Slot
from kvtier.index import choice, make_index, make_key_index
from kvtier.index.native_index import NativeIndex
from kvtier.index.policies import EvictionPolicy, LruPolicy
from kvtier.index.policies.replayed import LRU, RUNS
from kvtier.testing import PolicySuite


class TestLruPolicy(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return LruPolicy()


class OwnPolicy(LruPolicy):
    """A policy derived from a built-in one, which may choose differently."""


@pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")
def test_native_index_is_used_for_policies_by_name() -> None:
    index = make_index({DEVICE: LRU, HOST: RUNS})
    assert isinstance(index, NativeIndex)
    assert index.describe() == "native, lru, runs"


def test_policy_in_python_is_called_by_the_index_in_python() -> None:
    own = OwnPolicy()
    index = make_index({DEVICE: LRU, HOST: own})
    index.insert(b"namespace", [b"a", b"b"], HOST, [Slot(0), Slot(1)], 1.0)
    assert len(own.candidates()) == 1
    assert index.describe().startswith("Python, ")
    assert not hot.NATIVE or "OwnPolicy" in index.describe()


class PromptPolicy(OwnPolicy):
    """Learns from prompts, so the device tier does not use it."""

    knows_prompts = True


def test_policy_of_a_plugin_is_made_for_each_tier_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = "kvtier.policies"
    made = {"own": "OwnPolicy", "prompts": "PromptPolicy"}
    entries = [EntryPoint(name, f"{__name__}:{made[name]}", group) for name in made]
    monkeypatch.setattr(plugins, "installed_plugins", lambda group: EntryPoints(entries))
    own, prompts = policy_maker("own"), policy_maker("prompts")
    assert isinstance(own(DEVICE), OwnPolicy)
    assert own(HOST) is not own(HOST)
    assert isinstance(prompts(HOST), PromptPolicy)
    assert prompts(DEVICE) == LRU
    assert policy_maker(RUNS)(DEVICE) == LRU
    with pytest.raises(ConfigError, match="'newest' is unknown; use one of .*sieve, own, prompts"):
        policy_maker("newest")


def test_plugin_that_makes_no_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("own", "builtins:dict", "kvtier.policies")
    monkeypatch.setattr(plugins, "installed_plugins", lambda group: EntryPoints([entry]))
    with pytest.raises(ConfigError, match="eviction_policy: 'own' makes a dict, no policy"):
        policy_maker("own")(HOST)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_lru_gives_the_least_recently_used_candidate(uses: list[int]) -> None:
    policy = LruPolicy()
    last_use: dict[int, int] = {}
    for now, block in enumerate(uses):
        policy.touch(BlockId(block), float(now))
        policy.add(BlockId(block))
        last_use[block] = now
    victims = []
    while (victim := policy.victim()) is not None:
        victims.append(victim)
        policy.forget(victim)
    assert victims == sorted(last_use, key=last_use.__getitem__)


def test_lru_keeps_its_heap_small() -> None:
    policy = LruPolicy()
    for now in range(10_000):
        policy.touch(BlockId(now % 4), float(now))
        policy.add(BlockId(now % 4))
    assert len(policy._heap) <= 64 + 2 * 4 + 1
    assert policy.victim() == 10_000 % 4


def test_without_the_native_core_lru_is_used_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "NATIVE", False)
    monkeypatch.setattr(choice, "NATIVE_REASON", "not built")
    expected = "eviction_policy=runs needs the native core (not built): lru is used instead"
    index = make_index({DEVICE: LRU, HOST: RUNS})
    keyed = make_key_index({HOST: RUNS}, lambda: b"")
    assert [record.getMessage() for record in caplog.records] == [expected, expected]
    index.insert(b"namespace", [b"a", b"b"], HOST, [Slot(0), Slot(1)], 1.0)
    index.on_request(b"namespace", [b"a", b"b"], 1.0)
    assert index.slots(index.evict(HOST, 2), HOST) == [1, 0]
    assert not keyed.learns
