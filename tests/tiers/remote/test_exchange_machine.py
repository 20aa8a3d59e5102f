"""The exchange of manifests, against a model of the blocks that every process must find."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from zlib import crc32

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvtier.testing.storage_user import stored_key
from kvtier.tiers.remote.bucket import manifest_sync, merging
from kvtier.tiers.remote.bucket.manifests import Manifest, Pack, manifest_path
from kvtier.tiers.remote.bucket.object_store import Listed
from kvtier.tiers.remote.envelope import as_keys
from kvtier.tiers.remote.errors import Unreachable
from tests.tiers.remote.test_merging import BLOCK_BYTES, POLL_S, MemoryStore, Process, small_merges

MAX_ENTRIES = 6
whiches = st.integers(0, 9)
troubles = st.sampled_from(["not sent", "not answered", "asleep"])


class Line(MemoryStore):
    """The way of one process to the store, whose servers' clocks differ.

    trouble: number of requests before the one that fails or lasts until ``awake``, and how.
    asked: verbs of the requests.
    """

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self.objects, self.store = store.objects, store
        self.trouble = -1, ""
        self.awake: asyncio.Event | None = None
        self.asked: list[str] = []

    @asynccontextmanager
    async def _ask(self, verb: str) -> AsyncIterator[None]:
        self.asked.append(verb)
        left, how = self.trouble
        self.trouble = left - 1, how
        if left == 0 and how == "not sent":
            raise Unreachable
        if left == 0 and how == "asleep":
            self.awake = asyncio.Event()
            await self.awake.wait()
        yield
        if left == 0 and how == "not answered":
            raise Unreachable

    async def put(self, path: str, content: object, create: bool = False) -> None:
        async with self._ask("put"):
            self.now_s = (self.store.now_s + crc32(path.encode()) % 3 * 4) // 2 * 2
            await super().put(path, content, create)

    async def get(self, path: str) -> bytes:
        async with self._ask("get"):
            return await super().get(path)

    async def listed(self, path: str) -> list[Listed]:
        async with self._ask("list"):
            return await super().listed(path)

    async def delete(self, paths: Sequence[str]) -> None:
        async with self._ask("delete"):
            await super().delete(paths)


class ExchangeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.store.now_s  # type: ignore[method-assign]
        self.num_made = 0
        self.live: set[int] = set()
        self.looks: dict[Line, asyncio.Task[None]] = {}
        self.processes: list[tuple[Line, Process]] = []
        self.start()
        self.start()

    def pick(self, which: int) -> tuple[Line, Process]:
        return self.processes[which % len(self.processes)]

    def number(self) -> int:
        self.num_made += 1
        return self.num_made

    @rule()
    def start(self) -> None:
        if len(self.processes) < 5:
            line = Line(self.store)
            self.processes.append((line, Process(line)))
            self.processes[-1][1].sync.writer = f"{self.number():016x}"

    @rule(which=whiches)
    def kill(self, which: int) -> None:
        if len(self.processes) > 1:
            line, _ = self.processes.pop(which % len(self.processes))
            if line in self.looks:
                self.looks.pop(line).cancel()

    @rule(which=whiches, num=st.integers(1, 5), removed=st.integers(-9, 9))
    def write(self, which: int, num: int, removed: int) -> None:
        line, process = self.pick(which)
        line.trouble = -1, ""
        for number in [self.number() for _ in range(num)]:
            self.loop.run_until_complete(process.write(number))
            self.live.add(number)
        for number in sorted(self.live)[removed : removed + 1] if removed >= 0 else []:
            self.live.remove(number)
            process.sync.apply_tombstones([stored_key(number)])
            self.loop.run_until_complete(process.sync.publish())

    @rule(num=st.sampled_from([1, 2, 15]), is_known=st.booleans())
    def write_other(self, num: int, is_known: bool) -> None:
        """Another version of kvtier writes, which knows no log. is_known: its manifests."""
        for number in [self.number() for _ in range(num)]:
            stamp = self.pick(0)[1].sync.next_stamp()
            pack = Pack(stamp, as_keys([stored_key(number)]))
            content = Manifest(BLOCK_BYTES, [pack]).to_bytes() if is_known else b"other"
            work = Line(self.store).put(manifest_path("f" * 16, number), content)
            self.loop.run_until_complete(work)
            self.live |= {number} if is_known else set()

    @rule(which=whiches, left=st.integers(0, 12), how=troubles)
    def fail(self, which: int, left: int, how: str) -> None:
        self.pick(which)[0].trouble = left, how

    @rule(back=st.integers(0, 3))
    def spoil(self, back: int) -> None:
        """An object of the log is of a later version."""
        for path in self.store.names("log")[-1 - back :][:1]:
            self.store.objects[path] = b"other", self.store.objects[path][1]

    @rule(which=whiches, wakes=st.booleans())
    def look(self, which: int, wakes: bool) -> None:
        """One process polls and merges until done or asleep."""
        line, process = self.pick(which)
        if line.awake is not None and wakes:
            line.awake.set()
            line.awake = None
        task = self.looks.pop(line, None) or self.loop.create_task(process.look())
        while not task.done() and line.awake is None:
            self.loop.run_until_complete(asyncio.sleep(0))
        if not task.done():
            self.looks[line] = task
        elif not isinstance(error := task.exception(), Unreachable | None):
            raise error

    @rule(seconds=st.sampled_from([0, 1, 5, 20]), num=st.integers(0, 3))
    def look_all(self, seconds: int, num: int, wakes: bool = False) -> None:
        for _ in range(num):
            self.store.now_s += seconds
            for which in range(len(self.processes)):
                self.look(which, wakes)

    @rule()
    def settle(self) -> None:
        """Without trouble, all find the same, and only the merger lists."""
        for line, _ in self.processes:
            line.trouble = -1, ""
        self.look_all(0, 1, wakes=True)
        self.look_all(int(POLL_S), 10 + len(self.store.names("manifests")) // MAX_ENTRIES)
        for line, _ in self.processes:
            line.asked.clear()
        self.look_all(int(POLL_S), 1)
        for line, process in self.processes:
            assert set(process.knows(*range(self.num_made + 1))) == self.live
            assert process.merger.is_merger or line.asked.count("list") == 0
        assert sum(process.merger.is_merger for _, process in self.processes) == 1

    def teardown(self) -> None:
        self.settle()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


def test_every_process_finds_what_was_published() -> None:
    with small_merges(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "MAX_ENTRIES", MAX_ENTRIES)
        patch.setattr(manifest_sync, "LIST_S", 1e9)  # not found by another list
        run_state_machine_as_test(ExchangeMachine)
