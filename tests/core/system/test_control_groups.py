"""Quotas of CPU time, as control groups of both versions state them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.core.system.control_groups import cpu_quota
from kvtier.core.system.process import num_cores
from kvtier.tools.cli.detect import machine

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


def system(root: Path, files: dict[str, str]) -> Path:
    """A machine whose files are these."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({f"{V2}/cpu.max": "max 100000\n"}, None),
        ({f"{V2}/cpu.max": "50000 100000\n"}, 0.5),
        ({f"{V2}/cpu.max": "garbage"}, None),
        ({f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, None),
        ({f"{V1}/cpu.cfs_quota_us": "150000\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({f"{V1}/cpu.cfs_quota_us": "5\n", f"{V1}/cpu.cfs_period_us": "0\n"}, None),
        (
            {  # a service of systemd below a slice with a lower quota
                "proc/self/cgroup": "0::/system.slice/kvtier.service\n",
                f"{V2}/system.slice/kvtier.service/cpu.max": "400000 100000\n",
                f"{V2}/system.slice/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {  # version 1, where several controllers share a hierarchy
                "proc/self/cgroup": "4:cpu,cpuacct:/a/b\n3:memory:/x\n",
                f"{V1}/a/b/cpu.cfs_quota_us": "-1\n",
                f"{V1}/a/b/cpu.cfs_period_us": "100000\n",
                f"{V1}/a/cpu.cfs_quota_us": "300000\n",
                f"{V1}/a/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {  # a container that sees its own group as the root
                "proc/self/cgroup": "0::/docker/0123\n",
                f"{V2}/cpu.max": "100000 100000\n",
            },
            1.0,
        ),
    ],
)
def test_the_lowest_quota_of_the_own_group_and_those_above_counts(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    assert cpu_quota(system(tmp_path, files)) == cores


@pytest.mark.parametrize(("quota", "cores"), [(50_000, 1), (199_999, 1), (200_000, 2), (10**9, 8)])
def test_cores_are_no_more_than_the_quota_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: int, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert num_cores(system(tmp_path, {f"{V2}/cpu.max": f"{quota} 100000\n"})) == cores


def test_the_doctor_names_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    root = system(tmp_path, {f"{V2}/cpu.max": "50000 100000\n"})
    cpu = next(each for each in machine(root) if each.topic == "CPU")
    assert cpu.note == f"1 of {os.cpu_count()} cores may be used; the control group's quota is 0.5"
