"""Evictions under SGLang: requests through its own tree, and the same ones replayed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvtier.connectors.sglang.shared.contract import TELLING
from kvtier.connectors.sglang.shared.pages import Pages
from kvtier.connectors.sglang.shared.prompt_reporting import PREFETCHES, TREE
from kvtier.index.policies.replayed import LRU, RUNS
from kvtier.tools.replay.policies import Replayer
from kvtier.tools.replay.segments import find_segments
from tests.engines.sglang.pools import NUM_PAGES, host_pool, tokens
from tests.engines.sglang.test_storage import Opens, opens
from tests.engines.sglang.trees import FULL, PAGE, Tree, hook
from tests.tools.replay.oracle import trace_of

PAGE_BYTES = 2 * FULL.num_layers * PAGE * FULL.head_num * FULL.head_dim * 2
ROOM = 64
"""Pages in host memory, or on disk."""
SECONDS = 1.0
"""Between two requests."""

__all__ = ["opens"]  # a fixture


def _flood(num_requests: int) -> list[list[int]]:
    """Return prompts as page numbers: eight that recur, among others that do not.

    Every third request is one of eight prompts of six pages, in turns. The others have eight pages
    each, and occur once.
    """
    prompts = []
    for at in range(num_requests):
        first = 10 * (at % 24) if at % 3 == 0 else 1000 + 10 * at
        prompts.append(list(range(first, first + (6 if at % 3 == 0 else 8))))
    return prompts


def _tokens(prompt: Sequence[int]) -> list[int]:
    return [page * PAGE + at for page in prompt for at in range(PAGE)]


def _served(prompts: Sequence[Sequence[int]], policy: str) -> list[int]:
    """Pages that each finds, where the device keeps nothing between two requests."""
    tree = Tree(
        FULL,
        host_capacity=ROOM * PAGE_BYTES,
        eviction_policy=policy,
    )
    cache, now_s = tree.linker._linked["kv"].cache, 0.0
    assert tree.linker._linked["kv"].cache.ladder.usage()["host"].num_slots == ROOM
    cache._clock = lambda: now_s
    found = []
    for number, prompt in enumerate(prompts):
        now_s = number * SECONDS
        req, num_tokens = tree.find(f"r{number}", _tokens(prompt))
        found.append(num_tokens // PAGE)
        if num_tokens:
            assert tree.load(req) is not None
        tree.compute(_tokens(prompt))
        tree.settle()
        tree.flush()
    assert len(tree.linker.asking._told) <= 1, "requests that have gone are remembered"
    tree.close()
    return found


def test_what_the_tree_finds_is_what_the_replay_finds() -> None:
    hook()
    prompts = _flood(300)
    trace = trace_of(prompts, PAGE, SECONDS)
    replayer = Replayer(trace, find_segments(trace))
    found = {policy: sum(_served(prompts, policy)[150:]) for policy in (LRU, RUNS)}
    replayed = {policy: int(replayer.hits(policy, ROOM).found[150:].sum()) for policy in found}
    assert found[LRU] == replayed[LRU]
    assert abs(found[RUNS] - replayed[RUNS]) <= 0.1 * replayed[RUNS]
    assert found[RUNS] > found[LRU] + 100


@pytest.mark.parametrize("core", ["python", "rust"])
def test_the_linkers_policy_is_told_of_whole_prompts_and_of_answers(
    core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook()
    tree = Tree(FULL, core=core)
    cache = tree.linker._linked["kv"].cache
    asked: list[list[bytes]] = []
    behind: list[tuple[list[bytes], bytes]] = []
    monkeypatch.setattr(cache, "on_request", asked.append)
    monkeypatch.setattr(cache, "continues", lambda keys, before: behind.append((keys, before)))
    question, answer = _tokens(range(4)), _tokens(range(6))
    keys = get_storage_hash_str(RadixKey(array("q", answer)), page_size=PAGE)
    pages = [bytes.fromhex(key) for key in keys]
    tree.find("a", question)
    tree.compute(question)
    tree.settle()
    tree.compute(answer)
    tree.settle()
    assert (asked, behind) == ([pages[:4]], [(pages[4:], pages[3])])
    more, other = _tokens([*range(6), 8, 9]), _tokens([0, 1, 20])  # the device has a part
    tree.find("b", more)
    req, _ = tree.find("c", other)
    tree.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", other)), req=req))
    tree.find("d", answer)
    lengths = [(each[:6] == pages, each[:2] == pages[:2], len(each)) for each in asked[1:]]
    assert lengths == [(True, True, 8), (False, True, 3), (True, True, 6)]
    tree.flush()
    tree.find("e", answer)
    assert asked[4:] == [pages]
    tree.close()


class Controller:
    """Calls a storage back end as SGLang's controller does.

    The first pages of a request may be on the device.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self._num_requests = 0
        calls = storage._slabs["kv"].calls
        calls._clock = calls.cache._clock = lambda: self._num_requests * SECONDS
        self.before: list[str] = []
        self._tree = SimpleNamespace(
            page_size=PAGE,
            tree_core=SimpleNamespace(
                is_eagle=False, get_hash_values=lambda node: self.before[node:]
            ),
            get_prefix_hash_values=lambda node: self.before[:node],
        )

    def joins(self, prompt: Sequence[int], num_before: int = 0, rid: str = "") -> list[str]:
        """Add a request to the queue; return the keys of its pages."""
        tokens_of = array("q", _tokens(prompt))
        keys: list[str] = get_storage_hash_str(RadixKey(tokens_of), page_size=PAGE)
        self.before, self._num_requests = keys[:num_before], self._num_requests + 1
        at = num_before * PAGE
        asked = PREFETCHES.hooks()[
            f"{TREE}.prefetch_from_storage"
        ](
            lambda *given, **more: (given, more),
            self._tree,
            CacheRequestHandle(rid or f"r{self._num_requests}", 0),
            1,  # the node: it begins with the second page
            tokens_of[at:],
            self.before[-1] if num_before else None,
            self.before[:1] if self._num_requests % 2 else None,
            matched_prefix_tokens=tokens_of[:at],
            extra_key=None,
            cache_salt=None,
            storage_hit_end=None,
        )
        assert asked[0][0] is self._tree
        assert asked[1]["storage_hit_end"] is None
        return keys

    def serve(self, prompt: Sequence[int]) -> int:
        """Load the pages that storage has, and store the others; return the number loaded."""
        keys = self.joins(prompt)
        places = tokens(*range(len(keys)))
        num: int = self._storage.batch_exists(keys, HiCacheStorageExtraInfo([]))
        if num:
            got = self._storage.batch_get_v1(keys[:num], places[: num * PAGE])
            assert got == [True] * num
        before = HiCacheStorageExtraInfo(keys[:num])
        stored = self._storage.batch_set_v1(keys[num:], places[num * PAGE :], before)
        assert all(stored), "SGLang would warn of a failure"
        return num


