"""Scenarios in which a process forks, its child ends, and the parent goes on.

``-m tests.cache.tokens.forking SCENARIO exit|_exit FOLDER``.

This is a program of its own, so that the child ends as an interpreter does: it leaves every
``with``, runs the registered exit handlers, and frees every object.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvtier.cache.tokens import Cache
from kvtier.cache.transfer.lane import Lane
from kvtier.core import hot
from kvtier.core.config import CacheConfig
from kvtier.core.errors import Closed, DeviceError, TierError
from kvtier.core.keys import token_labels
from kvtier.core.types import IoKind
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import DType, full_attention, named_layout
from kvtier.testing import host_memory
from kvtier.tiers import ArenaOptions, DeviceTier, HostTier
from kvtier.tiers.disk.format.folder import owner_of
from kvtier.tiers.disk.io import open_engine
from kvtier.tiers.disk.opening import read_superblock
from tests.cache.tokens.locking import LockingDevice
from tests.tiers.disk.harness import harness, key

NOT_HERE = 77
"""Exit status if the system lacks a feature that the scenario needs."""
PAGE, NUM_PAGES = 4096, 16
PATIENCE_S = 30
GROUP = full_attention(2, 1, 16, DType.FLOAT16, 4)


def refuses(error: type[Exception], call: Callable[[], object]) -> None:
    """Check that the call raises an error that names the owner process."""
    with pytest.raises(error, match=f"belongs to process {os.getppid()}"):
        call()


class Fork:
    """Forks, and checks how the child ended. ending: ``exit`` or ``_exit``."""

    def __init__(self, ending: str) -> None:
        self.ending = ending

    def __call__(self, work: Callable[[], object] = lambda: None) -> None:
        """Have a child do ``work`` and end, before this process goes on."""
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_S)  # a child that hangs is a failure, too
            work()
            if self.ending == "_exit":
                os._exit(0)
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {status:#x}"


def ring(fork: Fork, folder: Path) -> None:
    """Memory and file stay registered; otherwise every read would fail."""
    content = np.random.default_rng(1).integers(0, 256, NUM_PAGES * PAGE, np.uint8)
    (folder / "file").write_bytes(content.tobytes())
    fd = os.open(folder / "file", os.O_RDWR | os.O_DIRECT)
    memory = host_memory((NUM_PAGES + 1) * PAGE)
    begin = memory.address + -memory.address % PAGE
    offsets = np.arange(NUM_PAGES, dtype=np.int64) * PAGE
    batch = offsets, offsets.astype(np.uint64) + np.uint64(begin), np.full(NUM_PAGES, PAGE)
    for kind in (IoKind.URING, IoKind.PREADV):
        try:
            engine = open_engine(fd, kind, [memory])
        except TierError:
            sys.exit(NOT_HERE)
        with closing(engine):
            assert engine.read(*batch).tolist() == [PAGE] * NUM_PAGES
            fork()
            assert engine.read(*batch).tolist() == [PAGE] * NUM_PAGES
            fork(lambda engine=engine: refuses(Closed, lambda: engine.read(*batch)))  # type: ignore[misc]
            fork(engine.close)
            assert engine.write(*batch).tolist() == [PAGE] * NUM_PAGES
    bare = hot.UringRing(fd, 4, PAGE, True)
    fork(lambda: refuses(RuntimeError, bare.register_file))
    fork(lambda: refuses(RuntimeError, lambda: bare.register_buffers([(begin, PAGE)])))
    fork(lambda: refuses(RuntimeError, lambda: bare.transfer(False, *batch, None)))


def slab(fork: Fork, folder: Path) -> None:
    """The owner keeps its lock, and its later writes are found after a restart."""
    with harness(folder) as here:
        before = here.put(1, 2)

        def meddle() -> None:
            refuses(Closed, lambda: here.put(3))
            refuses(Closed, lambda: here.tier.forget(before))
            refuses(Closed, lambda: here.load([key(1)], before[:1]))
            here.tier.close()

        fork()
        fork(meddle)
        path = here.options.path
        assert f"process {os.getpid()} " in (owner_of(path) or "nobody")
        assert not read_superblock(path)[0].is_clean, "it was marked as closed in order"
        here.put(4, 5)
        here.reopen()
        assert [result.name for result in here.get(1, 2, 4, 5)] == ["THERE"] * 4


def lock(fork: Fork, folder: Path) -> None:
    """A child that lives on does not hold the slab's lock after the owner has closed it."""
    del fork
    with harness(folder) as here:
        here.put(1)
        end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(end[1])
            os.read(end[0], 1)  # until the parent is done
            os._exit(0)
        here.reopen()
        assert [result.name for result in here.get(1)] == ["THERE"]
        os.close(end[1])
        os.waitpid(child, 0)


def killed(fork: Fork, folder: Path) -> None:
    """The parent is killed, and its child lives on until its input ends."""
    del fork
    with harness(folder) as here:
        here.put(1)
        if os.fork() == 0:
            print("ready", flush=True)
            sys.stdin.read()
            os._exit(0)
        signal.pause()


def arena(fork: Fork, folder: Path) -> None:
    """Check that locked and shared memory stays locked and shared."""
    device = LockingDevice()
    options = ArenaOptions(file=folder / "arena")
    with closing(HostTier(GROUP, 8 * GROUP.bytes_per_block, device, options)) as tier:

        def close() -> None:
            tier.close()
            tier.arena.forget_file()
            assert not device.unlocked, "it was the parent's"

        fork()
        fork(close)
        assert (folder / "arena").exists()
    assert not (folder / "arena").exists()
    assert device.unlocked == device.locked


def cache(fork: Fork, folder: Path) -> None:
    """The parent's requests go on. A child's calls fail at once, without waiting for threads."""
    del folder
    layout = named_layout("layer_first", GROUP, 16)
    pool = DeviceTier(host_memory(layout.nbytes), layout)
    labels = token_labels(range(32), GROUP.block_size)
    made = Cache(CacheConfig(host_capacity="64KiB", strict=True), CpuDevice(), pool)

    def ask() -> None:
        lease = made.fetch(b"space", labels, 32, 8)
        assert lease is not None
        assert made.drain(PATIENCE_S)
        made.commit(lease, 8)
        made.release(lease)
        assert made.drain(PATIENCE_S)

    lane = Lane("test", DeviceError)
    lane.submit(lambda job: (), 1).wait(PATIENCE_S)
    with closing(made), closing(lane):
        ask()
        made.clear()
        fork()
        fork(lambda: refuses(Closed, ask))
        fork(lambda: refuses(Closed, lambda: lane.submit(lambda job: (), 1)))
        fork(lambda: made.prefetch if lane.close() else sys.exit("it says that its thread hangs"))
        ask()
        job = lane.submit(lambda job: (), 1)
        assert job.wait(PATIENCE_S)
        assert job.succeeded


SCENARIOS = {each.__name__: each for each in (ring, slab, lock, killed, arena, cache)}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Fork(sys.argv[2]), Path(sys.argv[3]))
