"""Core dumps exclude memory from which prompts can be read."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.cache.transfer.ring import Ring
from kvtier.core import hot
from kvtier.core.keys import token_labels
from kvtier.core.types import DEVICE, Slot
from kvtier.devices.cpu import CpuDevice
from kvtier.index.native_index import NativeIndex
from kvtier.layout import DType, full_attention, named_layout
from kvtier.testing import host_memory
from kvtier.tiers import ArenaOptions, DeviceTier, HostTier
from kvtier.tiers.disk.bounce import Bounce
from kvtier.tiers.remote.bounce_workers import BounceRows
from tests.kit.smaps import is_dumped, mappings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="VmFlags is of Linux")

GROUP = full_attention(1, 1, 96, DType.FLOAT16, 8)
"""Blocks of 3 KiB: the tier's memory does not end at a page boundary."""


def test_ordinary_memory_is_dumped() -> None:
    """Negative control: the flag is neither missing nor set everywhere."""
    memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    assert is_dumped(np.frombuffer(memory, np.uint8).ctypes.data, len(memory))


@pytest.mark.parametrize("is_shared", [False, True])
def test_host_tier_is_left_out(tmp_path: Path, is_shared: bool) -> None:
    options = ArenaOptions(file=tmp_path / "arena" if is_shared else None)
    tier = HostTier(GROUP, 10 * GROUP.bytes_per_block, CpuDevice(), options)
    assert not is_dumped(tier.memory.address, tier.memory.nbytes)
    tier.close()


def test_large_host_tier_is_left_out_as_a_whole() -> None:
    options = ArenaOptions(at_once_bytes=0, first_bytes=1, segment_bytes=24 << 10)
    tier = HostTier(GROUP, 30 * GROUP.bytes_per_block, CpuDevice(), options)
    assert not is_dumped(tier.memory.address, tier.memory.nbytes)
    tier.close()


def test_buffers_that_blocks_pass_through_are_left_out() -> None:
    layout = named_layout("layer_first", GROUP, 4)
    ring = Ring(DeviceTier(host_memory(layout.nbytes), layout), CpuDevice())
    for each in (Bounce(3, 8192), Bounce(600, 8192), BounceRows(5, 3000), ring.tier):
        assert not is_dumped(each.memory.address, each.memory.nbytes)
    ring.close()


@pytest.mark.skipif(not hot.NATIVE, reason="the Python twin keeps labels as objects")
@pytest.mark.parametrize("block_size", [16, 64])
def test_token_ids_in_the_index_are_left_out(block_size: int) -> None:
    """Short labels are in a node's row, long ones in an arena of their own."""
    tokens = np.random.default_rng(block_size).integers(1 << 30, 1 << 31, block_size)
    labels = token_labels(tokens, block_size)
    index = NativeIndex({DEVICE: "lru"})
    index.insert(b"n", labels, DEVICE, [Slot(0)], 0.0)
    assert _is_left_out(labels[0]), "no copy of the label is in memory that is left out"


def _is_left_out(content: bytes) -> bool:
    """Whether ``content`` is found in memory that core dumps exclude."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for mapping in mappings():
            if mapping.is_dumped or not mapping.mode.startswith("rw"):
                continue
            memory.seek(mapping.start)
            if content in memory.read(mapping.end - mapping.start):
                return True
    return False
