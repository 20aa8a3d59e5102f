"""Audits of hits under vLLM: recomputed blocks are compared with stored ones, in every rank."""

from __future__ import annotations

import ctypes
import logging
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.cache.audit import CAP, MIN_LEARNED, AuditOutcome
from kvtier.cache.block_cache import BlockState
from kvtier.cache.transfer.ranks import Compared
from kvtier.connectors.common.recomputed import MAX_BLOCKS, TokenPlaces, _distances
from kvtier.connectors.vllm.shared.audits import HitAudit
from kvtier.connectors.vllm.shared.key_scope import KeyScope
from kvtier.core.types import CacheMode
from kvtier.observe.specs import AUDITS
from kvtier.tiers import HostTier
from tests.connectors.kv_harness import NOTHING_CACHED, PAGE, SLOT_BYTES, KvHarness
from tests.connectors.test_node_tiers import open_room
from tests.kit.nodes import running

TEXT = "the quick brown fox jump"
"""Six pages."""
ALL_PAGES = range(6)


class Picks(random.Random):
    """Picks a given one of several."""

    def __init__(self, *picks: int) -> None:
        super().__init__()
        self._picks = list(picks)

    def randrange(self, *args: Any) -> int:
        return self._picks.pop(0)


class Audited(KvHarness):
    """An engine that audits every hit, and has computed ``text``. picks: see ``Picks``."""

    def __init__(self, *picks: int, text: str = TEXT, **options: Any) -> None:
        super().__init__(**{"audit": 1.0, **options})
        self.picks(*picks)
        if options.get("node") is not None:
            open_room(self)
        self.text = text
        pages = range(len(text) // PAGE)
        self.fill(pages, seed=1)
        cache, keys, is_there = self.half.manager.cache, self._keys(), False
        while not is_there:  # a node's memory is attached to with a deadline
            first = self.serve("first", text, pages)
            self.half.finish(first, [pages])
            self.step()
            is_there = set(cache.lookup(keys).states) == {BlockState.MEMORY}
            cache.poll()

    @property
    def audits(self) -> Any:
        return self.half.manager.audits

    def picks(self, *picks: int) -> None:
        """Have the next audits begin at these of the hit's blocks."""
        self.audits.auditor._random = Picks(*picks)

    def fill(self, pages: Sequence[int], seed: int) -> None:
        """Write different numbers of like size to each page, layer, part and rank."""
        super().fill(pages, seed)
        for rank in self.caches:
            for cache in rank.values():
                cache[:, list(pages)] = cache[:, list(pages)] % 32 + 48

    def recompute(self, name: str, cut: int, seed: int = 1, nudge: int = 0) -> Any:
        """Have a request load up to the block ``cut``, and compute the rest as the first one did.

        seed: of the KV that is computed; 1 for what was stored. nudge: number of tokens whose KV is
        rounded in another way.
        """
        request = self.request(name, self.text + "s")
        block, pages = PAGE * self.num, range(10, 17)
        assert self.asks(request) == cut * block, "loaded before the audited blocks"
        self.gets_pages(request, pages, cut * block)
        if cut:
            self.step()
        request.num_computed_tokens = cut * block
        self.fill(ALL_PAGES, seed)
        for rank in self.caches:
            for cache in rank.values():
                cache[:, list(pages[: len(ALL_PAGES)])] = cache[:, list(ALL_PAGES)]
                smallest = cache[0, pages[5], 0, 0].argmin()
                cache[0, pages[5], :nudge, 0, smallest] ^= 1
        self.step((request, pages, len(self.text) + 1 - cut * block))
        return request

    def outcomes(self) -> Counter[AuditOutcome]:
        """Return the audits so far, by outcome."""
        counts = self.half.manager.cache.metrics._recent.items()
        found: Counter[AuditOutcome] = Counter()
        for (metric, labels), number in counts:
            if metric is AUDITS:
                found[AuditOutcome(labels[1])] += int(number)
        return found

    def damage(self, block: int, rank: int = 0, token: int = 1) -> None:
        """Overwrite a token of a block's values in its last layer, in the memory of a rank."""
        cache, host = self.half.manager.cache, self.ranks[rank].worker._host
        key = self._keys()[block]
        (slot,) = cache.hold([key]).slots
        cache.release([key])
        assert isinstance(host, HostTier)
        at = host.memory.address + slot * SLOT_BYTES + 3 * PAGE * 8 * self.num + token * 8
        for byte in range(8):
            ctypes.c_uint8.from_address(at + byte).value ^= 0x40

    def _keys(self) -> list[bytes]:
        request = self.request("keys", self.text)
        tracked = self.half.begin(request)
        self.half._hash(tracked)
        self.half.finish(request, [()])
        return list(tracked.groups[0].keys)


@pytest.mark.parametrize("options", [{}, {"num": 2}, {"num_ranks": 2}, {"replicated": True}])
def test_recomputed_blocks_that_are_equal_are_counted_and_stored_once(
    options: dict[str, Any],
) -> None:
    if "replicated" in options:
        options |= {"num_ranks": 2}
    harness = Audited(1, 0, **options)
    used = harness.half.manager.cache.usage()
    for number, cut in enumerate((1, 0)):
        request = harness.recompute(f"audited {number}", cut)
        assert harness.half.finish(request, [range(10, 17)]) is False
        assert harness.outcomes() == {AuditOutcome.EQUAL: number + 1}
    assert harness.half.manager.cache.usage() == used, "nothing was stored again"
    harness.half.manager.cache.check_invariants()
    harness.close()


def test_difference_is_logged_with_its_place_and_quarantined(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Audited(2)
    harness.damage(3, token=1)
    waiting = harness.request("waiting", TEXT + "s")
    harness.half.begin(waiting)
    with caplog.at_level(logging.WARNING):
        request = harness.recompute("audited", 2)
    assert harness.outcomes() == {AuditOutcome.DIFFERENT: 1}
    assert "tier=host" in caplog.text
    assert f"first_token={2 * PAGE} end_token={6 * PAGE} worst_token={3 * PAGE + 1}" in caplog.text
    assert harness.asks(waiting) == 0, "a request of that time loads nothing more"
    manager, scope = harness.half.manager, KeyScope()
    renamed = manager.audits.renamed(harness.request("next", TEXT + "s"), scope)
    assert harness.asks(renamed) == 0, "what was stored before is missed"
    harness.gets_pages(renamed, range(10, 17))
    harness.step((renamed, range(10, 17), len(TEXT) + 1))
    again = manager.audits.renamed(harness.request("again", TEXT + "s"), scope)
    harness.picks(5)
    assert harness.asks(again) == 5 * PAGE, "and what was stored since is found"
    manager.audits.auditor.quarantine.add(manager.audits.auditor.quarantine.names(bytes(32))[-1])
    manager.audits.renamed(harness.request("last", TEXT), scope)
    assert scope.kept == scope.shared == 0, "nothing is kept after a second difference"
    harness.half.finish(request, [range(10, 17)])
    manager.cache.check_invariants()
    harness.close()


def test_wrong_shard_of_one_rank_is_a_difference() -> None:
    harness = Audited(0, num_ranks=2)
    harness.damage(4, rank=1)
    harness.recompute("audited", 0)
    assert harness.outcomes() == {AuditOutcome.DIFFERENT: 1}
    harness.close()


def test_stages_of_unlike_length_show_a_difference_in_any_layer() -> None:
    first, second = Compared(np.zeros((3, 2, PAGE), np.float32)), np.zeros((2, 2, PAGE), np.float32)
    second[1, 1, 2] = 0.5
    for both in (first.and_also(Compared(second)), Compared(second).and_also(first)):
        assert both.distances.max((0, 1)).tolist() == [0, 0, 0.5, 0]


def test_layers_of_several_kinds_show_a_difference_in_any_tensor() -> None:
    places = np.arange(PAGE * 2, dtype=np.int32).reshape(1, PAGE, 2)
    one, two, three = (TokenPlaces(torch.float16, at, places) for at in (0, 8, 16))
    fresh = np.ones(24, np.float16)
    stored = fresh.copy()
    stored[8] = 2  # in the second tensor of the first layer
    found = _distances(fresh.view(np.uint8), stored.view(np.uint8), [[one, two], [three]])
    assert (found.max((1, 2)) > 0).tolist() == [True, False]


def test_ranks_may_report_in_different_steps() -> None:
    harness = Audited()
    state = harness.half.begin(harness.request("audited", TEXT + "s")).state
    key, other, *_ = harness._keys()
    harness.audits._current = HitAudit(state, [key], 0, "host", set(), {key})
    for name, distance in (key, 1.0), (key, 0.0), (other, 0.0):
        harness.audits.hear({name: Compared(np.full((1, 1, 1), distance, np.float32))})
    (compared,) = harness.audits.of(state).compared.values()
    assert compared.distances.max() == 1
    harness.audits.reset()
    harness.close()


def test_block_of_another_prompt_is_a_difference_in_every_token() -> None:
    """The stored block is right, and what is computed now is something else."""
    harness = Audited(5)
    harness.recompute("audited", 5, seed=9)
    assert harness.outcomes() == {AuditOutcome.DIFFERENT: 1}
    harness.close()


def test_no_more_blocks_are_compared_than_a_rank_has_room_for() -> None:
    harness = Audited(0, text=TEXT * 3, num_slots=32)
    request = harness.request("audited", TEXT * 3 + "s")
    assert harness.asks(request) == 0
    assert len(harness.audits.of(harness.half.begin(request).state).keys) == MAX_BLOCKS
    harness.close()


def test_one_audit_is_in_flight_at_a_time_and_ends_with_its_request() -> None:
    harness = Audited(1, 1)
    first, second = (harness.request(name, TEXT + "s") for name in ("one", "two"))
    assert harness.asks(first) == PAGE
    assert harness.asks(second) == len(TEXT), "loaded in full"
    assert harness.outcomes() == {AuditOutcome.SKIPPED: 1}
    assert harness.asks(first) == PAGE, "vLLM gets the same answer until the request runs"
    harness.half.finish(first, [()])
    assert harness.outcomes() == {AuditOutcome.SKIPPED: 2}
    third = harness.request("three", TEXT + "s")
    assert harness.asks(third) == PAGE
    harness.close()


def test_no_audit_begins_while_another_request_loads() -> None:
    harness = Audited(1)
    loading = harness.request("loading", TEXT + "s")
    harness.audits.auditor.share = 0.0
    assert harness.asks(loading) == len(TEXT)
    harness.gets_pages(loading, range(10, 17), len(TEXT))
    harness.audits.auditor.share = 1.0
    assert harness.asks(harness.request("other", TEXT + "s")) == len(TEXT)
    assert harness.outcomes() == {AuditOutcome.SKIPPED: 1}
    harness.step()
    assert harness.asks(harness.request("later", TEXT + "s")) == PAGE
    harness.close()


def test_engine_that_stores_nothing_audits() -> None:
    harness = Audited(1)
    harness.half.manager._mode = CacheMode.LOAD_ONLY
    harness.recompute("audited", 1)
    assert harness.outcomes() == {AuditOutcome.EQUAL: 1}
    harness.close()


def test_preempted_request_is_not_audited() -> None:
    harness = Audited(0)
    request = harness.request("audited", TEXT + "s")
    assert harness.asks(request) == 0
    harness.gets_pages(request, range(10, 17))
    harness.run(harness.message((request, range(10, 17), len(TEXT) + 1)), ends=False)
    message = harness.message(num_scheduled={}, preempted={"audited"}, cached=NOTHING_CACHED)
    harness.run(message)
    assert harness.outcomes() == {AuditOutcome.SKIPPED: 1}, "its pages may be another request's"
    harness.half.manager.cache.check_invariants()
    harness.close()


def test_reset_ends_the_audit_in_flight() -> None:
    harness = Audited(0, 0)
    request = harness.request("audited", TEXT + "s")
    assert harness.asks(request) == 0
    harness.gets_pages(request, range(10, 17))
    harness.run(harness.message((request, range(10, 17), len(TEXT) + 1)), ends=False)
    harness.half.reset()
    harness.step()
    assert harness.outcomes() == {}
    harness.fill(ALL_PAGES, seed=1)
    after = harness.serve("after", TEXT, ALL_PAGES)
    harness.half.finish(after, [ALL_PAGES])
    harness.recompute("next", 0)
    assert harness.outcomes() == {AuditOutcome.EQUAL: 1}
    harness.half.manager.cache.check_invariants()
    harness.close()


def test_blocks_that_the_planner_computes_are_audited_for_nothing() -> None:
    harness = Audited(audit=1e-9)
    request = harness.request("declined", TEXT + "s")
    tracked = harness.half.begin(request)
    harness.half.num_to_load(tracked, 0)
    tracked.state.declined = set(tracked.groups[0].keys[3:])
    harness.audits._considered.clear()
    assert harness.audits.begin(tracked.state, 0, 3 * PAGE, False) is False, "nothing is cut"
    harness.gets_pages(request, range(10, 17), 3 * PAGE)
    harness.step()
    for rank in harness.caches:
        for cache in rank.values():
            cache[:, 13:16] = cache[:, 3:6]
    request.num_computed_tokens = 3 * PAGE
    harness.step((request, range(10, 17), len(TEXT) + 1 - 3 * PAGE))
    assert harness.outcomes() == {AuditOutcome.EQUAL: 1}
    harness.close()


def test_tolerance_is_learned_from_two_computations_of_a_block() -> None:
    """Equal ones teach nothing. An audited prompt is audited again until enough is known."""
    harness = Audited(3)
    harness.half.finish(harness.recompute("first", 3), [range(10, 17)])
    harness.audits.auditor.share = 0.0
    tolerance = harness.audits.auditor.tolerance
    for number in range(MIN_LEARNED):
        assert tolerance.value == CAP
        harness.picks(2)
        again = harness.recompute(f"{number}", 2, nudge=(number + 1) % 2)
        harness.half.finish(again, [range(10, 17)])
    assert 0 < tolerance.value < CAP
    assert harness.outcomes() == {AuditOutcome.EQUAL: 5, AuditOutcome.WITHIN_TOLERANCE: 4}
    unaudited = harness.request("last", TEXT + "s")
    assert harness.asks(unaudited) == len(TEXT), "enough is known"
    harness.close()


def test_prompt_whose_computations_are_equal_is_not_audited_for_ever() -> None:
    harness = Audited(3)
    harness.half.finish(harness.recompute("first", 3), [range(10, 17)])
    harness.audits.auditor.share = 0.0
    for number in range(MIN_LEARNED):
        harness.picks(2)
        harness.half.finish(harness.recompute(f"{number}", 2), [range(10, 17)])
    assert harness.asks(harness.request("last", TEXT + "s")) == len(TEXT)
    assert harness.audits.auditor.tolerance.value == CAP
    harness.close()


def test_computations_by_other_weights_teach_nothing() -> None:
    """The names of blocks stay, and such KV is unrelated: the tolerance would be the cap."""
    harness = Audited(0, 0, 0)
    harness.half.finish(harness.recompute("before", 0), [range(10, 17)])
    harness.half.reset()
    harness.step()
    harness.fill(ALL_PAGES, seed=2)
    harness.half.finish(harness.serve("new weights", TEXT, ALL_PAGES), [ALL_PAGES])
    harness.half.finish(harness.recompute("after", 0, seed=2), [range(10, 17)])
    assert harness.outcomes() == {AuditOutcome.EQUAL: 2}
    assert not harness.audits.auditor.tolerance._seen
    harness.close()


def test_audits_over_a_node_and_a_slot_that_it_gave_away(tmp_path: Path) -> None:
    with running(tmp_path) as node:
        harness = Audited(1, 1, node=node.socket)
        harness.recompute("audited", 1)
        assert harness.outcomes() == {AuditOutcome.EQUAL: 1}
        request = harness.request("given away", TEXT + "s")
        assert harness.asks(request) == PAGE
        harness.gets_pages(request, range(10, 17), PAGE)
        harness.step()
        request.num_computed_tokens = PAGE
        message = harness.message((request, range(10, 17), len(TEXT) + 1 - PAGE))
        (store,) = message.stores
        assert store.slots.guard is not None
        object.__setattr__(store.slots.guard, "generations", [-1] * len(store.slots.slots))
        harness.run(message)
        assert harness.outcomes() == {AuditOutcome.EQUAL: 1, AuditOutcome.SKIPPED: 1}
        harness.close()
