"""Ends of the process or the power: acknowledged blocks are there, and no byte is wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.types import Slot
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskSystem
from tests.tiers.disk.crashing_disk import CrashingDisk, crashes
from tests.tiers.disk.faulty_disk import FaultyDisk
from tests.tiers.disk.harness import SLOT_BYTES, Harness, harness, key
from tests.tiers.disk.lossy_disk import LossyDisk

OK, CORRUPT = Outcome.THERE, Outcome.DAMAGED
NUM_KILLS = int(os.environ.get("KVTIER_NUM_KILLS", "200"))
NUM_SLOTS = 24
MAX_NUMBERS = 400
"""No block of these tests has a higher number; one that was forgotten may come back."""


def churn(here: Harness, rng: random.Random, num_batches: int, known: dict[int, Slot]) -> None:
    """Store batches, overwrite, forget.

    known: acknowledged blocks, which have to be found. Always up to date, also after an
    interruption.
    """
    number = max(known, default=0)
    for _ in range(num_batches):
        wanted = rng.randint(1, 6)
        while here.tier.num_free - here.tier.slots.num_unclaimed < wanted:
            victim = rng.choice(sorted(known))
            slot = known.pop(victim)
            if rng.random() < 0.3:
                here.tier.forget([slot])
            here.tier.free([slot])
        slots = here.allocate(wanted)
        numbers = range(number + 1, number + 1 + wanted)
        number += wanted
        assert number < MAX_NUMBERS
        stored = here.store([key(number) for number in numbers], slots)
        for each, slot, ok in zip(numbers, slots, stored, strict=True):
            if ok:
                known[each] = slot
            else:
                here.tier.free([slot])


def claim_all(here: Harness, known: dict[int, Slot]) -> None:
    """Check that every acknowledged block is in its slot, with the right bytes.

    Other recovered blocks have to be right, too. Leaves exactly the known blocks in use.
    """
    in_use: list[Slot] = []
    for number, slot in sorted(known.items()):
        assert here.claim([key(number)]) == [slot], f"block {number} is lost"
        assert here.load([key(number)], [slot]) == [OK], f"block {number} is damaged"
        in_use.append(slot)
    for number in range(MAX_NUMBERS):
        if slots := here.claim([key(number)]):
            here.load([key(number)], slots)
            here.tier.free(slots)
    assert here.tier.slots.num_unclaimed == 0, "blocks that nobody ever stored"
    here.tier.check_invariants()
    assert here.tier.num_free == here.tier.num_slots - len(in_use)


# -- every single step -----------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["process", "power"])
def test_crash_at_every_step_of_a_life(tmp_path: Path, durability: str) -> None:
    """Crash at each operation of making, storing, compacting, closing and opening, in turn."""
    known: dict[int, Slot] = {}

    def life(here: Harness) -> None:
        here.tier.parts[0].slab.compact_floor = 4
        churn(here, random.Random(1), 8, known)
        here.reopen()
        claim_all(here, known)
        churn(here, random.Random(2), 2, known)

    at, has_crashed = 0, True
    while has_crashed:
        at += 1
        known.clear()
        folder = tmp_path / str(at)
        has_crashed = crashes(folder, 8, CrashingDisk(at), life, durability=durability)
        with harness(folder, 8, durability=durability) as here:
            claim_all(here, known)
    assert at > 30, "the life was too short to be interesting"


class BusyDisk(DiskSystem):
    """Runs a function while a new journal is being synced."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] | None = None

    def sync(self, fd: int) -> None:
        if self.meanwhile and os.readlink(f"/proc/self/fd/{fd}").endswith("journal.new"):
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        super().sync(fd)


def test_what_is_appended_while_the_journal_is_compacted_is_not_lost(tmp_path: Path) -> None:
    system = BusyDisk()
    with harness(tmp_path, 8, system=system) as here:
        slots = here.put(1, 2, 3)
        more = here.allocate(1)

        def meanwhile() -> None:
            here.tier.forget(slots[1:2])
            assert here.store([key(4)], more, namespace=b"m" * 32) == [True]

        system.meanwhile = meanwhile
        here.tier.parts[0].slab.compact()
        assert system.meanwhile is None
        here.tier.forget(slots[2:])
        here.crash()
        here.open()
        assert here.get(1, 2, 3, 4) == [OK, CORRUPT, CORRUPT, OK]
        here.tier.check_invariants()


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_compaction_that_fails_leaves_the_journal_as_it_was(tmp_path: Path, operation: str) -> None:
    system = FaultyDisk()
    with harness(tmp_path, 8, system=system) as here:
        for number in range(3):
            here.tier.forget(here.put(number))
        here.tier.parts[0].slab.compact_floor = 1
        slots = here.allocate(1)
        # After the append of the block's record comes the new journal.
        if operation == "write":
            system.fail("journal", 2)
        else:
            system.fail("sync")
        assert here.store([key(10)], slots) == [True]
        assert (here.options.path / "journal.new").stat().st_size == 0
        assert here.tier.parts[0].slab.superblock.generation == 0
        here.put(11)
        here.crash()
        here.open()
        assert here.get(10, 11) == [OK, OK]


