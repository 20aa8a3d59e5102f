"""One arena of several processes, each with a mapping of its own."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import DType, full_attention
from kvtier.testing import memory_bytes
from kvtier.tiers import ArenaOptions, HostTier

GROUP = full_attention(1, 1, 64, DType.FLOAT32, 16)
CAPACITY = 8 * GROUP.bytes_per_block


def test_what_one_process_stores_another_one_loads(tmp_path: Path) -> None:
    options = ArenaOptions(file=tmp_path / "arena")
    one = HostTier(GROUP, CAPACITY, CpuDevice(), options)
    memory_bytes(one.memory)[100:200] = 7
    other = HostTier(GROUP, CAPACITY, CpuDevice(), options)
    assert one.memory.address != other.memory.address
    assert (memory_bytes(other.memory)[100:200] == 7).all(), "touching it has changed it"
    one.arena.forget_file()
    other.arena.forget_file()
    assert list(tmp_path.iterdir()) == [], "nothing is left when the processes end"
    memory_bytes(other.memory)[:100] = 9
    assert (memory_bytes(one.memory)[:100] == 9).all(), "the memory is still shared"
    one.close()
    other.close()


def test_tier_that_is_closed_leaves_no_file(tmp_path: Path) -> None:
    tier = HostTier(GROUP, CAPACITY, CpuDevice(), ArenaOptions(file=tmp_path / "arena"))
    tier.close()
    assert list(tmp_path.iterdir()) == []


def test_file_system_without_room_is_named_and_left_clean(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(
            ConfigError, match="cannot be allocated in .*; lower host capacity, or enlarge"
        ):
            HostTier(GROUP, CAPACITY, CpuDevice(), ArenaOptions(file=tmp_path / "arena"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
