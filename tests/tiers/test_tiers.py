"""Slots, capacities, and available memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.errors import ConfigError, LayoutError
from kvtier.core.system.memory import available_bytes, total_bytes
from kvtier.core.types import Slot
from kvtier.devices import Device
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import DType, full_attention, named_layout
from kvtier.testing import MemoryTierSuite, host_memory
from kvtier.tiers import DeviceTier, HostTier, MemoryTier
from kvtier.tiers.memory.slots import SlotPool

GROUP = full_attention(2, 2, 4, DType.FLOAT16, 2)


class TestDeviceTier(MemoryTierSuite):
    def make_tier(self, num_slots: int) -> MemoryTier:
        layout = named_layout("layer_first", GROUP, num_slots)
        return DeviceTier(host_memory(layout.nbytes), layout)

    def make_device(self) -> Device:
        return CpuDevice()


class TestHostTier(MemoryTierSuite):
    def make_tier(self, num_slots: int) -> MemoryTier:
        return HostTier(GROUP, num_slots * GROUP.bytes_per_block, CpuDevice())

    def make_device(self) -> Device:
        return CpuDevice()


def test_pool_smaller_than_its_layout_is_refused() -> None:
    layout = named_layout("layer_first", GROUP, 4)
    with pytest.raises(LayoutError, match=f"{layout.nbytes - 1} bytes.*{layout.nbytes}"):
        DeviceTier(host_memory(layout.nbytes - 1), layout)


# -- capacity --------------------------------------------------------------------------------------


def test_host_capacity_is_rounded_down_to_whole_blocks() -> None:
    tier = HostTier(GROUP, 4 * GROUP.bytes_per_block - 1, CpuDevice())
    assert tier.num_slots == 3
    tier.close()


@pytest.mark.parametrize("capacity", [GROUP.bytes_per_block - 1, 1, -5])
def test_host_capacity_below_one_block_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError) as caught:
        HostTier(GROUP, capacity, CpuDevice())
    for part in (str(capacity), str(GROUP.bytes_per_block), "block_size=2", "2 layers", "raise"):
        assert part in str(caught.value)


def test_host_capacity_above_what_is_left_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        HostTier(GROUP, 1 << 60, CpuDevice())
    for part in (f"{2**30:.2f} GiB", "are left", "lower host capacity"):
        assert part in str(caught.value)


# -- what is left ----------------------------------------------------------------------------------


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 64 kB\nMemAvailable:      40 kB\nSwapFree: 1 kB\n"}


def test_without_a_control_group_free_memory_is_the_limit(tmp_path: Path) -> None:
    left, why = available_bytes(_machine(tmp_path, MEMINFO))
    assert left == 40 * 1024
    assert "machine" in why


def test_control_group_version_2_limits(tmp_path: Path) -> None:
    group = {"sys/fs/cgroup/memory.max": "30000\n", "sys/fs/cgroup/memory.current": "10000\n"}
    left, why = available_bytes(_machine(tmp_path, MEMINFO | group))
    assert left == 20000
    assert "control group" in why


def test_control_group_version_1_limits(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/memory"
    group = {f"{folder}.limit_in_bytes": "30000\n", f"{folder}.usage_in_bytes": "12000\n"}
    assert available_bytes(_machine(tmp_path, MEMINFO | group))[0] == 18000


def test_limit_of_the_own_group_of_a_service_is_seen(tmp_path: Path) -> None:
    """``MemoryMax=`` of systemd: the limit stands in the service's group, none in the root."""
    own = "sys/fs/cgroup/system.slice/kvtier.service"
    group = {
        "proc/self/cgroup": "0::/system.slice/kvtier.service\n",
        "sys/fs/cgroup/cgroup.controllers": "memory\n",
        f"{own}/memory.max": "30000\n",
        f"{own}/memory.current": "10000\n",
        f"{own}/memory.stat": "inactive_file 5000\n",
    }
    left, why = available_bytes(_machine(tmp_path, MEMINFO | group))
    assert left == 25000
    assert "control group /system.slice/kvtier.service" in why


