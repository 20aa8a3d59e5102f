"""The log of a bucket: one process merges the manifests of all, and any may die."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.remote.bucket import merging
from kvtier.tiers.remote.bucket.catalogue import Catalogue
from kvtier.tiers.remote.bucket.manifest_log import LogObject, log_path, number_of
from kvtier.tiers.remote.bucket.manifest_sync import FEW, MARGIN_S, ManifestSync
from kvtier.tiers.remote.bucket.manifests import Manifest
from kvtier.tiers.remote.bucket.merging import Merger
from kvtier.tiers.remote.bucket.object_store import Listed, Missing, ObjectStore, Taken
from kvtier.tiers.remote.bucket.packs import PackName
from kvtier.tiers.remote.envelope import as_keys
from kvtier.tiers.remote.errors import Refused, Unreachable, Unsound
from tests.kit.waiting import wait_until
from tests.tiers.remote.bucket import Bucket
from tests.tiers.remote.test_directory import Folder

THERE, ABSENT, DAMAGED, FAILED = Outcome
TIMEOUT_S = 30.0
BLOCK_BYTES = 256
POLL_S, PUBLISH_S = 5.0, 1.0


class MemoryStore(ObjectStore):
    """Objects in a dictionary. now_s: the store's clock."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.now_s = 1e9
        self.before: Callable[[str, str], None] = lambda verb, path: None
        """Called before each request."""

    async def put(self, path: str, content: object, create: bool = False) -> None:
        self.before("put", path)
        if create and path in self.objects:
            raise Taken
        self.objects[path] = bytes(content), self.now_s  # type: ignore[call-overload]

    async def get(self, path: str) -> bytes:
        self.before("get", path)
        if path not in self.objects:
            raise Missing
        return self.objects[path][0]

    async def part(self, path: str, start: int, end: int) -> memoryview:
        return memoryview(await self.get(path))[start:end]

    async def listed(self, path: str) -> list[Listed]:
        self.before("list", path)
        return [
            Listed(name, len(content), written_s)
            for name, (content, written_s) in sorted(self.objects.items())
            if name.startswith(f"{path}/")
        ]

    async def delete(self, paths: Sequence[str]) -> None:
        self.before("delete", "")
        for path in paths:
            self.objects.pop(path, None)

    def explain(self, error: Refused | Unsound) -> str:
        return str(error)

    def names(self, below: str) -> list[str]:
        return sorted(name for name in self.objects if name.startswith(f"{below}/"))


@dataclass
class Process:
    """The exchange of manifests of one process, without a tier."""

    store: MemoryStore
    block_bytes: int = BLOCK_BYTES
    catalogue: Catalogue = field(default_factory=lambda: Catalogue(4096))

    def __post_init__(self) -> None:
        self.sync = ManifestSync(self.store, self.catalogue, self.block_bytes)
        self.merger = Merger(self.store, self.sync, POLL_S, PUBLISH_S)

    async def write(self, *numbers: int) -> None:
        self.sync.add(as_keys([stored_key(number) for number in numbers]))
        await self.sync.publish()

    async def look(self) -> None:
        await self.sync.poll()
        await self.merger.step()

    def knows(self, *numbers: int) -> list[int]:
        known = self.catalogue.have([stored_key(number) for number in numbers])
        return [number for number, is_known in zip(numbers, known, strict=True) if is_known]


def forget_time(process: Process) -> None:
    """Have the process take the merger for dead at its next step."""
    process.sync.seen_s = float("-inf")


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


@contextmanager
def small_merges() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "NUM_MERGED", 4)
        patch.setattr(merging, "TRIM_EVERY", 4)
        patch.setattr(merging, "NUM_KEPT", 8)
        yield


def test_reader_reads_one_object_for_all_writers() -> None:
    async def test() -> None:
        store = MemoryStore()
        merger, reader = Process(store), Process(store)
        await merger.look()
        await reader.look()
        assert merger.merger.is_merger
        assert not reader.merger.is_merger
        writers = [Process(store) for _ in range(20)]
        for number, writer in enumerate(writers):
            await writer.write(number)
        await merger.look()
        asked: list[tuple[str, str]] = []
        store.before = lambda verb, path: asked.append((verb, path))
        await reader.look()
        assert reader.knows(*range(21)) == list(range(20))
        position = reader.sync.position
        assert asked == [("get", log_path(position)), ("get", log_path(position + 1))]

    run(test)