def test_storage_finds_what_the_replay_finds(opens: Opens, tmp_path: Path) -> None:
    hook()
    assert TELLING.differences() == []
    prompts = _flood(300)
    assert max(map(len, prompts)) <= NUM_PAGES
    trace = trace_of(prompts, PAGE, SECONDS)
    replayer = Replayer(trace, find_segments(trace))
    slot_bytes = -(-Pages(pool := host_pool("mha", "page_first")).num_bytes // 4096) * 4096
    found = {}
    for policy in (LRU, RUNS):
        settings = {"eviction_policy": policy, "disk_path": str(tmp_path / policy)}
        storage = opens(pool, disk_capacity=ROOM * slot_bytes, **settings)
        assert storage._slabs["kv"].calls.learns == (policy == RUNS)
        controller = Controller(storage)
        found[policy] = sum([controller.serve(prompt) for prompt in prompts][150:])
        storage.close()
    replayed = {policy: int(replayer.hits(policy, ROOM).found[150:].sum()) for policy in found}
    assert found[LRU] == replayed[LRU]
    assert abs(found[RUNS] - replayed[RUNS]) <= 0.1 * replayed[RUNS]
    assert found[RUNS] > found[LRU] + 100


def test_requests_are_told_of_once_with_all_of_their_prompts(
    opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook()
    storage = opens(host_pool("mha", "page_first"))
    told: list[list[bytes]] = []
    monkeypatch.setattr(storage._slabs["kv"].calls.cache, "on_request", told.append)
    controller = Controller(storage)
    keys = controller.joins(range(5), rid="a")
    assert told == [], "the scheduler's thread only notes it"
    for num_before in (2, 5):  # SGLang looks up again; it has more by now
        controller.joins(range(5), num_before, rid="a")
    controller.joins(range(5), 5, rid="b")
    controller.joins(range(4), 2, rid="a")  # another request takes the same name
    controller.before = []
    storage.batch_exists(keys[:1])
    whole = [bytes.fromhex(key) for key in keys]
    assert told == [whole, whole, whole[:4]]


def test_each_pool_learns_and_knows_how_many_of_a_prompts_pages_it_gets(
    opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    hook()
    kv, swa, indexer = (host_pool("mha", "page_first") for _ in range(3))
    storage = opens(kv, sides={PoolName.SWA: swa, PoolName.INDEXER: indexer})
    calls: list[tuple[str, object]] = []
    for name, slab in storage._slabs.items():
        assert slab.calls.learns
        for call in ("on_request", "set_num_last"):
            note = partial(lambda name, given: calls.append((name, given)), name)
            monkeypatch.setattr(slab.calls.cache, call, note)
    keys = Controller(storage).joins(range(5), rid="a")
    window = PoolTransfer(PoolName.SWA, keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    all_pages = PoolTransfer(PoolName.INDEXER, keys=keys, hit_policy=PoolHitPolicy.ALL_PAGES)
    storage.batch_exists_v2(keys, [window, all_pages])
    whole = [bytes.fromhex(key) for key in keys]
    assert calls == [("swa", 2), ("kv", whole), ("swa", whole), ("indexer", whole)]
