"""Memory of a node that was killed: what the next one takes over, and what it keeps aside."""

from __future__ import annotations

import json
import mmap
import os
import signal
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import shake_128
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.core.system.private_files import read_checked_file, replace_checked_file
from kvtier.devices.cpu import CpuDevice
from kvtier.node.server import records
from kvtier.node.server.node import CacheNode
from kvtier.node.server.partition import Partition
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.wire import protocol
from tests.kit.waiting import wait_until
from tests.node.harness import BLOCK, SCOPE, bare, config_of, keys, node_process, opened
from tests.node.test_engines import store
from tests.node.using import using

NUM = 64
"""Slots of the memory."""


def content_of(key: bytes) -> bytes:
    return shake_128(key).digest(64) * (BLOCK // 64)


class Harness:
    """A node in this process that "crashes": it is left as it is, and never closed."""

    def __init__(self, folder: Path, group_bytes: int = 0, **options: Any) -> None:
        self.folder, self.options = folder, options
        self._key = PartitionKey("", SCOPE, BLOCK, 8, group_bytes)
        self.made: list[CacheNode] = []
        self.start()

    def start(self) -> None:
        self.node = CacheNode(config_of(self.folder, **self.options), CpuDevice())
        self.made.append(self.node)

    @property
    def partition(self) -> Partition:
        number, _ = opened(self.node, self._key)
        partition = self.node.partition_of(number, "default")
        assert partition is not None
        return partition

    @property
    def memory(self) -> mmap.mmap:
        owner = self.node.memory.memory.owner
        assert isinstance(owner, mmap.mmap)
        return owner

    def write(self, slot: int, content: bytes) -> None:
        self.memory[slot * BLOCK : (slot + 1) * BLOCK] = content

    def read(self, slot: int) -> bytes:
        return self.memory[slot * BLOCK : (slot + 1) * BLOCK]

    def store(self, *numbers: int) -> list[int]:
        """Store blocks. Return their slots."""
        reserved = self.partition.reserve([keys(number) for number in numbers])
        assert reserved is not None
        for key, slot in zip(reserved.keys, reserved.slots, strict=True):
            self.write(slot, content_of(key))
        self.partition.cache.commit(reserved.keys, list(range(len(reserved.keys))))
        return list(reserved.slots)

    def seal(self) -> None:
        wait_until(lambda: self.node.records.is_idle)

    def kill(self) -> None:
        """Leave everything as if this node's process had been killed."""
        locks = self.node.memory._locks
        while locks:
            os.close(locks.popitem()[1]._fd)
        self.node.records.close()

    def crash(self) -> None:
        """Let the next node begin, as if this one's process had been killed."""
        self.kill()
        self.start()

    def found(self, *numbers: int) -> list[int]:
        """Verify everything; return those of the blocks that are there, with the right bytes."""
        partition = self.partition
        wait_until(lambda: self.node.poll() or not self.node.num_unverified)
        wanted = [keys(number) for number in numbers]
        there = []
        for number, key in zip(numbers, wanted, strict=True):
            found = partition.locate([key]).ready
            if found:
                slots = partition.lease(found)
                assert self.read(int(slots[0])) == content_of(key), "wrong bytes"
                partition.end_leases(slots)
                there.append(number)
        self.node.check_invariants()
        return there


@contextmanager
def harness(folder: Path, **options: Any) -> Iterator[Harness]:
    made = Harness(folder, **options)
    try:
        yield made
        made.node.check_invariants()
    finally:
        for node in made.made:
            node.close()


def test_blocks_with_a_checksum_are_taken_over(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        here.store(*range(20))
        here.seal()
        here.crash()
        assert here.node.num_aside == 0
        assert here.found(*range(21)) == list(range(20))
        here.store(20, 21)
        here.seal()
        here.crash()
        assert here.found(*range(23)) == list(range(22)), "and again"
        here.store(*range(100, 100 + NUM))
        assert len(here.found(*range(100, 100 + NUM))) == NUM, "all slots can be used"


def test_blocks_of_all_groups_are_taken_over(tmp_path: Path) -> None:
    """The last four bytes of a key name the group."""
    blocks = [place + (group << 32) for place in range(8) for group in range(2)]
    with harness(tmp_path, group_bytes=4) as here:
        here.store(*blocks)
        here.seal()
        here.crash()
        assert here.found(*blocks, 8) == blocks


def test_memory_that_an_earlier_node_wrote_is_taken_over(tmp_path: Path) -> None:
    """``memory.zip`` has its files: blocks 0 to 19, of which 7 was deleted."""
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    with zipfile.ZipFile(Path(__file__).with_name("memory.zip")) as archive:
        archive.extractall(memory)
    header = memory / records.FOLDER / records.HEADER
    content = json.loads(read_checked_file(header))
    content["boot"] = records.BOOT_ID.read_text().strip()  # it was another machine
    content["inode"] = (memory / "memory").stat().st_ino
    replace_checked_file(header, json.dumps(content))
    with harness(tmp_path) as here:
        assert here.found(*range(21)) == [each for each in range(20) if each != 7]


def test_block_without_a_checksum_is_dropped(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        here.store(1, 2)
        here.seal()
        here.node.records.close()
        here.store(3)
        here.crash()
        assert here.found(1, 2, 3) == [1, 2]


def test_block_whose_bytes_changed_is_dropped(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        slots = here.store(1, 2, 3)
        here.seal()
        here.write(slots[1], bytes(BLOCK))
        here.crash()
        assert here.found(1, 2, 3) == [1, 3]


def test_deleted_and_evicted_blocks_do_not_come_back(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        here.store(*range(6))
        here.seal()
        leased = here.partition.lease(here.partition.locate([keys(0)]).ready)
        here.partition.delete([keys(0), keys(1)])
        here.partition.distrust_slots(here.partition.lease(here.partition.locate([keys(2)]).ready))
        here.crash()
        assert here.found(*range(6)) == [3, 4, 5]
        assert len(leased) == 1
        for _ in here.partition.evict_all():
            pass
        here.crash()
        assert here.found(*range(6)) == []


def test_block_that_is_deleted_while_its_record_is_written_does_not_come_back(
    tmp_path: Path,
) -> None:
    """Its record comes after the deletion, and is of a generation that is over."""
    with harness(tmp_path) as here:
        rows = here.partition.tier.rows
        (slot,) = here.store(1)
        here.partition.lease(here.partition.locate([keys(1)]).ready)
        before = rows.generations[[slot]]
        here.seal()
        here.partition.delete([keys(1)])
        rows.write(
            np.array([slot]),
            before,
            np.frombuffer(keys(1), "V8"),
            np.zeros(1, np.int64),
            here.partition.kept._slots.crcs(np.array([slot])),
        )
        here.crash()
        assert here.found(1) == []


def test_unverified_block_can_be_stored_anew_and_deleted(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        here.store(1, 2, 3)
        here.seal()
        here.crash()
        partition = here.partition
        assert here.node.num_unverified == 3
        here.store(1)
        partition.delete([keys(2)])
        assert here.found(1, 2, 3) == [1, 3]
        here.crash()
        for _ in here.partition.delete_all():
            pass
        assert here.found(1, 2, 3) == []


# -- every step ------------------------------------------------------------------------------------


class Stop(BaseException):
    """The node is killed here."""


def test_every_step_of_a_crash_leaves_right_blocks(tmp_path: Path) -> None:
    """Crash before each store to the files and the arena, in an order that a node has."""
    step = 0
    is_over = False
    kept = 0
    while not is_over:
        step += 1
        folder = tmp_path / str(step)
        with harness(folder) as here:
            here.store(*range(100, 100 + NUM))  # full: every store evicts
            here.seal()
            rows, partition = here.partition.tier.rows, here.partition
            stops = Steps(step)
            _watch(here, stops)
            try:
                here.store(1, 2)
                _write_records(here, rows, stops)
                partition.delete([keys(1)])
                here.store(3)
                _write_records(here, rows, stops)
                is_over = True
            except Stop:
                pass
            stops.is_on = False
            here.crash()
            numbers = [1, 2, 3, *range(100, 100 + NUM)]
            found = here.found(*numbers)
            assert len(found) >= NUM - 4, "only what was being replaced is lost"
            if stops.is_deleted:
                assert 1 not in found
            kept += len(found)
            here.store(*range(200, 200 + NUM))
            assert len(here.found(*range(200, 200 + NUM))) == NUM, "no slot is lost"
    assert step > 12, "there was little to stop at"


class Steps:
    """Raises ``Stop`` at the n-th step."""

    def __init__(self, num: int) -> None:
        self.left, self.is_on, self.is_deleted = num, True, False

    def __call__(self) -> None:
        if self.is_on:
            self.left -= 1
            if not self.left:
                raise Stop


class Watched(np.ndarray):
    """Rows whose stores are steps: one before, and one in the middle."""

    steps: Steps | None = None

    def __setitem__(self, at: Any, value: Any) -> None:
        plain = self.view(np.ndarray)
        if self.steps is None or not isinstance(at, np.ndarray):
            plain[at] = value
            return
        self.steps()
        half = len(at) // 2
        values = np.broadcast_to(np.asarray(value, plain.dtype), (len(at),))
        plain[at[:half]] = values[:half]
        self.steps()
        plain[at[half:]] = values[half:]


def _watch(here: Harness, steps: Steps) -> None:
    tier, partition = here.partition.tier, here.partition
    for name in "generations", "users", "records":
        watched = getattr(tier.rows, name).view(Watched)
        watched.steps = steps
        setattr(tier.rows, name, watched)
    tier.generations, tier.users = tier.rows.generations, tier.rows.users
    here.node.records.close()  # records are written by the test, step by step
    plain, delete = here.write, partition.delete

    def write(slot: int, content: bytes) -> None:
        steps()
        plain(slot, bytes(BLOCK // 2) + content[BLOCK // 2 :])
        steps()
        plain(slot, content)

    def deleted(keys: Sequence[bytes]) -> None:
        delete(keys)
        steps.is_deleted = True
        steps()

    here.write = write  # type: ignore[method-assign]
    partition.delete = deleted  # type: ignore[method-assign]


def _write_records(here: Harness, rows: Any, steps: Steps) -> None:
    writer = here.node.records
    writer._is_wanted = True
    while writer._waiting:
        steps()
        writer._write(writer._waiting.popleft())


# -- engines of before -----------------------------------------------------------------------------


def stored_and_sealed(node: Any, *numbers: int) -> None:
    """Store blocks in a node's process, as an engine that has ended since."""
    with bare(node.socket) as engine:
        partition = engine.enter("first", client="first")
        for number in numbers:
            store(engine, partition, keys(number))
        engine.send(protocol.DetachNotice())
        assert engine.is_closed()


def num_free(socket: Path) -> int:
    """Return how many slots can be had. They are given back."""
    with bare(socket) as engine:
        partition = engine.enter("last", client="last")
        found = b"".join(
            engine.ask(protocol.ReserveRequest(3, partition, keys(1000 + at))).slots
            for at in range(NUM)
        )
        engine.send(protocol.AbortNotice(partition, found), protocol.DetachNotice())
        assert engine.is_closed()
        return len(protocol.unpack(found))


@pytest.mark.parametrize("end", ["kill", "unmap"])
@pytest.mark.parametrize("kind", ["reserve", "lease"])
def test_slots_of_a_stopped_engine_stay_aside_until_it_lets_go(
    tmp_path: Path, kind: str, end: str
) -> None:
    with node_process(tmp_path) as node:
        if kind == "lease":
            stored_and_sealed(node, 1, 2, 3)
        with using(node.socket, f"{kind} 1 2 3") as engine:
            assert len(engine.slots) == 3
            engine.send_signal(signal.SIGSTOP)
            node.kill()
            node.start()
            _wait_for(node.socket, NUM - 3)
            engine.send_signal(signal.SIGCONT)
            if kind == "reserve":
                engine.do("write")  # to slots that no other engine has
            assert num_free(node.socket) == NUM - 3
            if end == "unmap":
                engine.do("unmap")
            else:
                engine.kill()
                engine.wait()
            _wait_for(node.socket, NUM)


def _wait_for(socket: Path, num: int) -> None:
    def is_there() -> bool:
        with suppress(OSError):
            return num_free(socket) == num
        return False

    wait_until(is_there, f"{num} slots are free", 20)


# -- other memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"segment_capacity": "128KiB"}, "the configuration wants 8 of 131072"),
        ({"host_capacity": "2MiB"}, "the configuration wants 32 of 65536"),
    ],
)
def test_memory_of_another_shape_is_lost_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, str], reason: str
) -> None:
    with harness(tmp_path) as here:
        here.store(1)
        here.seal()
        here.options = options
        here.crash()
        assert reason in caplog.text
        assert here.found(1) == []
        here.store(2)
        assert here.found(2) == [2]


def test_memory_is_not_taken_over_while_a_slab_is_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reads of a dead process may still be in flight into the memory."""
    monkeypatch.setattr(records, "IO_END_S", 0.2)
    with harness(tmp_path, disk_path=str(tmp_path / "disk"), disk_capacity="1MiB") as here:
        here.store(1)
        here.seal()
        (data,) = (tmp_path / "disk").rglob("data.slab")
        assert not records._is_unused(data)
        here.crash()
        assert "may be in flight still" in caplog.text
        assert not here.node.kept_partitions
