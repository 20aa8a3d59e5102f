"""kvtier's slab under vLLM's own tiering manager and host tier, as its spec makes them.

Needs vLLM, and no model: only the scheduler's half runs. ``make test-vllm``.
"""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connectors.common import opening
from kvtier.connectors.vllm.shared.new_weights import NEW_WEIGHTS
from kvtier.core.errors import ConfigError
from kvtier.core.types import DISK
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk.inspect.report import report_slab
from tests.engines.vllm.tiering import (
    ROW_BYTES,
    STEP,
    Harness,
    config_of,
    keys_of,
    running,
)
from tests.tiers.disk.faulty_disk import FaultyDisk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    """Replace the disk by one with planned faults."""
    system = FaultyDisk()
    monkeypatch.setattr(
        opening, "DiskTier", lambda options, group, rows: DiskTier(options, group, rows, system)
    )
    return system


# -- what a tier is for ----------------------------------------------------------------------------


def test_blocks_that_left_the_host_tier_come_back_from_the_slab(tmp_path: Path) -> None:
    with running(tmp_path, num_rows=8) as harness:
        prompts = [keys_of(number, number + 1, number + 2) for number in (0, 10, 20, 30)]
        for keys in prompts:  # 12 blocks in 8 rows
            harness.store(keys)
        for keys in prompts:
            assert harness.load(keys) == [True] * 3


def test_hits_are_counted_under_disk(tmp_path: Path) -> None:
    with running(tmp_path) as harness:
        keys = keys_of(1)
        harness.store(keys)
        harness.forget_host()
        context = harness.request(keys)
        assert harness.manager.lookup(keys[0], context) is LookupResult.HIT_PENDING
        assert harness.manager.get_load_source(keys[0], context) is CacheHitSource.DISK
        harness.finish(context)


def test_emptied_host_tier_leaves_the_slab_as_it_is(tmp_path: Path) -> None:
    with running(tmp_path) as harness:
        keys = keys_of(*range(5))
        harness.store(keys)
        harness.forget_host()
        assert harness.load(keys) == [True] * 5
        assert harness.load(keys_of(99)) == [False]


def test_new_weights_end_the_tier_until_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as harness:
        keys = keys_of(*range(5))
        harness.store(keys)
        NEW_WEIGHTS.tell("a test")
        harness.forget_host()
        assert harness.load(keys) == [False] * 5
        harness.store(keys)
        harness.forget_host()
        assert harness.load(keys) == [False] * 5, "vLLM's host tier may have had old KV"
    with running(tmp_path) as harness:
        assert harness.load(keys) == [False] * 5
        harness.store(keys)
        harness.forget_host()
        assert harness.load(keys) == [True] * 5


def test_depth_of_a_block_is_its_place_in_the_prompt(tmp_path: Path) -> None:
    with running(tmp_path) as harness:
        harness.store(keys_of(*range(5)))
    (report,) = report_slab(tmp_path, 0.0).namespaces
    assert (report.num_blocks, report.longest_blocks) == (5, 5)


def test_groups_of_one_prompt_are_blocks_of_their_own(tmp_path: Path) -> None:
    with running(tmp_path) as harness:
        harness.store(keys_of(1, group=0))
        harness.forget_host()
        assert harness.load(keys_of(1, group=1)) == [False]
        assert harness.load(keys_of(1, group=0)) == [True]


# -- restart ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("crashes", [False, True])
def test_restart_finds_what_was_acknowledged(tmp_path: Path, crashes: bool) -> None:
    keys = keys_of(*range(6))
    with running(tmp_path) as harness:
        harness.store(keys)
        if crashes:
            harness.tier._disk.abandon()  # the files, as the end of the process leaves them
    with running(tmp_path) as harness:
        assert harness.load(keys) == [True] * 6
        assert harness.load(keys_of(99)) == [False]