def test_start_reads_the_log_instead_of_manifests_that_are_in_it() -> None:
    """Without that, a start of all processes at once costs the square of their number."""

    async def test() -> None:
        store = MemoryStore()
        merger, writer = Process(store), Process(store)
        await merger.look()
        for number in range(400):
            store.now_s += 12 * (number % 40 == 0)
            await writer.write(number)
            if number % 40 == 39:
                await merger.look()
        asked: list[str] = []
        store.before = lambda verb, path: asked.append(path)
        late = Process(store)
        await late.look()
        assert late.knows(*range(401)) == list(range(400))
        assert len(store.names("manifests")) == 400
        assert len(asked) <= 20

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "NUM_MERGED", 1000)
        run(test)


def test_start_reads_a_few_new_manifests_itself_and_leaves_many_to_the_log() -> None:
    async def test() -> None:
        store = MemoryStore()
        merger = Process(store)
        await merger.write(0)
        await merger.look()
        await merger.look()
        store.now_s += 2 * MARGIN_S
        for number in range(1, FEW + 1):
            await Process(store).write(number)
        few = Process(store)
        await few.sync.poll()
        assert len(few.knows(*range(FEW + 1))) == FEW + 1, "the merger may be dead"
        await Process(store).write(FEW + 1)
        many = Process(store)
        await many.sync.poll()
        assert many.knows(*range(FEW + 2)) == [0]
        await merger.look()
        await many.sync.poll()
        assert len(many.knows(*range(FEW + 2))) == FEW + 2

    run(test)


def test_start_knows_what_was_merged_before_its_first_object_of_the_log() -> None:
    """A merged manifest is in the log without its content."""

    async def test() -> None:
        for num_rounds in range(1, 24):
            store = MemoryStore()
            merger, writer = Process(store), Process(store)
            await merger.look()
            for number in range(6 * num_rounds):
                await writer.write(number)
                if number % 6 == 5:
                    store.now_s += 1
                    await merger.look()
            late = Process(store)
            await late.look()
            await merger.look()
            store.now_s += 20
            for each in (merger, late):
                await each.look()
            assert late.knows(*range(6 * num_rounds)) == list(range(6 * num_rounds))

    with small_merges():
        run(test)


def test_start_knows_what_a_server_ahead_of_others_has_stamped() -> None:
    """It seems to be newer than the objects of the log that follow it."""

    async def test() -> None:
        store = MemoryStore()
        merger, writer = Process(store), Process(store)
        await merger.look()
        store.now_s += 9
        await writer.write(0)
        store.now_s -= 9
        await merger.look()
        store.now_s += 5
        await merger.look()
        late = Process(store)
        await late.look()
        assert late.knows(0, 1) == [0]

    run(test)


def test_start_knows_what_is_merged_twice_before_its_second_poll() -> None:
    """The manifest that it waits for has been replaced by then."""

    async def test() -> None:
        store = MemoryStore()
        merger, writer, late = (Process(store) for _ in range(3))
        await merger.look()
        made = iter(range(1000))

        async def write(num: int) -> None:
            for _ in range(num):
                await writer.write(next(made))

        def slow(verb: str, path: str) -> None:
            is_merged = verb == "put" and path.startswith(f"manifests/{merger.sync.writer}")
            store.now_s += 12 * is_merged

        for number in range(5):
            await write(4)
            store.now_s += 5
            store.before = slow if number == 4 else store.before
            await merger.look()
        store.before = lambda verb, path: None
        store.now_s += 1
        await write(8)
        await late.look()
        for num in (4, 4, 0, 0):
            await write(num)
            store.now_s += 5
            await merger.look()
        for _ in range(2):
            await late.look()
        expected = list(range(next(made)))
        assert late.knows(*expected) == expected

    with small_merges():
        run(test)


def test_one_of_many_becomes_the_merger() -> None:
    async def test() -> None:
        store = MemoryStore()
        processes = [Process(store) for _ in range(10)]
        await asyncio.gather(*(process.look() for process in processes))
        for process in processes:
            await process.sync.poll()
        assert sum(process.merger.is_merger for process in processes) == 1

    run(test)


