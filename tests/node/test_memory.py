"""Segments and slots of one block size, against a model."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.errors import ConfigError
from kvtier.core.system import landlock
from kvtier.core.system.landlock import can_forbid_truncation, open_untruncatable
from kvtier.core.types import Slot
from kvtier.devices.cpu import CpuDevice
from kvtier.node.server import memory as memory_module
from kvtier.node.server.memory import NodeMemory, SegmentTier
from tests.node.harness import bare, local_node

SEGMENT = 4096
NUM_SEGMENTS = 6
numbers = count()


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeMemory]:
    folder = tmp_path_factory.mktemp("memory")
    memory = NodeMemory(folder, NUM_SEGMENTS * SEGMENT, SEGMENT, CpuDevice())
    yield memory
    memory.close()


@given(block_bytes=st.integers(1, SEGMENT))
def test_no_slot_crosses_the_end_of_a_segment(memory: NodeMemory, block_bytes: int) -> None:
    tier = SegmentTier(memory, f"room {next(numbers)}", block_bytes, 8)
    seen: set[int] = set()
    for segment in range(NUM_SEGMENTS):
        for slot in tier.slots_of(segment):
            assert segment * SEGMENT <= slot * block_bytes
            assert (slot + 1) * block_bytes <= (segment + 1) * SEGMENT
            assert slot not in seen
            assert 0 <= slot < tier.num_slots
            seen.add(slot)
        assert len(tier.slots_of(segment)) >= SEGMENT // block_bytes - 1
    tier.close()


@given(block_bytes=st.sampled_from([700, 1024, 1500, 4096]), data=st.data())
def test_slots_agree_with_a_model(
    memory: NodeMemory, block_bytes: int, data: st.DataObject
) -> None:
    tier = SegmentTier(memory, f"room {next(numbers)}", block_bytes, 8)
    opened: set[int] = set()
    retired: set[int] = set()
    used: dict[Slot, int] = {}  # slot: generation
    last = np.zeros(tier.num_slots, np.int64)
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["add", "retire", "allocate", "free", "take_empty"])):
            case "add" if left := set(range(NUM_SEGMENTS)) - opened - retired:
                segment = data.draw(st.sampled_from(sorted(left)))
                tier.add(segment)
                opened.add(segment)
            case "retire" if opened:
                segment = data.draw(st.sampled_from(sorted(opened)))
                tier.retire(segment)
                opened.remove(segment)
                retired.add(segment)
            case "allocate":
                num = data.draw(st.integers(0, 6))
                free = {slot for each in opened for slot in tier.slots_of(each)} - used.keys()
                assert tier.num_free == len(free)
                slots = tier.allocate(num)
                assert (slots is None) == (num > len(free))
                for slot in slots or ():
                    assert slot in free
                    free.remove(slot)
                    assert tier.generations[slot] > last[slot], "a slot is told from its last use"
                    assert tier.generations[slot] % 2 == 1
                    used[slot] = int(tier.generations[slot])
                    last[slot] = used[slot]
            case "free" if used:
                some = data.draw(st.lists(st.sampled_from(sorted(used)), unique=True, max_size=6))
                tier.free(some)
                for slot in some:
                    assert tier.generations[slot] > used[slot]
                    assert tier.generations[slot] % 2 == 0, "it is free"
                    del used[slot]
            case "take_empty":
                full = set(tier.segments_of(np.array([*used], np.int64)).tolist())
                empty = tier.take_empty()
                assert set(empty) == retired - full
                retired.difference_update(empty)
        tier.check_invariants()
        assert tier.num_used == len(used)
        assert set(tier.segments) == opened
        assert set(tier.retired_segments) == retired
        for slot, generation in used.items():
            assert tier.generations[slot] == generation
    tier.close()


def test_slot_is_odd_while_it_is_allocated_whatever_its_generation_was(memory: NodeMemory) -> None:
    """A record of an even generation would never count."""
    tier = SegmentTier(memory, "room with damage", 1024, 8)
    tier.add(0)
    tier.generations[:2] = 6, 7
    slots = tier.allocate(2)
    assert slots is not None
    assert tier.generations[list(slots)].tolist() == [7, 9]
    tier.close()


def test_generations_can_be_read_but_not_changed_by_others(memory: NodeMemory) -> None:
    """An engine gets the descriptor: it must neither write, nor make the node fault."""
    tier = SegmentTier(memory, "room", 1024, 8)
    size = max(8 * tier.num_slots, mmap.PAGESIZE)
    tier.add(0)
    slots = tier.allocate(2)
    assert slots is not None
    seen = np.frombuffer(mmap.mmap(tier.fd, size, mmap.MAP_SHARED, mmap.PROT_READ), np.int64)
    assert (seen[list(slots)] == tier.generations[list(slots)]).all()
    with pytest.raises(PermissionError):
        mmap.mmap(tier.fd, size)
    with pytest.raises(OSError):
        os.ftruncate(tier.fd, 0)
    with pytest.raises(OSError):
        os.pwrite(tier.fd, b"x", 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(tier.fd, 1033, 2)
    tier.close()


@pytest.mark.skipif(not can_forbid_truncation(), reason="this kernel has no such Landlock")
def test_an_engine_can_not_truncate_the_memory(tmp_path: Path) -> None:
    """The node, and others that copy, would end with SIGBUS."""
    with local_node(tmp_path) as node, bare(node.config.socket) as engine:
        num_bytes = engine.attach().memory_bytes
        (fd,) = engine.fds
        for size in 0, num_bytes // 2, num_bytes + mmap.PAGESIZE:
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with mmap.mmap(fd, num_bytes) as mapped:
            mapped[:4] = b"data"
        assert os.pread(node.node.memory.fd, 4, 0) == b"data"
        os.ftruncate(node.node.memory.fd, num_bytes)


def test_thread_that_opens_an_untruncatable_file_restricts_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    before = privileges()
    os.close(open_untruncatable(str(path)))
    os.truncate(path, 3)
    assert path.read_bytes() == b"con"
    assert privileges() == before


def privileges() -> str:
    """Return whether this thread may gain privileges by exec."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("NoNewPrivs"))


def test_engines_attach_where_the_kernel_can_not_forbid_truncation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(landlock, "CREATE_RULESET", -1)
    monkeypatch.setattr(
        memory_module, "can_forbid_truncation", landlock.can_forbid_truncation.__wrapped__
    )
    with local_node(tmp_path) as node, bare(node.config.socket) as engine:
        num_bytes = engine.attach().memory_bytes
        mmap.mmap(engine.fds[0], num_bytes).close()
        assert "truncating its memory" in caplog.text


def test_block_that_is_too_large_or_too_small_is_refused(memory: NodeMemory) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        SegmentTier(memory, "room", SEGMENT + 1, 8)
    sparse = object.__new__(NodeMemory)
    sparse.num_bytes, sparse.segment_bytes = 1 << 40, 1 << 30
    with pytest.raises(ConfigError, match="too small"):
        SegmentTier(sparse, "room", 100, 8)


def test_segments_are_lent_lowest_first(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path / "memory", 4 * SEGMENT, SEGMENT, CpuDevice())
    tier = SegmentTier(memory, "room", 1024, 8)
    assert [memory.take(tier) for _ in range(5)] == [0, 1, 2, 3, None]
    memory.give_back(2)
    memory.give_back(1)
    assert memory.take(tier) == 1
    tier.close()
    memory.close()
