"""Storage with slow look-ups: which requests wait for them, and how long."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvtier.core.keys import token_labels
from kvtier.testing import MemoryStorage
from kvtier.tiers import StorageFacts
from tests.cache.tokens.harness import BLOCK_SIZE, NS, A, B, C, Harness, until

MakeHarness = Callable[..., Harness]

PATIENCE_S = 0.1
ASKED = StorageFacts(finds_at_once=False)


@pytest.fixture
def harness(make_harness: MakeHarness) -> Harness:
    """Return a harness whose storage has A, B and C from an earlier one."""
    before = make_harness(disk_blocks=20)
    for tokens in (A, B, C):
        before.serve(tokens)
    harness = make_harness(disk_blocks=20, shelf=before.shelf, storage_facts=ASKED)
    assert harness.cache.config.lookup_deadline_s == PATIENCE_S
    return harness


def storage_of(harness: Harness) -> MemoryStorage:
    assert harness.storage is not None
    return harness.storage


def is_asking(harness: Harness, tokens: list[int]) -> bool:
    return harness.cache.lookup(NS, token_labels(tokens, BLOCK_SIZE))


def ask_until_late(harness: Harness, tokens: list[int]) -> None:
    """A request looks up storage, and continues without the answer after its deadline."""
    storage_of(harness).open_finds.clear()
    assert is_asking(harness, tokens)
    harness.clock.now += PATIENCE_S
    assert not is_asking(harness, tokens), "a request waited for longer than it may"


def hear(harness: Harness, tokens: list[int]) -> None:
    """The answer arrives, and the next request finds the blocks."""
    storage_of(harness).open_finds.set()
    labels = token_labels(tokens, BLOCK_SIZE)
    until(harness, lambda: len(harness.cache.match(NS, labels).blocks) == 4)


def test_answer_in_time_is_waited_for(harness: Harness) -> None:
    storage_of(harness).open_finds.clear()
    assert is_asking(harness, A)
    hear(harness, A)
    assert not is_asking(harness, A), "there is nothing left to hear"
    assert is_asking(harness, B)


def test_late_answer_is_for_the_next_request_and_nobody_waits_meanwhile(harness: Harness) -> None:
    ask_until_late(harness, A)
    assert not is_asking(harness, C), "others waited for storage that is late"
    hear(harness, A)


def test_storage_that_was_slow_is_not_waited_for_until_it_is_fast(harness: Harness) -> None:
    ask_until_late(harness, A)
    time.sleep(1.5 * PATIENCE_S)  # the look-up takes that long
    hear(harness, A)
    assert not is_asking(harness, B)
    hear(harness, B)
    assert is_asking(harness, C), "storage answers in time again"


def test_storage_that_was_heard_late_is_waited_for(harness: Harness) -> None:
    """It answered at once; only the engine was busy with a long step."""
    ask_until_late(harness, A)
    hear(harness, A)
    assert is_asking(harness, B)


def test_nobody_waits_for_longer_than_computing_takes(harness: Harness) -> None:
    harness.cache.observe_prefill(0, len(A), PATIENCE_S / 4)
    storage_of(harness).open_finds.clear()
    assert is_asking(harness, A)
    harness.clock.now += PATIENCE_S / 3
    assert not is_asking(harness, A)
    assert is_asking(harness, A * 2), "to compute all of that takes longer"
    assert is_asking(harness, B), "storage is not late"
    harness.clock.now += PATIENCE_S
    assert not is_asking(harness, A * 20), "it is now"
    hear(harness, A)


def test_storage_that_takes_longer_than_computing_is_asked_and_not_waited_for(
    harness: Harness,
) -> None:
    harness.cache.observe_prefill(0, len(A), 1e-9)
    storage_of(harness).open_finds.clear()
    assert is_asking(harness, A), "nobody knows yet how long it takes"
    hear(harness, A)
    storage_of(harness).open_finds.clear()
    assert not is_asking(harness, B)
    hear(harness, B)


def test_storage_is_late_though_nobody_who_asked_waits_any_more(harness: Harness) -> None:
    harness.cache.observe_prefill(0, len(A), PATIENCE_S / 4)
    storage_of(harness).open_finds.clear()
    assert is_asking(harness, A)
    harness.clock.now += PATIENCE_S / 2
    assert not is_asking(harness, A)
    harness.clock.now += PATIENCE_S
    harness.cache.poll()
    assert not is_asking(harness, B)
    hear(harness, A)
