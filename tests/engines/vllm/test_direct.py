"""Direct reads of blocks from disk into vLLM's tensors: the decision, and a rank's part."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.cache.transfer import LocalMover
from kvtier.cache.transfer.ranks import Done, RankOrder, Report, Verb
from kvtier.connectors.vllm.offloading.translation import HostSlots
from kvtier.connectors.vllm.offloading.worker import OffloadedPages
from kvtier.connectors.vllm.shared.copies import BlockSlots
from kvtier.connectors.vllm.shared.request_state import Advice
from kvtier.connectors.vllm.shared.worker import RankLimits
from kvtier.core.errors import ConfigError
from kvtier.core.types import DISK, HOST, BlockKey, BlockName, Direct, Slot, Verify
from kvtier.devices import Device, find_device
from kvtier.observe.specs import VLLM_LOADED_CHUNKS
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskOptions, DiskTier
from tests.cache.tokens.test_direct import LateFence, StrictDevice
from tests.engines.vllm.test_manager import BLOCK_BYTES, KEYS, STEP, Scheduler, serve, two_groups

HIT, PENDING = LookupResult.HIT, LookupResult.HIT_PENDING
RETRY, MISS = LookupResult.RETRY, LookupResult.MISS

# -- the scheduler's side --------------------------------------------------------------------------


def on_disk(direct: Direct, num_host: int = 4) -> Scheduler:
    scheduler = Scheduler(num_host=num_host, num_disk=16, direct=direct)
    scheduler.to_disk(KEYS[:2], num_others=num_host)
    return scheduler


def test_where_it_is_on_a_block_on_disk_is_a_hit_at_once() -> None:
    scheduler = on_disk(Direct.ON)
    manager = scheduler.manager
    manager.get_stats()
    request = scheduler.request("again", KEYS[:3])
    assert scheduler.look_up(request, KEYS[:3]) == [HIT, HIT, MISS]
    assert scheduler.num_worth_loading("again") == 2 * STEP
    slots = scheduler.load(KEYS[:2], request)
    assert (slots.slots, slots.direct) == ([], [0, 1])
    (order,) = slots.reads
    assert (order.verb, order.tier, order.slots) == (Verb.READ, DISK, (0, 1))
    assert not scheduler.reads(), "the load brings the order along"
    assert manager.get_load_source(KEYS[0], request) is CacheHitSource.DISK
    done = Done(num_bytes=2 * BLOCK_BYTES, seconds=0.1)
    manager.hear(Report(done={order.order_id: done}))
    manager.complete_load(KEYS[:2], request)
    loaded = {
        labels: num
        for (each, labels), num in manager.counts.take().items()
        if each is VLLM_LOADED_CHUNKS
    }
    assert loaded == {(DISK,): 2}
    assert scheduler.look_up(scheduler.request("other", KEYS[:1]), KEYS[:1]) == [HIT]
    assert manager.cache.usage()[HOST].num_used == 4, "host memory has what it had"
    manager.cache.check_invariants()


def test_what_did_not_come_directly_is_brought_to_host_memory() -> None:
    """This happens once per request: a failed direct read may fail again and again."""
    scheduler = on_disk(Direct.ON)
    request = scheduler.request("again", KEYS[:2])
    scheduler.look_up(request, KEYS[:2])
    (order,) = scheduler.load(KEYS[:2], request).reads
    scheduler.manager.hear(Report(done={order.order_id: Done(frozenset({1}))}))
    scheduler.manager.complete_load(KEYS[:2], request)
    assert scheduler.look_up(request, KEYS[:2]) == [RETRY, RETRY]
    assert scheduler.advise("again") is Advice.WAIT
    scheduler.carry_out()
    assert scheduler.look_up(request, KEYS[:2]) == [HIT, HIT]
    slots = scheduler.load(KEYS[:2], request)
    assert not slots.reads
    assert not slots.direct
    scheduler.manager.complete_load(KEYS[:2], request)
    scheduler.manager.cache.check_invariants()


def test_block_that_is_damaged_is_a_miss_afterwards() -> None:
    scheduler = on_disk(Direct.ON)
    request = scheduler.request("again", KEYS[:2])
    scheduler.look_up(request, KEYS[:2])
    (order,) = scheduler.load(KEYS[:2], request).reads
    gone = Done(frozenset({0}), frozenset({0}), num_damaged=1)
    scheduler.manager.hear(Report(done={order.order_id: gone}))
    scheduler.manager.complete_load(KEYS[:2], request)
    assert scheduler.look_up(request, KEYS[:1]) == [MISS]


@pytest.mark.parametrize("direct", [Direct.AUTO, Direct.OFF])
def test_where_it_is_auto_blocks_take_host_memory_while_it_has_room(direct: Direct) -> None:
    scheduler = on_disk(direct)
    scheduler.waits("again", KEYS[:2])
    (read,) = scheduler.reads()
    assert len(read.names) == 2


@pytest.mark.parametrize(
    ("direct", "found"), [(Direct.AUTO, [HIT, HIT]), (Direct.OFF, [HIT, MISS])]
)
def test_what_host_memory_has_no_room_for_comes_directly(
    direct: Direct, found: list[LookupResult]
) -> None:
    scheduler = on_disk(direct, num_host=2)
    other = scheduler.request("holds", KEYS[4:5])
    scheduler.store(other, KEYS[4:5])
    scheduler.carry_out()
    scheduler.load(KEYS[4:5], other)  # one of two slots is in use
    request = scheduler.request("again", KEYS[:2])
    scheduler.look_up(request, KEYS[:2])
    assert scheduler.advise("again") is Advice.LOOK_AGAIN
    scheduler.look_up(request, KEYS[:2])
    assert scheduler.advise("again") is Advice.WAIT
    scheduler.carry_out()
    assert scheduler.look_up(request, KEYS[:2]) == found
    num = found.count(HIT)
    slots = scheduler.load(KEYS[:num], request)
    assert (len(slots.slots), slots.direct) == (1, [1] * (num - 1))
    assert [order.slots for order in slots.reads] == [(1,)] * (num - 1)


def test_host_memory_that_is_all_in_use_keeps_nobody_waiting() -> None:
    scheduler = on_disk(Direct.AUTO, num_host=1)
    other = scheduler.request("holds", KEYS[4:5])
    scheduler.store(other, KEYS[4:5])
    scheduler.carry_out()
    scheduler.load(KEYS[4:5], other)
    request = scheduler.request("again", KEYS[:2])
    scheduler.look_up(request, KEYS[:2])
    assert scheduler.advise("again") is Advice.LOOK_AGAIN
    assert scheduler.look_up(request, KEYS[:2]) == [HIT, HIT]


def test_another_requests_hold_is_its_own() -> None:
    """One request loads a block from host memory, and one reads it directly.

    The first one to end releases only its own hold.
    """
    scheduler = on_disk(Direct.ON)
    direct = scheduler.request("direct", KEYS[:1])
    scheduler.look_up(direct, KEYS[:1])
    (order,) = scheduler.load(KEYS[:1], direct).reads
    scheduler.manager.cache.promote(KEYS[:1])
    scheduler.carry_out()
    held = scheduler.request("held", KEYS[:1])
    assert scheduler.look_up(held, KEYS[:1]) == [HIT]
    scheduler.load(KEYS[:1], held)
    scheduler.manager.hear(Report(done={order.order_id: Done()}))
    scheduler.manager.complete_load(KEYS[:1], direct)
    assert scheduler.ladder.num_available(HOST) == 3, "the block that is held stays"
    scheduler.manager.complete_load(KEYS[:1], held)
    assert scheduler.ladder.num_available(HOST) == 4


def test_blocks_of_two_groups_are_read_by_one_load() -> None:
    """Blocks of a group are adjacent in the load, as vLLM's pages are."""
    scheduler = Scheduler(num_host=4, num_disk=16, direct=Direct.ON, block_sizes=(STEP, STEP))
    keys = two_groups((1, 2))
    for number in (1, 2, 3, 4):  # host memory has room for two
        serve(scheduler, [number])
        scheduler.carry_out()
    assert scheduler.manager.cache.usage()[DISK].num_used == 8
    request = ReqContext("again")
    for at, key in enumerate(keys):
        request.set_offload_key_position(key, (at % 2 + 1) * STEP)
    scheduler.manager.on_new_request(request)
    assert scheduler.look_up(request, keys) == [HIT] * 4
    slots = scheduler.load(keys, request)
    assert (slots.slots, slots.direct) == ([], [0, 1, 2, 3])
    (order,) = slots.reads
    assert order.slots == (0, 1, 2, 3)
    assert len({name.key for name in order.names}) == 4
    scheduler.manager.hear(Report(done={order.order_id: Done()}))
    scheduler.manager.complete_load(keys, request)
    scheduler.manager.cache.check_invariants()