def test_memory_in_all_is_the_machines_or_that_of_a_group_above(tmp_path: Path) -> None:
    machine = {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 40 kB\n"}
    assert total_bytes(_machine(tmp_path / "a", machine))[0] == 100 * 1024
    group = {
        "proc/self/cgroup": "0::/user.slice/a.slice\n",
        "sys/fs/cgroup/user.slice/memory.max": "20000\n",
    }
    total, why = total_bytes(_machine(tmp_path / "b", machine | group))
    assert total == 20000
    assert "control group /user.slice" in why


def test_limit_of_a_group_above_counts_for_all_below(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "0::/user.slice/a.slice/b.scope\n",
        "sys/fs/cgroup/user.slice/memory.max": "20000\n",
        "sys/fs/cgroup/user.slice/memory.current": "19000\n",
        "sys/fs/cgroup/user.slice/a.slice/memory.max": "max\n",
        "sys/fs/cgroup/user.slice/a.slice/memory.current": "9000\n",
        "sys/fs/cgroup/user.slice/a.slice/b.scope/memory.max": "30000\n",
        "sys/fs/cgroup/user.slice/a.slice/b.scope/memory.current": "9000\n",
    }
    left, why = available_bytes(_machine(tmp_path, MEMINFO | group))
    assert left == 1000
    assert "control group /user.slice" in why


def test_version_1_has_a_group_per_controller(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/system.slice/kvtier.service/memory"
    group = {
        "proc/self/cgroup": (
            "12:cpu,cpuacct:/elsewhere\n5:memory:/system.slice/kvtier.service\n0::/init.scope\n"
        ),
        f"{folder}.limit_in_bytes": "30000\n",
        f"{folder}.usage_in_bytes": "12000\n",
        f"{folder}.stat": "inactive_file 1\ntotal_inactive_file 2000\n",
    }
    assert available_bytes(_machine(tmp_path, MEMINFO | group))[0] == 20000


@pytest.mark.parametrize("name", ["/docker/0123", "/../../../other", "kvtier", "", "/\udcff"])
def test_group_that_a_container_can_not_see_is_its_root(tmp_path: Path, name: str) -> None:
    group = {"sys/fs/cgroup/memory.max": "30000\n", "sys/fs/cgroup/memory.current": "10000\n"}
    root = _machine(tmp_path, MEMINFO | group)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_bytes(f"0::{name}\n".encode(errors="surrogateescape"))
    (tmp_path / "memory.max").write_text("1")
    (tmp_path / "memory.current").write_text("1")
    assert available_bytes(root)[0] == 20000


def test_files_in_the_page_cache_are_not_in_the_way(tmp_path: Path) -> None:
    """Reading a model fills the group with pages that the kernel reclaims when memory is needed."""
    group = {
        "sys/fs/cgroup/memory.max": "30000\n",
        "sys/fs/cgroup/memory.current": "29000\n",
        "sys/fs/cgroup/memory.stat": "anon 4000\ninactive_file 25000\nactive_file 0\n",
    }
    assert available_bytes(_machine(tmp_path, MEMINFO | group))[0] == 26000


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_unlimited_control_group_does_not_limit(tmp_path: Path, limit: str) -> None:
    group = {"sys/fs/cgroup/memory.max": limit, "sys/fs/cgroup/memory.current": "10000"}
    assert available_bytes(_machine(tmp_path, MEMINFO | group))[0] == 40 * 1024


def test_without_either_the_limit_is_unknown_and_large(tmp_path: Path) -> None:
    left, why = available_bytes(tmp_path)
    assert left >= 1 << 60
    assert "no limit known" in why


def test_this_machine_can_be_read() -> None:
    assert available_bytes()[0] > 0


# -- slots -----------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 29)), st.integers(1, 12))
def test_neighbours_are_found_wherever_there_are_enough(in_use: set[int], wanted: int) -> None:
    pool = SlotPool(30)
    pool.allocate(30)
    pool.free([Slot(slot) for slot in range(30) if slot not in in_use])
    runs = [
        start for start in range(31 - wanted) if in_use.isdisjoint(range(start, start + wanted))
    ]
    slots = pool.allocate(wanted)
    if wanted > 30 - len(in_use):
        assert slots is None
    elif runs:
        assert slots == list(range(runs[0], runs[0] + wanted))
    else:
        assert slots is not None
        assert slots == sorted(set(range(30)) - in_use)[:wanted]


@given(st.sets(st.integers(0, 29)))
def test_longest_run_is_the_longest_allocation_of_neighbours(in_use: set[int]) -> None:
    pool = SlotPool(30)
    assert pool.longest_run() == 30
    pool.allocate(30)
    assert pool.longest_run() == 0
    pool.free([Slot(slot) for slot in range(30) if slot not in in_use])
    longest = pool.longest_run()
    slots = pool.allocate(longest)
    assert slots is not None
    assert slots == list(range(slots[0], slots[0] + longest)) if slots else longest == 0
    assert pool.longest_run() <= longest


def test_slots_outside_the_pool_are_noticed() -> None:
    pool = SlotPool(4)
    pool.allocate(4)
    for slot in (-1, 4):
        with pytest.raises(ValueError, match=f"slot {slot} is no"):
            pool.free([Slot(slot)])
    assert pool.num_free == 0
