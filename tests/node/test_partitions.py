"""Partitions of a node: growth, segments that change hands, quotas, and a hostile tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blake3 import blake3

from kvtier.cache.block_cache import BlockState
from kvtier.control.contract import ControlError
from kvtier.core.errors import ConfigError
from kvtier.core.hot import NATIVE
from kvtier.devices.cpu import CpuDevice
from kvtier.index.native_key_index import NativeKeyIndex
from kvtier.node.config import DEFAULT_TENANT, TenantQuota
from kvtier.node.server import node as node_module
from kvtier.node.server.engines import Holdings
from kvtier.node.server.node import LINGER_S, MAX_PARTITIONS_OF_TENANT, SWEEP_S, CacheNode
from kvtier.node.server.partition import Partition
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.server.pins import MAX_PINS
from kvtier.node.server.users import SlotUser
from kvtier.node.wire.protocol import unpack
from tests.node.harness import BLOCK, SEGMENT, config_of, opened

NUM_SEGMENTS = 16
USER = SlotUser(1, 0, "engine")
MEMORY, NOWHERE = BlockState.MEMORY, BlockState.NOWHERE


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Harness:
    def __init__(self, node: CacheNode, clock: Clock) -> None:
        self.node, self.clock = node, clock

    def partition(self, tenant: str = "a", block_bytes: int = BLOCK) -> Partition:
        number, _ = opened(self.node, PartitionKey(tenant, b"s" * 32, block_bytes, 8))
        partition = self.node.partition_of(number, tenant)
        assert partition is not None
        return partition

    def turn(self, seconds: float = 0.2, num: int = 1) -> None:
        for _ in range(num):
            self.clock.now_s += seconds
            self.node.poll()
            self.node.check_invariants()

    def num_held(self, tenant: str) -> int:
        mine = [partition for partition in self.node.partitions if partition.key.tenant == tenant]
        return sum(partition.tier.num_segments for partition in mine)


@contextmanager
def harness(folder: Path, **quotas: TenantQuota) -> Iterator[Harness]:
    clock = Clock()
    node = CacheNode(config_of(folder, quotas=quotas), CpuDevice(), clock)
    try:
        yield Harness(node, clock)
        node.check_invariants()
    finally:
        node.close()


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(8, "little") for number in numbers]


def fill(partition: Partition, *numbers: int) -> int:
    """Store blocks one by one; return how many had room."""
    num = 0
    for number in numbers:
        reserved = partition.reserve(names(number))
        if reserved is not None and reserved.keys:
            partition.cache.commit(reserved.keys, [0])
            num += 1
    return num


def use(partition: Partition, *numbers: int) -> None:
    """Copy blocks, as far as they are in memory."""
    known = [key for key in names(*numbers) if partition.cache.locate(key) is MEMORY]
    partition.hold(known)
    partition.cache.release(known)


# -- growth ----------------------------------------------------------------------------------------


def test_partition_grows_to_the_whole_memory_before_it_evicts(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        partition = here.partition()
        assert partition.tier.num_segments == 0
        assert fill(partition, *range(64)) == 64
        assert partition.tier.num_segments == NUM_SEGMENTS
        assert set(partition.cache.locate_all(names(*range(64)))) == {MEMORY}
        assert fill(partition, 64) == 1
        assert partition.cache.locate_all(names(*range(65))).count(MEMORY) == 64


def test_segments_move_between_block_sizes(tmp_path: Path) -> None:
    """A partition of another block size gets the segments that were not used for longest."""
    with harness(tmp_path) as here:
        old, new = here.partition(), here.partition(block_bytes=3 * BLOCK // 2)
        fill(old, *range(64))
        here.clock.now_s += 10
        old.hold(names(60, 61, 62, 63))
        old.cache.release(names(60, 61, 62, 63))
        assert fill(new, 1) == 0
        for _ in range(20):
            here.turn()
            fill(new, *range(8))
        assert new.tier.num_segments > 0
        assert old.tier.num_segments + new.tier.num_segments <= NUM_SEGMENTS
        assert old.cache.locate_all(names(60, 61, 62, 63)) == [MEMORY] * 4, "they were used last"
        assert MEMORY in new.cache.locate_all(names(*range(8)))


def test_partitions_that_are_equally_busy_keep_what_they_have(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        first, second = here.partition(), here.partition("b")
        fill(first, *range(32))
        fill(second, *range(32))
        for turn in range(20):
            fill(first, 100 + turn)
            fill(second, 100 + turn)
            use(first, *range(130))
            use(second, *range(130))
            here.turn()
        assert first.tier.num_segments == second.tier.num_segments == 8


def test_segments_move_within_a_tenant_at_its_ceiling(tmp_path: Path) -> None:
    with harness(tmp_path, a=TenantQuota(0, 8 * SEGMENT)) as here:
        old, new, other = (
            here.partition(),
            here.partition(block_bytes=2 * BLOCK),
            here.partition("b"),
        )
        fill(other, *range(32))
        fill(old, *range(32))
        here.clock.now_s += 10
        for _ in range(20):
            here.turn()
            fill(new, *range(8))
        assert new.tier.num_segments > 0
        assert 7 <= here.num_held("a") <= 8
        assert here.num_held("b") == 8


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="only native policies learn")
def test_policy_knows_the_memory_that_a_partition_has_by_now(tmp_path: Path) -> None:
    """A policy that thinks of one slot forgets each request before its blocks are stored."""
    grown = []
    for is_reported in True, False:
        with harness(tmp_path / str(is_reported)) as here:
            partition = here.partition(block_bytes=64)
            sizes = []
            for first in range(0, 8_000, 100):
                prompt = names(*range(first, first + 100))
                if is_reported:
                    partition.cache.on_request(prompt)
                fill(partition, *range(first, first + 100))
                assert isinstance(partition._index, NativeKeyIndex)
                sizes.append(partition._index.num_bytes)
            grown.append(sizes[-1] - sizes[len(sizes) // 2 - 1])
    assert grown[0] < 0.8 * grown[1], "blocks of a known prompt need no entries of their own"


@pytest.mark.parametrize("use", ["leased", "reserved"])
def test_retired_segment_waits_for_its_last_user(tmp_path: Path, use: str) -> None:
    with harness(tmp_path) as here:
        old, new = here.partition(), here.partition("b")
        held = Holdings(old, USER)
        if use == "leased":
            fill(old, *range(64))
            slots = unpack(held.lease(old.locate(names(*range(64))).ready)[0]).tolist()
        else:
            found = held.reserve(names(*range(64)))
            assert found is not None
            slots = list(found[0].slots)
        generations = old.tier.generations[slots]
        here.clock.now_s += 10
        for _ in range(10):
            fill(new, 1)
            here.turn()
        assert new.tier.num_segments == 0
        retired = list(old.tier.retired_segments)
        assert retired, "it was told to go"
        assert (old.tier.generations[slots] == generations).all(), "nobody else has got the slots"
        list(held.end())
        here.turn(num=20)
        fill(new, 1)
        assert new.cache.locate_all(names(1)) == [MEMORY]
        assert set(new.tier.segments) <= set(retired)


# -- pins ------------------------------------------------------------------------------------------


def test_pins_of_the_same_blocks_are_counted_and_end_one_by_one(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        partition = here.partition()
        fill(partition, 1, 2, 3)
        first = here.node.pin(partition, names(1, 2), 60.0)
        second = here.node.pin(partition, names(1, 2, 3), 5.0)
        assert (len(partition.pins), partition.pins.num_blocks) == (2, 5)
        partition.delete(names(3))
        assert (partition.pins.num_blocks, len(partition.pins.segments)) == (4, 1)
        here.turn(6.0)
        assert not partition.pins.remove(second.number), "its time is over"
        assert partition.pins.num_blocks == 2
        partition.delete(names(1, 2))
        assert not partition.pins.remove(first.number)
        assert (partition.pins.num_blocks, len(partition.pins.segments)) == (0, 0)


def test_a_partition_has_a_limited_number_of_pins(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        partition = here.partition()
        fill(partition, 1)
        made = [here.node.pin(partition, names(1), 60.0).number for _ in range(MAX_PINS)]
        with pytest.raises(ControlError, match=f"{MAX_PINS} pins already"):
            here.node.pin(partition, names(1), 60.0)
        assert partition.pins.remove(made[0])
        assert here.node.pin(partition, names(1), 60.0).segment_of


# -- quotas ----------------------------------------------------------------------------------------


def test_floor_is_kept_free_from_the_start(tmp_path: Path) -> None:
    with harness(tmp_path, b=TenantQuota(4 * SEGMENT)) as here:
        flooding, late = here.partition("a"), here.partition("b")
        fill(flooding, *range(200))
        assert here.num_held("a") == NUM_SEGMENTS - 4
        assert fill(late, *range(16)) == 16
        assert late.cache.locate_all(names(*range(16))) == [MEMORY] * 16


def test_ceiling_counts_segments_that_are_still_in_use(tmp_path: Path) -> None:
    """A tenant cannot exceed its ceiling by leasing blocks of segments that it has to return."""
    ceiling = TenantQuota(0, 8 * SEGMENT)
    with harness(tmp_path, a=ceiling) as here:
        partition, other = here.partition("a"), here.partition("b")
        fill(partition, *range(32))
        fill(other, *range(32))
        assert here.num_held("a") == 8
        held = Holdings(partition, USER)
        held.lease(partition.locate(names(*range(32))).ready)
        here.clock.now_s += 10
        for turn in range(10):
            use(other, *range(200))
            fill(other, 100 + turn)
            here.turn()
        assert partition.tier.retired_segments
        fill(partition, *range(200, 300))
        assert partition.tier.num_segments + len(partition.tier.retired_segments) <= 8


Attack = Callable[[Partition, int], object]


def _flood(partition: Partition, turn: int) -> object:
    return fill(partition, *range(1000 * turn, 1000 * turn + 100))


def _lease(partition: Partition, turn: int) -> object:
    fill(partition, *range(1000 * turn, 1000 * turn + 20))
    numbers = range(1000 * turn, 1000 * turn + 20)
    return partition.hold([key for key in names(*numbers) if partition.cache.locate(key) is MEMORY])


def _reserve(partition: Partition, turn: int) -> object:
    return [partition.reserve(names(number)) for number in range(1000 * turn, 1000 * turn + 20)]


@pytest.mark.parametrize("attack", [_flood, _lease, _reserve])
def test_hostile_tenant_leaves_others_their_floor(tmp_path: Path, attack: Attack) -> None:
    """The floor holds before and after the others have used their memory."""
    floor = TenantQuota(4 * SEGMENT)
    with harness(tmp_path, b=floor, c=floor) as here:
        hostile, early, late = here.partition("a"), here.partition("b"), here.partition("c")
        assert fill(early, *range(16)) == 16
        for turn in range(1, 20):
            attack(hostile, turn)
            here.turn(1.0)
        assert here.num_held("b") >= 4
        assert early.cache.locate_all(names(*range(16))) == [MEMORY] * 16
        assert fill(late, *range(16)) == 16
        assert late.cache.locate_all(names(*range(16))) == [MEMORY] * 16


def test_tenant_that_holds_what_it_must_give_back_delays_no_other(tmp_path: Path) -> None:
    """Segments still move between the other tenants."""
    with harness(tmp_path) as here:
        hostile, old, new = here.partition("a"), here.partition("b"), here.partition("c")
        fill(hostile, *range(32))
        hostile.hold(names(*range(32)))
        here.clock.now_s += 10
        fill(old, *range(32))
        here.clock.now_s += 10
        for turn in range(30):
            fill(new, *range(100 * turn, 100 * turn + 10))
            here.turn()
        assert here.num_held("c") > 0
        assert hostile.tier.retired_segments


# -- bounds ----------------------------------------------------------------------------------------


def test_partitions_of_a_tenant_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "MAX_PARTITIONS_OF_TENANT", 4)
    assert MAX_PARTITIONS_OF_TENANT > 4
    with harness(tmp_path) as here:
        for size in range(4):
            here.partition("a", BLOCK + size)
        with pytest.raises(ConfigError, match="has 4 rooms"):
            here.partition("a", 2 * BLOCK)
        here.partition("a", BLOCK)
        here.partition("b")


def test_partition_of_another_tenant_is_not_found(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        number, _ = opened(here.node, PartitionKey("a", b"s", BLOCK, 8))
        assert here.node.partition_of(number, "a") is not None
        assert here.node.partition_of(number, "b") is None
        assert here.node.partition_of(-1, "a") is None
        assert here.node.partition_of(number + 1, "a") is None


def test_idle_partitions_are_not_polled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll costs the same however many partitions there are."""
    polled: list[str] = []
    poll = Partition.poll

    def note(partition: Partition) -> None:
        polled.append(partition.key.tenant)
        poll(partition)

    monkeypatch.setattr(Partition, "poll", note)
    with harness(tmp_path) as here:
        for tenant in "abcdefgh":
            here.partition(tenant)
        here.turn(LINGER_S + 0.1, num=2)
        polled.clear()
        here.partition("c")
        here.turn(0.1)
        assert polled == ["c"]
        here.turn(LINGER_S, num=2)
        polled.clear()
        here.turn(0.1)
        assert polled == []
        here.turn(SWEEP_S)
        assert sorted(polled) == list("abcdefgh")


def test_names_in_a_store_of_two_tenants_and_scopes_are_never_the_same() -> None:
    """Some stores have the blocks of all partitions in one place."""
    scope = bytes(range(32))
    default = PartitionKey(DEFAULT_TENANT, scope, BLOCK, 8)
    pairs = [
        (PartitionKey("ab", scope, BLOCK, 8), PartitionKey("b", scope + b"a", BLOCK, 8)),
        (
            PartitionKey("bc", scope[:31] + b"a", BLOCK, 8),
            PartitionKey("abc", scope[:31], BLOCK, 8),
        ),
        (default, PartitionKey(DEFAULT_TENANT, scope[:31], BLOCK, 8)),
        (default, PartitionKey(DEFAULT_TENANT, scope + scope, BLOCK, 8)),
    ]
    for one, other in pairs:
        assert one.namespace != other.namespace
        assert len(one.namespace) == len(other.namespace) == 32, "keys come behind it"
    assert default.namespace == scope, "names stay as they were stored"
    assert PartitionKey("a", scope, BLOCK, 8).namespace == blake3(scope + b"a").digest()