# -- power cuts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["power", "process"])
@given(seed=st.integers(0, 2**32))
def test_power_cut_makes_no_block_wrong_and_in_power_mode_loses_none(
    tmp_path_factory: pytest.TempPathFactory, seed: int, durability: str
) -> None:
    """One slab, or two that lose different writes."""
    folder = tmp_path_factory.mktemp("slab")
    rng = random.Random(seed)
    system = LossyDisk()
    known: dict[int, Slot] = {}
    verify = rng.choice(["always", "sampled", "off"])
    num_parts = rng.choice([1, 1, 2])
    with harness(folder, 8, num_parts, system=system, durability=durability, verify=verify) as here:
        here.tier.parts[0].slab.compact_floor = rng.choice([4, 1000])
        for _ in range(3):
            churn(here, rng, rng.randint(1, 6), known)
            here.crash()
            system.power_cut(rng)
            here.open()
            if durability == "power":
                claim_all(here, known)
                continue
            for number in range(MAX_NUMBERS):
                if slots := here.claim([key(number)]):
                    if here.load([key(number)], slots) == [OK]:
                        known[number] = slots[0]
                    else:
                        known.pop(number, None)
                        here.tier.free(slots)
                else:
                    known.pop(number, None)
            here.tier.check_invariants()


def test_the_power_cut_of_these_tests_does_lose_blocks(tmp_path: Path) -> None:
    """A control: without it, the tests above would pass with a disk that loses nothing."""
    lost = wrong = 0
    for seed in range(10):
        rng, system, known = random.Random(seed), LossyDisk(), dict[int, Slot]()
        with harness(tmp_path / str(seed), 8, system=system) as here:
            churn(here, rng, 4, known)
            here.crash()
            system.power_cut(rng)
            here.open()
            for number in known:
                slots = here.claim([key(number)])
                lost += not slots
                wrong += bool(slots) and here.load([key(number)], slots) == [CORRUPT]
    assert lost > 0
    assert wrong > 0


# -- kill ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_parts", "num_kills"), [(1, NUM_KILLS), (2, NUM_KILLS // 4)])
def test_killed_at_any_time_keeps_what_it_acknowledged(
    tmp_path: Path, num_parts: int, num_kills: int
) -> None:
    """A writer in a process of its own is killed again and again, at any point."""
    seed = random.randrange(2**32)
    print(f"seed {seed}, {num_kills} kills")
    rng = random.Random(seed)
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.tiers.disk.writer", str(tmp_path)]
        + [str(each) for each in (NUM_SLOTS, num_parts, seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    known: dict[int, Slot] = {}
    num_acknowledged = 0
    with writer:
        for kill in range(num_kills):
            # Each line starts a writer; it prints its process id, then the blocks stored and freed.
            writer.stdin.write(f"{kill} {max(known, default=0)}\n".encode())
            writer.stdin.flush()
            number = int(writer.stdout.readline())
            lines = []
            if rng.random() < 0.75:  # else it may be killed while it opens the slab
                lines.append(writer.stdout.readline())
            time.sleep(rng.random() ** 2 * 0.12)
            os.kill(number, signal.SIGKILL)
            for line in chain(lines, iter(writer.stdout.readline, b"killed\n")):
                assert line, "the writer ended by itself"
                if not line.endswith(b";\n"):
                    continue  # it was killed while it wrote this line, which does not count
                verb, block, slot = line.rstrip(b";\n").split()
                if verb == b"stored":
                    known[int(block)] = Slot(int(slot))
                    num_acknowledged += 1
                else:
                    known.pop(int(block), None)
            with harness(tmp_path, NUM_SLOTS, num_parts) as here:
                claim_all_but_in_doubt(here, known)
        writer.stdin.close()
    assert num_acknowledged > num_kills // 2, "hardly anything was stored before the kills"


def claim_all_but_in_doubt(here: Harness, known: dict[int, Slot]) -> None:
    """As ``claim_all``; every block that is found stays for the next writer, as known."""
    for number, slot in sorted(known.items()):
        assert here.claim([key(number)]) == [slot], f"block {number} is lost"
        assert here.load([key(number)], [slot]) == [OK], f"block {number} is damaged"
    for number in range(max(known, default=0) + 40):
        if slots := here.claim([key(number)]):
            assert here.load([key(number)], slots) == [OK], f"block {number} is damaged"
            known[number] = slots[0]
    here.tier.check_invariants()
    assert here.tier.slots.num_unclaimed == 0
    assert here.tier.num_free == here.tier.num_slots - len(known)
    assert (here.options.path / "data.slab").stat().st_size == NUM_SLOTS * SLOT_BYTES