@pytest.mark.parametrize(
    "changed",
    [
        {"model": OffloadingModelConfig("nobody/other", "bfloat16")},
        {"cache": OffloadingCacheConfig(32, 2)},
        {"kv_cache_layout": "LBNHC"},
    ],
)
def test_other_model_or_layout_never_sees_the_blocks(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    keys = keys_of(1, 2)
    with running(tmp_path) as harness:
        harness.store(keys)
    other = Harness(replace(config_of(tmp_path, 16, 16), **changed))
    assert other.load(keys) == [False, False]
    other.manager.shutdown()
    with running(tmp_path, namespace="of somebody else") as harness:
        assert harness.load(keys) == [False, False]
    with running(tmp_path) as harness:
        assert harness.load(keys) == [True, True]


# -- bounds ----------------------------------------------------------------------------------------


def _disk_bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def test_slab_never_grows_and_the_oldest_leave(tmp_path: Path) -> None:
    with running(tmp_path, num_slots=8) as harness:
        harness.store(keys_of(0, 1))
        size = _disk_bytes(tmp_path)
        for number in range(10, 40, 2):
            harness.store(keys_of(number, number + 1))
            assert harness.tier.slab.num_blocks <= 8
            assert harness.load(keys_of(0, 1)) == [True, True], "what is used stays"
        assert _disk_bytes(tmp_path) - size < ROW_BYTES, "only the journal grows"
        harness.forget_host()
        assert harness.load(keys_of(10, 11)) == [False, False]
        assert harness.load(keys_of(0, 1)) == [True, True]


def test_start_of_a_prompt_outlives_what_follows_it(tmp_path: Path) -> None:
    with running(tmp_path, num_slots=8) as harness:
        harness.store(keys_of(*range(8)))
        harness.store(keys_of(20, 21, 22))
        harness.forget_host()
        assert harness.load(keys_of(*range(8))) == [True] * 5 + [False] * 3


def test_prefix_that_vllm_keeps_itself_stays_on_disk_too(tmp_path: Path) -> None:
    """Hits above never reach the tier; the end of their request does."""
    with running(tmp_path, num_slots=8) as harness:
        system = keys_of(1, 2)
        harness.store(system)
        for number in range(10, 30, 3):
            harness.store([*system, *keys_of(*range(number, number + 3))])
        harness.forget_host()
        assert harness.load(system) == [True, True]


def test_block_that_is_read_does_not_leave(tmp_path: Path, disk: FaultyDisk) -> None:
    with running(tmp_path, num_slots=4) as harness:
        keys = keys_of(1, 2, 3)
        harness.store(keys)
        harness.forget_host()
        disk.hold("read")
        context = harness.request(keys)
        for key in keys:
            assert harness.manager.lookup(key, context) is LookupResult.HIT_PENDING
        harness.manager.on_schedule_end(STEP)
        more = keys_of(10, 11, 12)
        other = harness.compute(more)
        disk.release("read")
        harness.finish(context)
        harness.finish(other)
        assert harness.load(keys) == [True] * 3
        harness.forget_host()
        assert harness.load(more) == [True, False, False], "there was one slot that nobody read"


def test_disk_that_is_too_slow_does_not_hold_the_host_tier(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    with running(tmp_path, num_rows=8, num_slots=16) as harness:
        disk.hold("write")
        contexts = []
        for number in range(0, 40, 2):
            # There is room: the host tier is not full of blocks that wait for the disk.
            contexts.append(harness.compute(keys_of(number, number + 1)))
            harness.manager.on_schedule_end(STEP)
        disk.release("write")
        for context in contexts:
            harness.finish(context)
        harness.forget_host()
        assert harness.load(keys_of(0, 1)) == [True, True]
        assert harness.load(keys_of(6)) == [False]


# -- whatever goes wrong ---------------------------------------------------------------------------


def test_wrong_bytes_on_disk_are_a_miss_and_the_others_are_kept(tmp_path: Path) -> None:
    keys = keys_of(*range(4))
    with running(tmp_path) as harness:
        harness.store(keys)
    (data,) = tmp_path.glob("*data*")
    with data.open("r+b") as file:
        file.seek(2 * ROW_BYTES + 100)
        file.write(b"\x00\x01\x02\x03")
    with running(tmp_path) as harness:
        found = harness.load(keys)
        assert sorted(found) == [False, True, True, True]
        harness.store(keys)  # it is computed again
        harness.forget_host()
        assert harness.load(keys) == [True] * 4


@pytest.mark.parametrize("operation", ["write", "journal", "read"])
def test_broken_disk_costs_hits_and_nothing_else(
    tmp_path: Path, disk: FaultyDisk, operation: str
) -> None:
    with running(tmp_path) as harness:
        harness.store(keys_of(1, 2))
        disk.fail(operation, count=1000)
        for number in range(10, 30, 2):
            harness.store(keys_of(number, number + 1))
        harness.forget_host()
        for number in (1, *range(10, 30)):
            harness.load(keys_of(number))
        if operation != "read":
            assert harness.load(keys_of(28, 29)) == [False, False]
        harness.store(keys_of(50))
        assert harness.load(keys_of(50)) == [True], "vLLM's own tier works on"


def test_full_file_system_costs_hits_and_nothing_else(tmp_path: Path, disk: FaultyDisk) -> None:
    with running(tmp_path) as harness:
        harness.store(keys_of(1, 2))
        disk.fail("journal", code=errno.ENOSPC, count=3)
        harness.store(keys_of(3, 4))
        harness.forget_host()
        disk.forget_faults()
        assert harness.load(keys_of(1, 2)) == [True, True]


def test_disk_that_can_not_be_opened_is_left_alone(
    tmp_path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.fail("journal", count=1000)
    with running(tmp_path) as harness:
        assert "the engine serves without the disk" in caplog.text
        harness.store(keys_of(1, 2))
        assert harness.load(keys_of(1, 2)) == [True, True]
        harness.forget_host()
        assert harness.load(keys_of(1, 2)) == [False, False]


def test_day_s_writes_are_a_bound(tmp_path: Path) -> None:
    with running(tmp_path, disk_bytes_per_day=3 * ROW_BYTES) as harness:
        harness.store(keys_of(1, 2))
        harness.store(keys_of(3, 4))
        harness.forget_host()
        assert harness.load(keys_of(1, 2, 3, 4)) == [True, True, False, False]


# -- reports to vLLM -------------------------------------------------------------------------------


def _events(harness: Harness) -> list[tuple[list[OffloadKey], bool]]:
    return [
        (event.keys, event.removed)
        for event in harness.manager.take_events()
        if event.medium is Medium.STORAGE
    ]


def test_events_say_what_came_and_what_left(tmp_path: Path) -> None:
    first, second = keys_of(1, 2), keys_of(3, 4)
    with running(tmp_path, num_slots=3, enable_kv_events=True) as harness:
        harness.store(first)
        assert _events(harness) == [(first, False)]
        harness.store(second)
        assert _events(harness) == [([first[1]], True), (second, False)]
    with running(tmp_path, num_slots=3, enable_kv_events=True) as harness:
        assert harness.load(second) == [True, True]
        assert _events(harness) == [([second[0]], False), ([second[1]], False)]


def test_events_are_kept_only_where_they_are_taken(tmp_path: Path) -> None:
    with running(tmp_path) as harness:
        harness.store(keys_of(1, 2))
        assert _events(harness) == []
        assert not harness.tier.slab.take_changes()


def test_vllm_is_told_what_all_engines_tell(tmp_path: Path) -> None:
    with running(tmp_path, num_slots=2) as harness:
        first, second, third = keys_of(1), keys_of(2), keys_of(3)
        harness.store([*first, *second])
        harness.store(third)
        harness.forget_host()
        for _ in range(2):  # the second one is expected to take as long as the first one did
            assert harness.load([*first, *second]) == [True, False]
            harness.forget_host()
        harness.store(second)
        told = harness.manager.get_stats().data["data"]
        extra = dict(harness.spec.config.extra_config)
        assert told.keys() <= TieringOffloadingSpec.build_metric_definitions(extra).keys()
        assert told["vllm:kvtier_used_chunks"] == told["vllm:kvtier_chunks"] == {(DISK,): 2}
        assert told["vllm:kvtier_unclaimed_chunks"] == {(DISK,): 0}
        assert told["vllm:kvtier_evicted_chunks"] == {(DISK,): 2}
        assert told["vllm:kvtier_loaded_chunks"] == {(DISK,): 2}
        assert told["vllm:kvtier_planned_blocks"] == {("load",): 2}
        assert told["vllm:kvtier_returned_blocks"] == {(DISK,): 1}
        assert told["vllm:kvtier_actual_load_seconds"].keys() == {(DISK,)}
        assert len(told["vllm:kvtier_load_error_ratio"][DISK,]) >= 1
        assert told["vllm:kvtier_breaker_state"] == {(DISK,): 0}
        assert sum(told["vllm:kv_offload_tiering_write_bytes"].values()) == 4 * ROW_BYTES
        assert json.dumps(list(told))


def test_what_a_restart_found_is_told_until_it_is_asked_for(tmp_path: Path) -> None:
    keys = keys_of(1, 2, 3)
    with running(tmp_path) as harness:
        harness.store(keys)
    with running(tmp_path) as harness:
        harness.load(keys[:1])
        told = harness.manager.get_stats().data["data"]
        assert told["vllm:kvtier_unclaimed_chunks"] == {
            (DISK,): 3 - told["vllm:kvtier_used_chunks"][DISK,]
        }
        assert told["vllm:kvtier_unclaimed_chunks"] != {(DISK,): 3}


# -- settings --------------------------------------------------------------------------------------


def test_capacity_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="below one block"):
        Harness(config_of(tmp_path, 16, 16, disk_capacity=ROW_BYTES // 2))


def test_slab_of_another_size_of_blocks_is_refused(tmp_path: Path) -> None:
    with running(tmp_path):
        pass
    config = config_of(tmp_path, 16, 16)
    with pytest.raises(ConfigError, match="holds a different slab"):
        Harness(replace(config, worker_kv_bytes_per_block=2 * ROW_BYTES))


def test_one_slab_has_one_owner(tmp_path: Path) -> None:
    with running(tmp_path), pytest.raises(ConfigError, match="another process|in use|owns"):
        Harness(config_of(tmp_path, 16, 16))


def test_replicas_of_one_service_have_slabs_of_their_own(tmp_path: Path) -> None:
    """vLLM gives each replica of a dense model its number, but a number of replicas of 1."""
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 1, 1, None, False)
    with running(tmp_path / "slab") as harness:
        harness.store(keys_of(1))
    replica = Harness(replace(config_of(tmp_path / "replicas", 16, 16), parallel=parallel))
    replica.store(keys_of(1))
    replica.manager.shutdown()
    assert (tmp_path / "replicas" / "dp1").is_dir()
