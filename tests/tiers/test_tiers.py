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


def _group(folder: str, limit: object, current: int, **more: str) -> dict[str, str]:
    """Return the files of a control group of version 2."""
    files = {"memory.max": str(limit), "memory.current": str(current)}
    files |= {f"memory.{name}": text for name, text in more.items()}
    return {f"sys/fs/cgroup/{folder}{name}": text for name, text in files.items()}


SERVICE = "system.slice/kvtier.service"
V1 = "sys/fs/cgroup/memory/"
LIMITS = {
    "no control group": ({}, 40 * 1024, "machine"),
    "version 2": (_group("", 30000, 10000), 20000, "control group"),
    "unlimited": (_group("", "max", 10000), 40 * 1024, "machine"),
    "unlimited by a number": (_group("", 9223372036854771712, 10000), 40 * 1024, "machine"),
    "version 1": (
        {f"{V1}memory.limit_in_bytes": "30000\n", f"{V1}memory.usage_in_bytes": "12000\n"},
        18000,
        "control group",
    ),
    # ``MemoryMax=`` of systemd: the limit stands in the service's group, none in the root.
    "own group of a service": (
        {
            "proc/self/cgroup": f"0::/{SERVICE}\n",
            "sys/fs/cgroup/cgroup.controllers": "memory\n",
            **_group(f"{SERVICE}/", 30000, 10000, stat="inactive_file 5000\n"),
        },
        25000,
        f"control group /{SERVICE}",
    ),
    "a group above": (
        {
            "proc/self/cgroup": "0::/user.slice/a.slice/b.scope\n",
            **_group("user.slice/", 20000, 19000),
            **_group("user.slice/a.slice/", "max", 9000),
            **_group("user.slice/a.slice/b.scope/", 30000, 9000),
        },
        1000,
        "control group /user.slice",
    ),
    "version 1 has a group per controller": (
        {
            "proc/self/cgroup": f"12:cpu,cpuacct:/elsewhere\n5:memory:/{SERVICE}\n0::/init.scope\n",
            f"{V1}{SERVICE}/memory.limit_in_bytes": "30000\n",
            f"{V1}{SERVICE}/memory.usage_in_bytes": "12000\n",
            f"{V1}{SERVICE}/memory.stat": "inactive_file 1\ntotal_inactive_file 2000\n",
        },
        20000,
        f"control group /{SERVICE}",
    ),
    # Reading a model fills the group with pages that the kernel reclaims when memory is needed.
    "files in the page cache": (
        _group("", 30000, 29000, stat="anon 4000\ninactive_file 25000\nactive_file 0\n"),
        26000,
        "control group",
    ),
}
"""Files besides ``MEMINFO``, the bytes that are left, and what limits them."""


@pytest.mark.parametrize("case", LIMITS)
def test_the_lowest_limit_counts(tmp_path: Path, case: str) -> None:
    files, expected, limited_by = LIMITS[case]
    left, why = available_bytes(_machine(tmp_path, MEMINFO | files))
    assert left == expected
    assert limited_by in why


def test_memory_in_all_is_the_machines_or_that_of_a_group_above(tmp_path: Path) -> None:
    assert total_bytes(_machine(tmp_path / "a", MEMINFO))[0] == 64 * 1024
    group = {
        "proc/self/cgroup": "0::/user.slice/a.slice\n",
        "sys/fs/cgroup/user.slice/memory.max": "20000\n",
    }
    total, why = total_bytes(_machine(tmp_path / "b", MEMINFO | group))
    assert total == 20000
    assert "control group /user.slice" in why


@pytest.mark.parametrize("name", ["/docker/0123", "/../../../other", "kvtier", "", "/\udcff"])
def test_group_that_a_container_can_not_see_is_its_root(tmp_path: Path, name: str) -> None:
    root = _machine(tmp_path, MEMINFO | _group("", 30000, 10000))
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_bytes(f"0::{name}\n".encode(errors="surrogateescape"))
    (tmp_path / "memory.max").write_text("1")
    (tmp_path / "memory.current").write_text("1")
    assert available_bytes(root)[0] == 20000


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
