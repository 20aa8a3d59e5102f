"""Hints that act: prefetches before the request comes, and demotions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtier.cache import hint_actions
from kvtier.cache.hint_actions import KEEP_S, LOOK_AGAIN_S
from kvtier.core.hints import MAX_TTL_S, Action, Hint, HintOutcome, HintResult, Retain
from kvtier.core.keys import token_labels
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.observe.specs import HINTS
from kvtier.testing import StoredBlocks

from .harness import BLOCK_SIZE, NS, A, B, Harness, count

MakeHarness = Callable[..., Harness]
LONG_A, LONG_B = [*A, 9], [*B, 9]
"""Four blocks each, and a token left to compute."""
SOON, LATER = Hint(prefetch_within_s=0.1), Hint(prefetch_within_s=100)


@pytest.fixture
def shelf(make_harness: MakeHarness) -> StoredBlocks:
    """Return storage that has A, B and others from an earlier harness."""
    shelf = StoredBlocks()
    earlier = make_harness(disk_blocks=60, shelf=shelf)
    for prompt in (LONG_A, LONG_B, *([token] * 9 for token in range(3, 8))):
        earlier.serve(prompt)
    return shelf.copy()


@pytest.fixture
def harness(make_harness: MakeHarness, shelf: StoredBlocks) -> Harness:
    """One tenant may prefetch eight blocks, all together sixteen."""
    return make_harness(disk_blocks=60, host_blocks=32, shelf=shelf)


def hint(
    harness: Harness, tokens: list[int], given: Hint, namespace: bytes = NS
) -> list[HintResult]:
    results = harness.cache.hint(namespace, token_labels(tokens, BLOCK_SIZE), given)
    assert harness.cache.drain()
    harness.check()
    return list(results)


def prefetched(outcome: HintOutcome, num_blocks: int = 0) -> list[HintResult]:
    return [HintResult(Action.PREFETCH, outcome, num_blocks)]


def counted(harness: Harness, outcome: HintOutcome, action: Action = Action.PREFETCH) -> float:
    return count(harness.cache.metrics, HINTS.name, action=action.value, outcome=outcome.value)


def test_blocks_are_in_memory_before_their_request_comes(harness: Harness) -> None:
    assert hint(harness, LONG_A, SOON) == prefetched(HintOutcome.BEGUN, 4)
    assert harness.matched(LONG_A) == [HOST] * 4
    num_reads = len(harness.storage.reads)
    harness.serve(LONG_A)
    assert len(harness.storage.reads) == num_reads
    assert counted(harness, HintOutcome.USED) == 1
    harness.clock.now += 1000
    harness.cache.poll()
    assert counted(harness, HintOutcome.EXPIRED) == 0


def test_a_prefetch_for_later_begins_shortly_before_its_time(harness: Harness) -> None:
    assert hint(harness, LONG_A, LATER) == prefetched(HintOutcome.SCHEDULED, 4)
    harness.clock.now += 99
    harness.cache.poll()
    assert harness.storage.reads == []
    harness.clock.now += 0.9
    harness.cache.poll()
    assert harness.cache.drain()
    assert harness.matched(LONG_A) == [HOST] * 4
    assert counted(harness, HintOutcome.SCHEDULED) == counted(harness, HintOutcome.BEGUN) == 1


def test_one_step_begins_few_of_the_prefetches_of_one_time(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_actions, "BLOCKS_AT_ONCE", 4)
    for prompt in LONG_A, LONG_B:
        hint(harness, prompt, LATER)
    harness.clock.now += 100
    for num_begun in 1, 2:
        assert harness.cache.is_busy or num_begun == 1
        harness.cache.poll()
        assert counted(harness, HintOutcome.BEGUN) == num_begun


def test_a_request_that_comes_early_ends_the_prefetch(harness: Harness) -> None:
    hint(harness, LONG_A, LATER)
    harness.serve([*LONG_A, 5, 5])
    num_reads = len(harness.storage.reads)
    harness.cache.clear(DEVICE)
    harness.cache.clear(HOST)
    harness.clock.now += 100
    harness.cache.poll()
    assert harness.cache.drain()
    assert len(harness.storage.reads) == num_reads
    assert counted(harness, HintOutcome.BEGUN) == 0


def test_the_prefetch_of_another_prompt_goes_on(harness: Harness) -> None:
    hint(harness, LONG_A, SOON)
    harness.serve([5] * 6 + A[6:])
    assert counted(harness, HintOutcome.USED) == 0


def test_nothing_is_read_that_is_in_memory(harness: Harness) -> None:
    harness.serve(LONG_A)
    num_reads = len(harness.storage.reads)
    assert hint(harness, LONG_A, SOON) == prefetched(HintOutcome.IN_MEMORY, 4)
    assert len(harness.storage.reads) == num_reads


def test_what_no_storage_has_is_answered(harness: Harness) -> None:
    assert hint(harness, [99] * 9, SOON) == prefetched(HintOutcome.ABSENT)


def test_without_storage_nothing_can_be_prefetched(make_harness: MakeHarness) -> None:
    harness = make_harness()
    assert hint(harness, LONG_A, SOON) == prefetched(HintOutcome.NO_STORAGE)


def test_hints_that_are_off_do_nothing(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(harness.cache.config, client_hints="off")  # type: ignore[arg-type]
    monkeypatch.setattr(harness.cache, "config", config)
    assert hint(harness, LONG_A, SOON) == prefetched(HintOutcome.OFF)
    assert harness.storage.reads == []


def test_a_prefetch_that_is_not_used_leaves_memory_again(harness: Harness) -> None:
    hint(harness, LONG_A, SOON)
    harness.clock.now += KEEP_S
    harness.cache.poll()
    assert harness.matched(LONG_A) == [HOST] * 4
    harness.clock.now += 1
    harness.cache.poll()
    harness.check()
    assert harness.matched(LONG_A) == [DISK] * 4
    assert counted(harness, HintOutcome.EXPIRED) == 1


def test_blocks_that_another_prompt_used_meanwhile_stay(harness: Harness) -> None:
    hint(harness, LONG_A, SOON)
    harness.serve([1, 1, 1, 1, 5, 5, 5, 5])
    harness.clock.now += KEEP_S + 1
    harness.cache.poll()
    harness.lose_the_device()
    assert harness.matched(LONG_A) == [HOST] * 2 + [DISK] * 2


def test_a_tenant_prefetches_within_its_share(harness: Harness) -> None:
    assert hint(harness, LONG_A, SOON) == prefetched(HintOutcome.BEGUN, 4)
    assert hint(harness, LONG_B, SOON) == prefetched(HintOutcome.BEGUN, 4)
    assert hint(harness, [3] * 9, SOON) == prefetched(HintOutcome.SHARE)
    harness.serve(LONG_A)
    assert hint(harness, [3] * 9, SOON) == prefetched(HintOutcome.BEGUN, 4)


def test_a_prefetch_is_clipped_to_its_share(make_harness: MakeHarness, shelf: StoredBlocks) -> None:
    harness = make_harness(disk_blocks=60, host_blocks=12, shelf=shelf)
    assert hint(harness, LONG_A, SOON) == prefetched(HintOutcome.BEGUN, 3)
    assert harness.matched(LONG_A) == [HOST] * 3 + [DISK]


def test_long_prompts_are_noted_within_bounds(harness: Harness) -> None:
    """The names of four times as many blocks as host memory holds, which is 32."""
    long = [list(range(first, first + 128)) for first in (100, 300, 500)]
    for tenant in (b"one", b"two"):
        outcomes = [hint(harness, prompt, LATER, tenant)[0].outcome for prompt in long]
        assert outcomes == [HintOutcome.SCHEDULED] * 2 + [HintOutcome.SHARE]
    assert hint(harness, LONG_A, LATER) == prefetched(HintOutcome.SHARE), "all tenants' limit"


def test_many_blocks_are_read_and_evicted_in_steps(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_actions, "BLOCKS_AT_ONCE", 1)
    assert hint(harness, LONG_A, SOON) == prefetched(HintOutcome.BEGUN, 4)
    for num in range(2, 5):
        harness.clock.now += LOOK_AGAIN_S
        harness.cache.poll()
        assert harness.cache.drain()
        assert harness.matched(LONG_A).count(HOST) == num
    harness.clock.now += 2 * KEEP_S
    for num in range(3, -1, -1):
        assert counted(harness, HintOutcome.EXPIRED) == 0
        harness.cache.poll()
        assert harness.matched(LONG_A).count(HOST) == num
    assert counted(harness, HintOutcome.EXPIRED) == 1


def test_a_tenant_has_so_many_prefetches_at_a_time(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_actions, "MAX_PREFETCHES", 8)
    for token in range(8):
        assert hint(harness, [100 + token] * 9, LATER)[0].outcome is HintOutcome.SCHEDULED
    assert hint(harness, LONG_A, LATER) == prefetched(HintOutcome.SHARE)
    assert hint(harness, [100] * 9, LATER)[0].outcome is HintOutcome.SCHEDULED, (
        "it replaces the first"
    )
    assert hint(harness, LONG_A, LATER, b"other")[0].outcome is HintOutcome.SCHEDULED


def test_a_hostile_tenant_leaves_others_their_blocks(harness: Harness) -> None:
    """It prefetches and pins all prompts again and again, and uses none of them."""
    prompts = [LONG_A, LONG_B, *([token] * 9 for token in range(3, 8))]
    own = [[token] * 9 for token in range(20, 24)]  # half of host memory
    for prompt in own:
        harness.serve(prompt, b"other")
    harness.lose_the_device()
    for _ in range(40):
        for prompt in prompts:
            hint(harness, prompt, Hint((Retain(100, ttl_s=MAX_TTL_S),), prefetch_within_s=0.1))
        harness.clock.now += KEEP_S
        harness.cache.poll()
    assert [harness.matched(prompt, b"other") for prompt in own] == [[HOST] * 4] * 4


def test_reads_of_requests_go_before_prefetches(harness: Harness) -> None:
    harness.storage.open_reads.clear()
    harness.cache.hint(NS, token_labels(LONG_A, BLOCK_SIZE), SOON)
    harness.wait_for_threads()  # the first two blocks of A are being read
    request = harness.ask(LONG_B)
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    of_b = {harness.cache._index.key(block) for block in request.lease.blocks}
    are_of_b = [of_b.issuperset(keys) for keys in harness.storage.reads]
    assert are_of_b == [False, True, True, False]


def test_demoted_blocks_leave_memory_if_storage_has_them(harness: Harness) -> None:
    harness.serve(LONG_A)
    assert hint(harness, LONG_A, Hint(demote_from=4)) == [
        HintResult(Action.DEMOTE, HintOutcome.DONE, 2)
    ]
    assert harness.matched(LONG_A) == [DEVICE] * 2 + [DISK] * 2
    harness.serve(LONG_A)


def test_blocks_in_use_are_not_demoted(harness: Harness) -> None:
    request = harness.start(LONG_A)
    hint(harness, LONG_A, Hint(demote_from=0))
    assert harness.matched(LONG_A) == [DEVICE] * 4
    harness.finish(request)


def test_blocks_that_only_memory_has_are_evicted_first(make_harness: MakeHarness) -> None:
    harness = make_harness(host_blocks=12, device_blocks=10)
    harness.serve(LONG_B)
    harness.serve(LONG_A)
    harness.lose_the_device()
    assert hint(harness, LONG_A, Hint(demote_from=0)) == [
        HintResult(Action.DEMOTE, HintOutcome.DONE, 0)
    ]
    harness.serve([5] * 9)
    harness.serve([6] * 9)
    harness.lose_the_device()
    assert harness.matched(LONG_A) == []
    assert harness.matched(LONG_B) == [HOST] * 4


def test_blocks_that_are_read_again_count_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_actions, "BLOCKS_AT_ONCE", 1)
    hint(harness, LONG_A, SOON)
    for _ in range(6):
        harness.cache.clear(HOST)
        harness.clock.now += LOOK_AGAIN_S
        harness.cache.poll()
        assert harness.cache.drain()
    harness.serve(LONG_A)
    monkeypatch.undo()
    for prompt in LONG_B, [3] * 9:
        assert hint(harness, prompt, SOON) == prefetched(HintOutcome.BEGUN, 4)


def test_a_share_is_in_use_until_late_reads_have_ended(harness: Harness) -> None:
    harness.storage.open_reads.clear()
    for prompt in LONG_A, LONG_B, [3] * 9:
        labels = token_labels(prompt, BLOCK_SIZE)
        (result,) = harness.cache.hint(NS, labels, SOON)
        assert (result.outcome is HintOutcome.SHARE) == (prompt[0] == 3)
        harness.clock.now += 2 * KEEP_S
        harness.cache.poll()
    harness.storage.open_reads.set()
    assert harness.cache.drain()
    harness.clock.now += 1
    harness.cache.poll()
    assert harness.matched(LONG_A) == harness.matched(LONG_B) == [DISK] * 4
    assert hint(harness, [3] * 9, SOON) == prefetched(HintOutcome.BEGUN, 4)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_left_of_any_actions(
    harness: Harness, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares are kept at any time and free in the end, and nothing deleted is found again."""
    chosen = random.Random(seed)
    monkeypatch.setattr(hint_actions, "BLOCKS_AT_ONCE", chosen.choice([1, 3, 2048]))
    prompts = [LONG_A, LONG_B, *([token] * 9 for token in range(3, 8))]
    actions, deleted = harness.cache._actions, set[int]()

    def one() -> None:
        prompt = chosen.choice(prompts)
        labels = token_labels(prompt[: chosen.choice([4, 9])], BLOCK_SIZE)
        namespace = chosen.choice([NS, NS, b"other"])
        match chosen.randrange(9):
            case 0 | 1 | 2:
                within_s = chosen.choice([0.1, 20, 3600])
                harness.cache.hint(namespace, labels, Hint(prefetch_within_s=within_s))
            case 3:
                harness.cache.hint(namespace, labels, Hint(demote_from=chosen.randrange(5)))
            case 4:
                harness.cache.clear(chosen.choice([DEVICE, HOST]))
            case 5:
                harness.clock.now += chosen.choice([0.01, 1, 31])
            case 6:
                harness.cache.delete(NS, token_labels(prompt, BLOCK_SIZE))
                deleted.add(prompts.index(prompt))
            case 7:
                harness.storage.open_reads.set()
                harness.serve(prompt, b"other")
            case 8:
                harness.storage.open_reads.clear()

    for _ in range(150):
        if chosen.random() < 0.3:
            harness.storage.open_reads.set()
            assert harness.cache.drain()
        one()
        harness.cache.poll()
        harness.check()
        read = {
            tenant: sum(len(it.num_uses) for it in its)
            for tenant, its in actions._prefetches.items()
        }
        assert {**actions._num_read} == {tenant: num for tenant, num in read.items() if num}
        assert all(num <= 8 for num in read.values())
        assert sum(read.values()) <= 16
        for at in deleted:
            assert not harness.matched(prompts[at]), "it was deleted"
    harness.storage.open_reads.set()
    for _ in range(80):
        assert harness.cache.drain()
        harness.clock.now += 3600
        harness.cache.poll()
    assert not actions._prefetches
    assert not actions._num_read