@pytest.mark.parametrize("death", ["before", "put log", "put manifests", "delete"])
def test_merger_that_dies_anywhere_loses_nothing(death: str) -> None:
    async def test() -> None:
        store = MemoryStore()
        first, second, reader = (Process(store) for _ in range(3))
        await first.look()
        await second.look()
        await reader.look()
        writers = [Process(store) for _ in range(4)]
        for number, writer in enumerate(writers):
            await writer.write(number)

        def die(verb: str, path: str) -> None:
            if death == f"{verb} {path.partition('/')[0]}".strip():
                raise Unreachable("dead")

        store.before = die
        if death != "before":
            with pytest.raises(Unreachable):
                await first.look()
        store.before = lambda verb, path: None
        await writers[0].write(10)
        for process in (second, reader):
            await process.look()
            assert not process.merger.is_merger, "it is not dead for long yet"
        forget_time(second)
        for _ in range(3):
            await second.look()
        assert second.merger.is_merger
        await reader.look()
        late = Process(store)
        await late.look()
        for process in (second, reader, late):
            assert process.knows(*range(4), 10) == [0, 1, 2, 3, 10]
        await first.look()
        assert not first.merger.is_merger

    with small_merges():
        run(test)


def test_merger_that_slept_takes_nothing_from_the_next_one() -> None:
    """Its next number was given away, and may have been deleted since."""

    async def test() -> None:
        store = MemoryStore()
        first, second, reader = (Process(store) for _ in range(3))
        await first.look()
        await second.look()
        await reader.look()
        writer = Process(store)
        forget_time(second)
        for number in range(40):
            await writer.write(number)
            store.now_s += 1
            await second.look()
            await reader.look()
        assert log_path(first.sync.position + 1) not in store.objects
        for number in range(40, 44):
            await writer.write(number)
        manifests = set(store.names("manifests"))
        for _ in range(5):
            await first.merger.step()
        assert not first.merger.is_merger
        assert manifests <= set(store.names("manifests")), "it has deleted nothing"
        await second.look()
        await reader.look()
        await first.look()
        for process in (first, second, reader):
            assert process.knows(*range(45)) == list(range(44))

    with small_merges():
        run(test)


def test_manifests_and_the_log_stay_short_and_tell_all() -> None:
    async def test() -> None:
        store = MemoryStore()
        merger, reader, writer = (Process(store) for _ in range(3))
        other = Process(store, block_bytes=2 * BLOCK_BYTES)
        await merger.look()
        await reader.look()
        for number in range(60):
            await writer.write(number)
            await other.write(100 + number)
            if number == 30:
                writer.sync.apply_tombstones([stored_key(3)])
                await writer.sync.publish()
            store.now_s += 1
            await merger.look()
            if number % 5 == 0:
                await reader.look()
        assert len(store.names("manifests")) <= 12
        assert len(store.names("log")) <= merging.NUM_KEPT + merging.TRIM_EVERY
        await reader.look()
        expected = [number for number in range(60) if number != 3]
        late = Process(store)
        await late.look()
        for process in (merger, reader, late):
            assert process.knows(*range(61)) == expected
            assert process.knows(*range(100, 160)) == []
        stranger = Process(store, block_bytes=2 * BLOCK_BYTES)
        await stranger.look()
        assert stranger.knows(*range(100, 161)) == list(range(100, 160))

    with small_merges():
        run(test)


def test_reader_that_is_far_behind_lists_everything() -> None:
    async def test() -> None:
        store = MemoryStore()
        merger, reader, writer = (Process(store) for _ in range(3))
        await merger.look()
        await reader.look()
        for number in range(40):
            await writer.write(number)
            store.now_s += 1
            await merger.look()
        await reader.look()
        assert reader.knows(*range(40)) == []
        forget_time(reader)
        for _ in range(2):
            await reader.look()
        assert not reader.merger.is_merger
        assert reader.knows(*range(40)) == list(range(40))

    with small_merges():
        run(test)


def test_old_version_finds_what_new_ones_write() -> None:
    """An old version lists manifests, and knows of no log."""

    async def test() -> None:
        store = MemoryStore()
        merger, writer = Process(store), Process(store)
        await merger.look()
        for number in range(20):
            await writer.write(number)
            await merger.look()
        old = Process(store)
        for path in store.names("manifests"):
            old.sync.take(path, store.objects[path][0])
        assert old.knows(*range(20)) == list(range(20))
        assert not old.sync.num_unread

    with small_merges():
        run(test)