# -- a rank ----------------------------------------------------------------------------------------

PAGE = 4096
NUM_PAGES = 10
GQA, MLA = (4 * PAGE,) * 4, (8 * PAGE, PAGE) * 2
"""Bytes of a page in each tensor: K and V of two layers; a latent and a rotary part of two."""
TO_PAGES = GPULoadStoreSpec([3, 4], [2], [0])
NAMES = tuple(BlockName(b"n" * 32, at, BlockKey(b"%032d" % at)) for at in range(6))


def in_slots(slots: Sequence[int], direct: Sequence[int] = (), *reads: RankOrder) -> HostSlots:
    """Return places of blocks, as vLLM carries them to a rank."""
    return HostSlots(BlockSlots([*map(Slot, slots)], direct, reads))


def order(number: int, verb: Verb, slots: Sequence[int], names: Sequence[BlockName]) -> RankOrder:
    return RankOrder(number, verb, DISK, tuple(names), tuple(map(Slot, slots)))


class Rank:
    """A worker over tensors of known bytes, and a disk.

    behind: see ``_tensor``. theirs: vLLM's objects for the worker, in place of these tensors.
    groups: tensors in which each KV group has pages; by default one group with all of them.
    """

    def __init__(
        self,
        folder: Path,
        sizes: Sequence[int] = GQA,
        n: int = 1,
        direct: Direct = Direct.ON,
        device: Device | None = None,
        behind: int = 0,
        verify: Verify = Verify.ALWAYS,
        tensors: Sequence[torch.Tensor] = (),
        theirs: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        groups = groups or [range(len(sizes))]
        self.n, self.slot_bytes = n, n * max(sum(sizes[at] for at in group) for group in groups)
        self.tensors = list(tensors) or [_tensor(size, behind) for size in sizes]
        given = map(theirs, self.tensors)
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(*each) for each in zip(given, sizes, strict=True)],
            [[CanonicalKVCacheRef(at, sizes[at]) for at in group] for group in groups],
        )
        disk = DiskOptions(folder, 8 * self.slot_bytes, direct=direct, verify=verify)
        room = RankLimits(self.slot_bytes, 8, disk)
        self.worker = OffloadedPages(caches, device or find_device("cpu"), room, n, rank=0)
        self._num_jobs = 0

    def pages(self) -> np.ndarray:
        """Return the bytes of the tensors: uint8 [num_pages, bytes]."""
        return np.concatenate([tensor.numpy().view(np.uint8) for tensor in self.tensors], axis=1)

    def fill(self, content: np.ndarray | int) -> None:
        begin = 0
        for tensor in self.tensors:
            end = begin + tensor.shape[1]
            part = content if isinstance(content, int) else content[:, begin:end]
            tensor.numpy().view(np.uint8)[:] = part
            begin = end

    def store(self, num_blocks: int, to_disk: Sequence[int]) -> None:
        """Store the first pages as blocks in the first slots, and write some of them to disk."""
        num_pages = num_blocks * self.n
        source = GPULoadStoreSpec(list(range(num_pages)), [num_pages], [0])
        self.copy(self.worker.submit_store, source, in_slots(range(num_blocks)))
        self.worker.carry_out(order(1, Verb.WRITE, to_disk, [NAMES[at] for at in to_disk]))
        assert not self.done(1).failed

    def copy(self, submit: object, *specs: object) -> None:
        self._num_jobs += 1
        assert callable(submit)
        assert submit(self._num_jobs, *specs)
        self.worker.wait({self._num_jobs})
        assert [each.job_id for each in self.worker.get_finished()] == [self._num_jobs]

    def load(
        self, blocks: Sequence[int], direct: Sequence[int], to: list[int], first: int = 0
    ) -> Done | None:
        """Load blocks to pages, the ones at ``direct`` from disk; return the report of these."""
        held = [block for at, block in enumerate(blocks) if at not in direct]
        read = order(2, Verb.READ, direct, [NAMES[blocks[at]] for at in direct])
        target = GPULoadStoreSpec(to, [len(to)], [first])
        slots = in_slots(held, direct, *([read] if direct else []))
        self.copy(self.worker.submit_load, slots, target)
        return self.done(2) if direct else None

    def done(self, order_id: int) -> Done:
        for _ in range(60_000):
            done = self.worker.take_report(frozenset()).done
            if order_id in done:
                return done[order_id]
            self.worker.rest()
        raise AssertionError("it hangs")

    def close(self) -> None:
        self.worker.shutdown()


