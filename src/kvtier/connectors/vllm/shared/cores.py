"""Cores for our threads: those on which vLLM does not compute.

On a CPU vLLM binds every rank to cores of its own, and threads inherit that: copies would stop the
layers that they are meant to run beside.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

NODES = Path("/sys/devices/system/cpu")


@contextmanager
def off_compute_cores() -> Iterator[None]:
    """Threads that start in here run on spare cores, where this rank has any."""
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        yield
        return
    ours = os.sched_getaffinity(0)
    spare = spare_cores()
    if spare:
        os.sched_setaffinity(0, spare)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def spare_cores() -> set[int]:
    """Return the cores that the parent process may use and that none of its children is bound to.

    Only cores of this process's NUMA nodes count. The set is empty if no process is bound.
    """
    parent = psutil.Process().parent()
    if parent is None:
        return set()
    allowed = _cores(parent)
    bound = [cores for child in parent.children() if (cores := _cores(child)) < allowed]
    taken = set().union(*bound)
    nodes = _nodes(os.sched_getaffinity(0))
    return {core for core in allowed - taken if _nodes([core]) <= nodes}


def _cores(process: psutil.Process) -> set[int]:
    try:
        return set(process.cpu_affinity())
    except psutil.Error:  # it ended
        return set()


def _nodes(cores: Collection[int]) -> set[str]:
    """NUMA nodes of cores."""
    return {node.name for core in cores for node in (NODES / f"cpu{core}").glob("node*")}
