"""Control groups of this process, and the files of their limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def own_groups(root: Path, controller: str) -> Iterator[PurePosixPath]:
    """Yield the process's own group and those above it, up to the root that is mounted here.

    In a container ``/proc/self/cgroup`` may name a path of the host, while only the root is
    mounted: groups that do not exist have no files.

    root: where ``proc`` and ``sys`` are mounted.
    controller: its name in ``/proc/self/cgroup``, "" for version 2.
    """
    own = PurePosixPath("/")
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        is_visible = name.startswith("/") and ".." not in PurePosixPath(name).parts
        if controller in controllers.split(",") and is_visible:
            own = PurePosixPath("/" + name.lstrip("/"))
    yield own
    yield from own.parents


def read_number(path: Path) -> int | None:
    """Return the only number in a file; None if the file is missing or has a word such as "max"."""
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def read_text(path: Path) -> str:
    """Return the text of a file; "" if it is missing."""
    try:
        return path.read_text(errors="surrogateescape")  # a group's name may be any bytes
    except OSError:
        return ""


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the cores that the CPU time of all groups above allows; None for no limit.

    ``docker run --cpus`` and CPU limits of Kubernetes are such quotas. The cores stay visible.
    """
    quotas = []
    for name in own_groups(root, ""):
        quota, _, period = read_text(_group(root, "sys/fs/cgroup", name) / "cpu.max").partition(" ")
        quotas.append((quota, period))
    for name in own_groups(root, "cpu"):
        group = _group(root, "sys/fs/cgroup/cpu", name)
        quotas.append(
            (read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us"))
        )
    cores = [
        int(quota) / int(period)
        for quota, period in quotas
        if quota.strip().isdigit() and period.strip().isdigit() and int(period)
    ]
    return min(cores, default=None)


def _group(root: Path, mount: str, name: PurePosixPath) -> Path:
    return root / mount / name.relative_to("/")