LIKE_GROUPS, SMALL_GROUP = [range(4), range(4)], [range(4), range(2)]
"""As vLLM has windows beside full attention: pages of all groups in the same tensors; and of fewer
layers in the last group."""


def check_blocks(rank: Rank) -> None:
    """Check for blocks of one group that a direct read brings the bytes of host memory."""
    n, num_blocks = rank.n, 4
    assert rank.worker.take_report(frozenset()).hellos[0].direct == {DISK}
    rank.store(num_blocks, range(num_blocks))

    @settings(max_examples=max(7, settings().max_examples // 2))
    @given(
        direct=st.sets(st.integers(0, num_blocks - 1), min_size=1),
        first=st.integers(0, n - 1),
        num_less=st.integers(0, n - 1),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(direct: set[int], first: int, num_less: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        blocks = random.permutation(num_blocks).tolist()
        to = random.permutation(NUM_PAGES)[: num_blocks * n - first - num_less].tolist()
        before = _random(rank, seed)
        rank.fill(before)
        rank.load(blocks, [], to, first)
        expected = rank.pages()
        rank.fill(before)
        done = rank.load(blocks, sorted(direct), to, first)
        assert done is not None
        assert (done.failed, done.num_bytes) == (frozenset(), len(direct) * rank.slot_bytes)
        np.testing.assert_array_equal(rank.pages(), expected)
        assert not np.array_equal(expected, before)
        assert rank.worker.take_failed_loads() == []

    check()


def check_groups(rank: Rank) -> None:
    """Check for two blocks of two groups that a direct read brings the bytes of host memory."""
    n = rank.n
    pages = list(range(4 * n))
    source = GPULoadStoreSpec(pages, [2 * n, 2 * n], [0, 0])
    rank.fill(_random(rank, 1))
    rank.copy(rank.worker.submit_store, source, in_slots(range(4)))
    rank.worker.carry_out(order(1, Verb.WRITE, range(4), NAMES[:4]))
    assert not rank.done(1).failed

    @settings(max_examples=max(10, settings().max_examples // 2))
    @given(
        direct=st.sets(st.integers(0, 3), min_size=1),
        firsts=st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)),
        num_less=st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(
        direct: set[int], firsts: tuple[int, int], num_less: tuple[int, int], seed: int
    ) -> None:
        random = np.random.default_rng(seed)
        counts = [2 * n - first - less for first, less in zip(firsts, num_less, strict=True)]
        to = random.permutation(NUM_PAGES)[: sum(counts)].tolist()
        target = GPULoadStoreSpec(to, counts, list(firsts))
        before = _random(rank, seed)
        rank.fill(before)
        rank.copy(rank.worker.submit_load, in_slots(range(4)), target)
        expected = rank.pages()
        rank.fill(before)
        held = [at for at in range(4) if at not in direct]
        read = order(2, Verb.READ, sorted(direct), [NAMES[at] for at in sorted(direct)])
        rank.copy(rank.worker.submit_load, in_slots(held, sorted(direct), read), target)
        assert not rank.done(2).failed
        np.testing.assert_array_equal(rank.pages(), expected)
        assert not np.array_equal(expected, before)

    check()


def check_damaged(rank: Rank, folder: Path, number: int) -> None:
    """Flip bits of one of three blocks on disk. Check that a direct read fails, and forgets it."""
    rank.store(3, [0, 1, 2])
    (data,) = folder.rglob("data.slab")
    with data.open("r+b") as file:
        at = file.read().index(rank.pages()[number, :256].tobytes())
        file.seek(at + 17)
        file.write(b"\xa5\x5a\xa5")
    done = rank.load([0, 1, 2], [0, 1, 2], [3, 4, 5])
    assert done is not None
    assert (done.failed, done.gone, done.num_damaged) == ({number}, {number}, 1)
    assert rank.worker.take_failed_loads() == [2]


def _tensor(size: int, behind: int) -> torch.Tensor:
    """Return [NUM_PAGES, size] bytes that begin ``behind`` bytes after a page boundary."""
    memory = mmap.mmap(-1, NUM_PAGES * size + PAGE)
    made = torch.frombuffer(memory, dtype=torch.int8)[behind : behind + NUM_PAGES * size]
    return made.view(NUM_PAGES, size)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    made.fill(_random(made, 1))
    yield made
    made.close()


def _random(rank: Rank, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, rank.pages().shape, np.uint8)


@pytest.mark.parametrize("sizes", [GQA, MLA], ids=["GQA", "MLA"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_direct_read_brings_what_host_memory_brings(
    sizes: tuple[int, ...], n: int, tmp_path: Path
) -> None:
    rank = Rank(tmp_path, sizes, n)
    rank.fill(_random(rank, 1))
    check_blocks(rank)
    rank.close()


@pytest.mark.parametrize("groups", [LIKE_GROUPS, SMALL_GROUP], ids=["alike", "a small one"])
@pytest.mark.parametrize("n", [1, 2])
def test_blocks_of_several_groups_come_directly(
    groups: list[range], n: int, tmp_path: Path
) -> None:
    rank = Rank(tmp_path, n=n, groups=groups)
    assert rank.worker.take_report(frozenset()).hellos[0].direct == {DISK}
    check_groups(rank)
    rank.close()


def test_groups_in_other_pieces_are_refused_and_by_auto_take_host_memory(tmp_path: Path) -> None:
    reason = "pieces of a page are of 32768 bytes in KV group 1, and of 4096 and 32768 in another"
    groups = [[0, 1, 2], [0, 2]]
    with pytest.raises(ConfigError, match=f"disk_direct is on, and the {reason}; leave it off"):
        Rank(tmp_path / "on", MLA, groups=groups)
    rank = Rank(tmp_path / "auto", MLA, groups=groups, direct=Direct.AUTO)
    assert rank.worker.take_report(frozenset()).hellos[0].direct == frozenset()
    rank.close()


@pytest.mark.parametrize("heeds", [True, False], ids=["with fences", "without"])
def test_a_read_waits_for_those_who_use_its_pages_still(
    tmp_path: Path, heeds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control without the wait has to find wrong bytes."""
    device = StrictDevice()
    rank = Rank(tmp_path, device=device)
    rank.fill(right := _random(rank, 1))
    rank.store(3, [0, 1, 2])
    if not heeds:
        monkeypatch.setattr(LateFence, "wait", lambda self: None)
    device.compute(lambda: rank.fill(7))
    rank.load([0, 1, 2], [0, 1, 2], [3, 4, 5])
    device.catch_up()
    assert np.array_equal(rank.pages()[3:6], right[:3]) == heeds
    rank.close()


def test_load_is_done_when_the_disk_has_answered(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the disk may write to these pages, so vLLM must not reuse them."""
    rank.store(2, [0, 1])
    begun, answers, get = Event(), Event(), DiskTier.get

    def hangs(*args: object) -> list[Outcome]:
        begun.set()
        assert answers.wait(60)
        return get(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskTier, "get", hangs)
    read = order(2, Verb.READ, [1], NAMES[1:2])
    assert rank.worker.submit_load(9, in_slots([0], [1], read), TO_PAGES)
    assert begun.wait(60)
    for _ in range(20):
        rank.worker.rest()
        assert rank.worker.get_finished() == []
    answers.set()
    rank.worker.wait({9})
    assert [each.job_id for each in rank.worker.get_finished()] == [9]
    assert np.array_equal(rank.pages()[3:5], rank.pages()[:2])


def test_load_with_a_flipped_bit_fails_and_its_block_is_gone(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalMover, "scrub", lambda self: [])  # it might find the block before
    check_damaged(rank, tmp_path, 1)
    assert not rank.worker.take_report(frozenset()).failed, "host memory is not to blame"


def test_block_that_a_rank_has_lost_fails_the_load(rank: Rank) -> None:
    rank.store(3, [0, 1])
    done = rank.load([0, 2], [0, 1], [3, 4])
    assert done is not None
    assert (done.failed, done.gone) == ({1}, {1})
    assert rank.worker.take_failed_loads() == [2]


def test_rank_whose_tensors_begin_behind_a_page_says_so(tmp_path: Path) -> None:
    """Torch's tensors on a CPU do, unless they are allocated with alignment."""
    rank = Rank(tmp_path / "auto", direct=Direct.AUTO, behind=64)
    assert rank.worker.take_report(frozenset()).hellos[0].direct == frozenset()
    rank.close()
    with pytest.raises(ConfigError, match="begins 64 bytes after a page boundary"):
        Rank(tmp_path / "on", behind=64)
