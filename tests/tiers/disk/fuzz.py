"""Damages slabs at random and uses them, again and again; for ``test_fuzz``.

``python -m tests.tiers.disk.fuzz SEED VERIFY NUM_PARTS FIRST NUM`` runs the mutations ``FIRST`` to
``FIRST + NUM`` of a seed. A mutation follows from the seed and its own number alone, so that one
can be repeated.

The process prints the number of each mutation before it begins, so that the log of a dead process
names the one that killed it. The last line on stdout is the result, as JSON.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import io
import itertools
import json
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
from rich.console import Console

from kvtier.core.errors import CacheError
from kvtier.core.types import BlockKey, Slot
from kvtier.devices.base import Memory
from kvtier.layout import DType, full_attention
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskOptions, DiskSystem, IoKind
from kvtier.tiers.disk.inspect.check import check_slab
from kvtier.tiers.disk.inspect.report import report_slab
from kvtier.tiers.disk.io import IoEngine
from kvtier.tiers.disk.io.preadv import PreadvEngine
from kvtier.tools.cli import inspect, verify
from tests.tiers.disk import harness as disk_harness
from tests.tiers.disk.harness import SLOT_BYTES, Arena, Clock, Harness
from tests.tiers.disk.mutations import Damage, Files, mutate, not_closed

key = cache(disk_harness.key)
OK = Outcome.THERE
GROUP = full_attention(2, 2, 64, DType.FLOAT16, 4)
NUM_SLOTS = 6
NUMBERS = range(30)
"""Numbers of all blocks that are ever stored."""
DEADLINE_S = 60
"""For one mutation: it takes milliseconds."""
MEMORY_BYTES = 6 << 30
"""Address space of the process: an allocation of a size that a damaged file claims fails."""


class QuickDisk(DiskSystem):
    """Opens a cheap engine, and sometimes the one that the product uses."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def open_engine(
        self, fd: int, kind: IoKind, buffers: Sequence[Memory], queue_depth: int
    ) -> IoEngine:
        if self.rng.random() < 0.05:
            return super().open_engine(fd, kind, buffers, queue_depth)
        return PreadvEngine(fd, num_threads=1)


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """The files of the slabs at some time, with their modification times."""

    files: Files
    times: dict[str, int]