def test_all_tenants_together_have_a_share(harness: Harness) -> None:
    prompts = LONG_A, LONG_B
    for tenant in b"one", b"two", b"three":
        for prompt in prompts:
            harness.serve(prompt, tenant)
    harness.cache.clear(HOST)
    harness.lose_the_device()
    outcomes = [
        hint(harness, prompt, SOON, tenant)[0].outcome
        for tenant in (b"one", b"two", b"three")
        for prompt in prompts
    ]
    assert outcomes == [HintOutcome.BEGUN] * 4 + [HintOutcome.SHARE] * 2


def test_there_is_a_limit_of_prefetches_in_all(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_actions, "MAX_IN_ALL", 2)
    outcomes = [hint(harness, LONG_A, LATER, bytes([at]))[0].outcome for at in range(3)]
    assert outcomes == [HintOutcome.SCHEDULED] * 2 + [HintOutcome.SHARE]


def test_a_second_hint_keeps_blocks_for_longer(harness: Harness) -> None:
    hint(harness, LONG_A, SOON)
    harness.clock.now += KEEP_S - 1
    hint(harness, LONG_A, SOON)
    harness.clock.now += KEEP_S - 1
    harness.cache.poll()
    assert harness.matched(LONG_A) == [HOST] * 4
    harness.clock.now += 2
    harness.cache.poll()
    assert harness.matched(LONG_A) == [DISK] * 4
