"""The rules of every I/O engine, for engines that reach accelerator memory, over strict fakes.

Each test also fails if its fake saw a call that hardware might punish, or a resource that was not
released.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.devices.base import Memory
from kvtier.testing import host_memory
from kvtier.tiers.disk.io import IoEngine
from tests.devices.drivers import make_device
from tests.kit.fakes.storage import StorageFake
from tests.tiers.disk import test_io as rules
from tests.tiers.disk.direct_harness import PAGE, WAYS, open_direct
from tests.tiers.disk.test_io import (  # noqa: F401 - run here, with the fixtures of this module
    test_a_deadline_in_the_middle_loses_no_buffer,
    test_bytes_are_right_both_ways,
    test_closed_engine_says_so,
    test_end_of_the_file_is_told_per_block,
    test_errors_are_told_per_block,
    test_findings_name_the_engine,
    test_memory_that_is_not_there_fails_its_block_only,
    test_no_blocks_and_empty_blocks_are_nothing,
    test_nothing_is_begun_after_the_deadline,
    test_one_reads_while_another_writes,
    test_what_direct_io_can_not_move_is_refused,
)

_seeds = itertools.count()


@pytest.fixture(autouse=True)
def memories(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    """List of all memory that a test makes; it counts as the accelerator's."""
    made: list[Memory] = []

    def make(nbytes: int) -> Memory:
        made.append(host_memory(nbytes))
        return made[-1]

    monkeypatch.setattr(rules, "host_memory", make)
    return made


@pytest.fixture
def place(tmp_path: Path) -> Iterator[rules.Place]:
    made = rules.Place(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    yield made
    os.close(made.fd)


@pytest.fixture(params=[*WAYS, "cufile113-batch bounced", "cufile115-batch bounced"])
def opened(request: pytest.FixtureRequest, memories: list[Memory]) -> Iterator[rules.Open]:
    name, _, bounced = request.param.partition(" ")
    fake_name, way = WAYS[name]
    fake, seed = StorageFake(fake_name), next(_seeds)
    fake.reset_storage(seed, 20 * (seed % 3), 20 * (seed % 2), bool(bounced))
    device = make_device(fake)
    engines: list[IoEngine] = []

    def make(fd: int, *arguments: object, **named: object) -> IoEngine:
        """Open an engine over ``fd`` with all of the test's memory registered."""
        del arguments, named
        buffers = []
        for memory in memories:
            begin = memory.address + -memory.address % PAGE
            nbytes = (memory.nbytes - (begin - memory.address)) // PAGE * PAGE
            fake.adopt(begin, nbytes)
            buffers.append(Memory(begin, nbytes, "fake", memory.owner))
        engines.append(open_direct(fake, device, fd, buffers, way))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    device.close()
    assert fake.violations == []
    assert fake.storage_leaks == []
    assert fake.leaks == []