class Fuzzer:
    """Slabs in ``folder`` with a history; every mutation begins at some moment of it."""

    def __init__(self, folder: Path, verify: str, num_parts: int) -> None:
        self.folders = [folder / str(rank) for rank in range(num_parts)]
        self.system, self.arena, self.clock = QuickDisk(), Arena(16), Clock()
        self.options = DiskOptions(
            self.folders[0],
            NUM_SLOTS * SLOT_BYTES * num_parts,
            tuple(self.folders[1:]),
            verify=verify,  # type: ignore[arg-type]
            sample_every=3,
            bounce_bytes=2 * SLOT_BYTES * num_parts,
        )
        self.seen: collections.Counter[str] = collections.Counter()
        self.moments = self._live()

    def _live(self) -> list[Moment]:
        """Write every kind of record, close and crash in turn; return a moment after each."""
        moments: list[Moment] = []
        numbers = itertools.count()
        for is_closed in (True, False, True, True, False):
            here = self._open()
            for step in range(2):
                slots = here.allocate(3)
                wanted = [key(next(numbers)) for _ in slots]
                assert all(here.store(wanted, slots, namespace=bytes([step]) * 32))
                if step:
                    here.tier.forget(slots[:1])
                here.tier.free(slots)
            if len(moments) == 2:
                for part in here.tier.parts:
                    part.slab.compact()
            here.clock.now += 4000
            here.tier.close() if is_closed else here.crash()
            moments.append(self._take())
        assert next(numbers) == len(NUMBERS)
        return moments

    def _open(self) -> Harness:
        return Harness(self.options, GROUP, self.system, self.arena, self.clock)

    def _take(self) -> Moment:
        paths = {
            f"{rank}/{path.name}": path
            for rank, folder in enumerate(self.folders)
            for path in sorted(folder.iterdir())
            if path.name != "flock"
        }
        return Moment(
            {name: bytearray(path.read_bytes()) for name, path in paths.items()},
            {name: path.stat().st_mtime_ns for name, path in paths.items()},
        )

    # -- one mutation ------------------------------------------------------------------------------

    def run(self, seed: str) -> None:
        """Damage the slabs as ``seed`` determines, and use them in every way.

        Raises if a byte is wrong, or if an error other than a ``CacheError`` occurs.
        """
        rng = random.Random(seed)
        self.system.rng = rng
        moment = rng.choice(self.moments)
        others = [each.files for each in self.moments if each is not moment]
        files = {name: bytearray(content) for name, content in moment.files.items()}
        damage = mutate(rng, files, others)
        if self.options.verify != "always" and not damage.is_plain:
            # What looks as if it had been closed in order is believed.
            not_closed(files)
        self._put(damage, moment)
        try:
            self._look(rng)
            self._use(rng)
        except CacheError as error:
            if not str(error).isprintable():
                raise ValueError("a message that commands the terminal") from error
            self.seen["refused"] += 1
        else:
            self.seen["used"] += 1

    def _put(self, damage: Damage, moment: Moment) -> None:
        """Write the damaged files, and the others with their modification times at ``moment``."""
        for folder in self.folders:
            if (aside := folder.with_name(f"{folder.name} data")).exists():
                aside.replace(folder / "data.slab")  # it stays the file that it was
            for path in folder.iterdir():
                if f"{folder.name}/{path.name}" in damage.files or path.name == "flock":
                    continue
                path.replace(aside) if path.name == "data.slab" else path.unlink()
        for name, content in damage.files.items():
            path = self.folders[0].parent / name
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.pwrite(fd, content, 0)
                if name in damage.sizes:
                    os.ftruncate(fd, damage.sizes[name])
            finally:
                os.close(fd)
            if content == moment.files.get(name) and name not in damage.sizes:
                os.utime(path, ns=(moment.times[name], moment.times[name]))

    def _look(self, rng: random.Random) -> None:
        """Inspect and verify as the commands do. A slab that one refuses the other may accept."""
        folder = rng.choice(self.folders)
        console = Console(file=io.StringIO(), width=200)
        if rng.random() < 0.2:
            report = report_slab(folder, self.clock.now)
            json.dumps(dataclasses.asdict(report))
            inspect.show_slab(console, report, self.clock.now)
            self.seen["inspected"] += 1
        if rng.random() < 0.2:
            checked = check_slab(folder, rng.random() < 0.5, system=self.system)
            json.dumps(dataclasses.asdict(checked))
            verify.show_check(console, checked)
            self.seen["checked"] += 1

    def _use(self, rng: random.Random) -> None:
        here = self._open()
        try:
            found = self._claim(here, rng)
            here.tier.check_invariants()
            if rng.random() < 0.3:
                found |= self._store(here, rng)
                here.tier.close() if rng.random() < 0.5 else here.crash()
                here = self._open()
                again = self._claim(here, rng)
                assert found.keys() >= again.keys(), "blocks out of nowhere"
        finally:
            here.tier.close() if rng.random() < 0.5 else here.crash()

    def _claim(self, here: Harness, rng: random.Random) -> dict[BlockKey, Slot]:
        """Claim and load everything that may be there, in some order; ``load`` compares."""
        slots: dict[BlockKey, Slot] = {}
        for number in rng.sample(NUMBERS, len(NUMBERS)):
            if found := here.claim([key(number)]):
                slots[key(number)] = found[0]
        keys = list(slots)
        right: list[bool] = []
        while len(right) < len(keys):
            some = keys[len(right) :][: rng.randrange(1, NUM_SLOTS + 1)]
            results = here.load(some, [slots[each] for each in some])
            right += [result is OK for result in results]
        self.seen["right"] += sum(right)
        self.seen["lost"] += len(keys) - sum(right)
        here.tier.free(list(slots.values()))
        return dict(zip(keys, slots.values(), strict=True))

    def _store(self, here: Harness, rng: random.Random) -> dict[BlockKey, Slot]:
        """Store new blocks beside the recovered ones."""
        slots = here.allocate(min(rng.randrange(1, 4), here.tier.num_free))
        keys = [key(number) for number in rng.sample(NUMBERS, len(slots))]
        stored = here.store(keys, slots)
        results = here.load(keys, slots)
        assert [result is OK for result in results] == stored, "stored, and not there"
        here.tier.free(slots)
        return dict(zip(keys, slots, strict=True))


# -- as a process ----------------------------------------------------------------------------------


def control(name: str, number: int) -> None:
    """A deliberate fault that the fuzzer has to notice."""
    if name == "crash" and number == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang" and number == 3:
        time.sleep(1000)


def nothing_checked(trusted: npt.NDArray[np.bool_], *_: object) -> npt.NDArray[np.bool_]:
    return np.zeros_like(trusted)


def main() -> None:
    seed, verify_mode, num_parts, first, num = sys.argv[1:6]
    wanted = sys.argv[6] if len(sys.argv) > 6 else ""
    deadline_s = 1 if wanted == "hang" else DEADLINE_S
    logging.disable(logging.ERROR)  # damage is what this is about
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    disk_harness.block = cache(disk_harness.block)
    blind = mock.patch("kvtier.tiers.disk.part.choose", nothing_checked)
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVTIER_FUZZ_FOLDER")) as folder:
        fuzzer = Fuzzer(Path(folder), verify_mode, int(num_parts))
        with blind if wanted == "blind" else contextlib.nullcontext():
            for number in range(int(first), int(first) + int(num)):
                os.write(1, b"%d\n" % number)
                faulthandler.dump_traceback_later(deadline_s, exit=True)
                control(wanted, number)
                fuzzer.run(f"{seed} {verify_mode} {num_parts} {number}")
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps(fuzzer.seen))


if __name__ == "__main__":
    main()