def test_flood_of_manifests_makes_all_publish_less_often() -> None:
    async def test() -> float:
        store = MemoryStore()
        clock, empty = [0.0], Manifest(BLOCK_BYTES).to_bytes()
        asyncio.get_running_loop().time = lambda: clock[0]  # type: ignore[method-assign]
        merger, reader = Process(store), Process(store)
        await merger.look()
        await reader.look()
        for _ in range(10):
            clock[0] += 1
            store.now_s += 1
            for number in range(100):
                store.objects[f"manifests/{store.now_s}/{number}"] = empty, store.now_s
            await merger.look()
        await reader.look()
        return reader.sync.pace_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "MAX_RATE", 10.0)
        assert asyncio.run(test()) == pytest.approx(10.0, rel=0.3)


@pytest.mark.parametrize("at", [0, 9, 20, 60, 95, -1])
def test_damaged_object_of_the_log_is_not_understood(at: int) -> None:
    name = PackName(bytes(40))
    made = LogObject("ab" * 8, [("manifests/x", b"1234"), ("y", b"")], 1, 2, 3, 4, [name], 5)
    content = made.to_bytes()
    found = LogObject.from_bytes(content)
    assert found is not None
    assert found.to_bytes() == content
    assert (found.writer, list(found.entries), list(found.deleted)) == (
        made.writer,
        made.entries,
        [name],
    )
    spoiled = bytearray(content)
    spoiled[at] ^= 1
    assert LogObject.from_bytes(bytes(spoiled)) is None
    assert LogObject.from_bytes(content[:at]) is None
    assert number_of(log_path(7)) == 7
    assert number_of("log/other") == 0


def test_log_that_is_damaged_is_healed_by_a_list() -> None:
    async def test() -> None:
        store = MemoryStore()
        merger, reader, writer = (Process(store) for _ in range(3))
        await merger.look()
        await reader.look()
        await writer.write(1)
        await merger.look()
        path = log_path(merger.sync.position)
        store.objects[path] = store.objects[path][0][:-1], store.now_s
        await reader.look()
        assert reader.knows(1) == []
        await reader.look()
        assert reader.knows(1) == [1]

    run(test)


@pytest.fixture(params=["bucket", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket | Folder:
    if request.param == "folder":
        return Folder(tmp_path / "kv")
    found = request.getfixturevalue("bucket")
    assert isinstance(found, Bucket)
    return found


def test_processes_learn_from_each_other_by_the_log(place: Bucket | Folder) -> None:
    tiers = [place.tier(poll_s=0.1, publish_s=0.05) for _ in range(4)]
    for number, tier in enumerate(tiers):
        assert User(tier).put(number) == [THERE]
    for tier in tiers:
        wait_until(lambda tier=tier: User(tier).found(*range(4)) == [0, 1, 2, 3])  # type: ignore[misc]
    assert sum(tier._upkeep.merger.is_merger for tier in tiers) == 1
    merger = next(tier for tier in tiers if tier._upkeep.merger.is_merger)
    merger.abandon()
    others = [tier for tier in tiers if tier is not merger]
    wait_until(lambda: any(tier._upkeep.merger.is_merger for tier in others))
    assert User(others[0]).put(10) == [THERE]
    for tier in others:
        wait_until(lambda tier=tier: User(tier).found(10) == [10])  # type: ignore[misc]
        assert User(tier).get(10, 0) == [THERE] * 2
        tier.check_invariants()


def test_log_is_removed_with_the_last_manifest(folder_of: Folder) -> None:
    from kvtier.tiers.remote.pruning import make_keeper, prune

    tier = folder_of.tier(poll_s=0.05, publish_s=0.05)
    User(tier).put(0)
    wait_until(lambda: not tier._exchange.num_pending and bool(folder_of.paths("log")))
    tier.abandon()
    prune(make_keeper(f"dir:{folder_of.location()}"), older_than_s=0)
    assert folder_of.paths() == ["self-test/probe"]
    again = folder_of.tier(poll_s=0.05, publish_s=0.05)
    assert User(again).put(0) == [THERE]
    wait_until(lambda: bool(folder_of.paths("log")))
    shutil.rmtree(folder_of.root / "log")
    late = folder_of.tier(poll_s=0.05, publish_s=0.05)
    User(again).put(1)
    wait_until(lambda: User(late).found(0, 1) == [0, 1])


@pytest.fixture
def folder_of(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "kv")
