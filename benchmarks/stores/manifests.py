"""R4: what the exchange of manifests costs a store, and how late a reader learns of a write.

    python -m benchmarks.stores.manifests --writers 100 1000 10000     simulated time, a model of S3
    python -m benchmarks.stores.manifests --seaweedfs --writers 200       a real server, real time

All processes run the exchange's own code, in one event loop. The merger is killed in the middle.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import selectors
import statistics
import sys
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.stores.processes import opened
from benchmarks.stores.servers import S3Place
from kvtier.tiers.remote.bucket import manifest_sync
from kvtier.tiers.remote.bucket.catalogue import Catalogue
from kvtier.tiers.remote.bucket.manifest_log import LogObject
from kvtier.tiers.remote.bucket.manifest_sync import ManifestSync
from kvtier.tiers.remote.bucket.manifests import Manifest, Pack
from kvtier.tiers.remote.bucket.object_store import (
    Listed,
    Missing,
    ObjectStore,
    Taken,
    make_objects,
)
from kvtier.tiers.remote.bucket.objects import NUM_RETRIES
from kvtier.tiers.remote.bucket.opening import S3Options
from kvtier.tiers.remote.bucket.upkeep import Upkeep
from kvtier.tiers.remote.envelope import as_keys
from kvtier.tiers.remote.errors import Refused, Unreachable, Unsound
from kvtier.tiers.remote.location import read_location
from tests.kit.servers import BUCKET

BLOCK_BYTES: Final = 2 << 20
BLOCKS_PER_PACK: Final = 8
SECONDS: Final = {"GET": 0.020, "PUT": 0.030, "LIST": 0.040, "DELETE": 0.030}
"""Median time of a small request to S3 in its region; of a list, per page."""
SPREAD: Final = 0.4
"""Standard deviation of the logarithm of these times."""
PAGE: Final = 1000
MAX_PER_S: Final = {"GET": 5500, "PUT": 3500}
"""Requests a second that S3 promises for a prefix: reads; writes, lists and deletions."""
BACKOFF_S: Final = 0.05
"""Pause before the client's first retry of a refused request; each further one takes twice that."""
DOLLARS: Final = {"GET": 0.0004, "PUT": 0.005, "LIST": 0.005, "DELETE": 0.0}
"""List price of 1,000 requests."""
NUM_READERS: Final = 8
"""Processes whose knowledge is measured."""
TRACKED_EVERY: Final = 20


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing can run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self._loop.now_s += timeout or 0.0
        return super().select(0)


@dataclass
class Requests:
    """Requests that a store has received. num: by verb and second."""

    num: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    num_refused: int = 0

    def note(self, verb: str, num: int = 1) -> int:
        """Count requests. Return how many there were in this second."""
        second = int(asyncio.get_running_loop().time())
        self.num[verb][second] += num
        return self.num[verb][second]

    def per_s(self, verb: str, begin_s: float, end_s: float) -> tuple[float, int]:
        """Return the mean and the maximum per second."""
        some = [self.num[verb][second] for second in range(int(begin_s), int(end_s))]
        return statistics.fmean(some), max(some)


class Counted(ObjectStore):
    """Counts the requests to a store."""

    def __init__(self, store: ObjectStore, requests: Requests) -> None:
        self._store, self.requests = store, requests

    async def put(self, path: str, content: object, create: bool = False) -> None:
        self.requests.note("PUT")
        await self._store.put(path, content, create)

    async def get(self, path: str) -> bytes:
        self.requests.note("GET")
        return await self._store.get(path)

    async def part(self, path: str, start: int, end: int) -> memoryview:
        return memoryview(await self.get(path))[start:end]

    async def listed(self, path: str) -> list[Listed]:
        found = await self._store.listed(path)
        self.requests.note("LIST", 1 + len(found) // PAGE)
        return found

    async def delete(self, paths: Sequence[str]) -> None:
        if paths:
            self.requests.note("DELETE", 1 + (len(paths) - 1) // PAGE)
        await self._store.delete(paths)

    def explain(self, error: Refused | Unsound) -> str:
        return self._store.explain(error)


class ModelOfS3(ObjectStore):
    """Objects in memory, behind the times and limits of S3.

    All objects count as one prefix, and a second that has too many requests refuses the rest. They
    are tried again as by the real client.
    """

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self._objects: dict[str, bytes] = {}
        self._listed: dict[str, list[Listed]] = defaultdict(list)
        """By folder, sorted by path."""

    async def _take(self, verb: str, num: int = 1, retries: int = 0) -> None:
        limited = "GET" if verb == "GET" else "PUT"
        total = self.requests.note(verb, num)
        if limited == "PUT":
            second = int(asyncio.get_running_loop().time())
            total = sum(self.requests.num[each][second] for each in ("PUT", "LIST", "DELETE"))
        seconds = sum(SECONDS[verb] * random.lognormvariate(0, SPREAD) for _ in range(num))
        await asyncio.sleep(seconds)
        if total <= MAX_PER_S[limited]:
            return
        self.requests.num_refused += 1
        if retries == NUM_RETRIES:
            raise Unreachable("SlowDown")
        await asyncio.sleep(random.uniform(0.5, 1) * BACKOFF_S * 2**retries)
        await self._take(verb, num, retries + 1)

    async def put(self, path: str, content: object, create: bool = False) -> None:
        await self._take("PUT")
        if create and path in self._objects:
            raise Taken
        self._objects[path] = bytes(content)  # type: ignore[call-overload]
        written_s = float(int(asyncio.get_running_loop().time()))
        folder, at = self._place(path)
        is_there = at < len(folder) and folder[at].path == path
        folder[at : at + is_there] = [Listed(path, len(self._objects[path]), written_s)]

    async def get(self, path: str) -> bytes:
        await self._take("GET")
        if path not in self._objects:
            raise Missing
        return self._objects[path]

    async def part(self, path: str, start: int, end: int) -> memoryview:
        return memoryview(await self.get(path))[start:end]

    async def listed(self, path: str) -> list[Listed]:
        found = list(self._listed[path])
        await self._take("LIST", 1 + len(found) // PAGE)
        return found

    async def delete(self, paths: Sequence[str]) -> None:
        if paths:
            await self._take("DELETE", 1 + (len(paths) - 1) // PAGE)
        for path in paths:
            if self._objects.pop(path, None) is not None:
                folder, at = self._place(path)
                del folder[at]

    def explain(self, error: Refused | Unsound) -> str:
        return str(error)

    def num_objects(self, folder: str) -> int:
        return len(self._listed[folder])

    def _place(self, path: str) -> tuple[list[Listed], int]:
        """Return the list of an object's folder, and where the object is in it."""
        folder = self._listed[path.partition("/")[0]]
        return folder, bisect_left(folder, path, key=lambda listed: listed.path)


class Watched(Catalogue):
    """Notes when a block became known, and keeps nothing.

    written: times by first key of a pack. late: gets these times, and how long it took.
    """

    def __init__(self, written: dict[bytes, float], late: list[tuple[float, float]]) -> None:
        super().__init__(1)
        self._written, self._late = written, late
        self._known: set[bytes] = set()

    def add(self, packs: Sequence[Pack], since: int = 0) -> None:
        del since
        now = asyncio.get_running_loop().time()
        for pack in packs:
            key = pack.keys[:1].tobytes()
            began = self._written.get(key)
            if began is None or key in self._known:
                continue
            self._known.add(key)
            if began < now:  # not its own
                self._late.append((began, now - began))


class Unmeasured(ManifestSync):
    """The exchange of a process whose knowledge is not measured.

    It looks into the objects of the log only when it merges: ten thousand would do it in one
    interpreter.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._unread: deque[LogObject] = deque(maxlen=256)
        self._is_reading_all = False

    def advance(self, found: LogObject | None) -> None:
        if found is not None and found.writer != self.writer:
            self._unread.append(found)
            found = LogObject(
                found.writer, (), found.pace_ms, found.covered_ns, found.used_bytes, found.touch_s
            )
        super().advance(found)

    async def follow(self) -> None:
        await super().follow()
        if self._is_reading_all:
            self._note_unread()

    async def read_all(self, skips_newest: bool = False) -> None:
        self._is_reading_all = True
        try:
            await super().read_all(skips_newest)
        finally:
            self._is_reading_all = False

    async def list_manifests(self) -> list[Listed]:
        self._note_unread()
        return await super().list_manifests()

    def _note_unread(self) -> None:
        while self._unread:
            for path, _ in self._unread.popleft().entries:
                self.logged.add(path)
                self.read.add(path)


@dataclass
class Member:
    """One process: its exchange, its background work, and what it writes."""

    sync: ManifestSync
    upkeep: Upkeep
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def kill(self) -> None:
        for task in self.tasks:
            task.cancel()


@dataclass(frozen=True)
class Row:
    """Requests of a fleet of ``writers`` processes, and the staleness of its readers.

    Requests are means per second, and maxima of a second, without those of packs.
    staleness: seconds from a write until a reader knows of it.
    gap_s: longest staleness of writes around the death of the merger.
    """

    store: str
    writers: int
    get: float
    put: float
    list: float
    delete: float
    max_get: int
    max_put: int
    refused: int
    staleness_p50_s: float
    staleness_p99_s: float
    gap_s: float
    pace_s: float
    dollars_per_hour: float

    def as_json(self) -> dict[str, object]:
        return self.__dict__.copy()


async def fleet(
    num: int,
    make_store: Callable[[Requests], ObjectStore],
    name: str,
    write_s: float,
    poll_s: float,
    times: tuple[float, float, float],
    seed: int = 1,
) -> Row:
    """Run ``num`` processes. times: when the figures begin, when the merger dies, and the end."""
    random.seed(seed)
    requests = Requests()
    written: dict[bytes, float] = {}
    late: list[tuple[float, float]] = []
    loop = asyncio.get_running_loop()
    options = S3Options(poll_s=poll_s)
    begin_s, death_s, end_s = times
    zero_s = loop.time()
    location = read_location("s3", "//bucket/prefix")
    epoch_ns = time.time_ns()
    members = []
    store = make_store(requests)
    for number in range(num):
        is_measured = number < NUM_READERS
        catalogue = Watched(written, late if is_measured else [])
        make = ManifestSync if is_measured else Unmeasured
        sync = make(
            store, catalogue, BLOCK_BYTES, 0, lambda: epoch_ns + int(1e9 * (loop.time() - zero_s))
        )
        members.append(Member(sync, Upkeep(location, store, sync, options)))

    async def write(member: Member) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.5, 1.5) * write_s)
            keys = os.urandom(32 * BLOCKS_PER_PACK)
            if random.random() < 1 / TRACKED_EVERY:
                written[keys[:32]] = loop.time()
            member.sync.add(as_keys([keys[at : at + 32] for at in range(0, len(keys), 32)]))  # type: ignore[misc]

    async def live(member: Member) -> None:
        await asyncio.sleep(random.random() * begin_s / 2)
        member.upkeep.is_sound = True  # the self-test is made once
        await member.upkeep.look()
        member.tasks += [
            loop.create_task(member.upkeep._keep_looking()),
            loop.create_task(member.upkeep._keep_publishing()),
            loop.create_task(write(member)),
        ]

    for member in members:
        member.tasks.append(loop.create_task(live(member)))
    await asyncio.sleep(death_s)
    for member in members:
        if member.upkeep.merger.is_merger:
            member.kill()
    await asyncio.sleep(end_s - death_s)
    paces = [member.sync.pace_s for member in members]
    for member in members:
        member.kill()
    steady = sorted(
        seconds for at, seconds in late if begin_s <= at - zero_s < death_s - 2 * max(paces) - 15
    )
    if not steady:
        sys.exit(
            f"{num} processes do not settle in these times: {requests.num_refused:,} requests were "
            f"refused, and they publish every {max(paces):.0f} s"
        )
    around = [seconds for at, seconds in late if at - zero_s >= death_s - 15]
    verbs = {
        verb: requests.per_s(verb, zero_s + begin_s, zero_s + death_s)
        for verb in ("GET", "PUT", "LIST", "DELETE")
    }
    return Row(
        name,
        num,
        *(round(verbs[verb][0], 1) for verb in ("GET", "PUT", "LIST", "DELETE")),
        verbs["GET"][1],
        verbs["PUT"][1],
        requests.num_refused,
        round(steady[len(steady) // 2], 2),
        round(steady[int(len(steady) * 0.99)], 2),
        round(max(around), 1),
        round(statistics.median(paces), 1),
        round(sum(3.6 * DOLLARS[verb] * mean for verb, (mean, _) in verbs.items()), 2),
    )


def simulated(num: int, write_s: float, poll_s: float, times: tuple[float, float, float]) -> Row:
    """Run a fleet in simulated time, over the model of S3."""
    loop = VirtualLoop()
    parse = LogObject.from_bytes
    manifest_sync.LogObject.from_bytes = lru_cache(64)(parse)  # type: ignore[method-assign]
    parse_one = Manifest.from_bytes
    Manifest.from_bytes = lru_cache(1 << 14)(parse_one)  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(fleet(num, ModelOfS3, "model of S3", write_s, poll_s, times))
    finally:
        manifest_sync.LogObject.from_bytes = parse  # type: ignore[method-assign]
        Manifest.from_bytes = parse_one  # type: ignore[method-assign]
        loop.close()


def real(num: int, write_s: float, poll_s: float, times: tuple[float, float, float]) -> Row:
    """Run a fleet over a real server, in real time."""
    with opened(S3Place) as place:
        location = read_location("s3", f"//{BUCKET}/fleet")
        objects = make_objects(location, S3Options(endpoint=f"http://127.0.0.1:{place.port}"))

        def count(requests: Requests) -> ObjectStore:
            return Counted(objects, requests)

        return asyncio.run(fleet(num, count, "SeaweedFS", write_s, poll_s, times))


def table(rows: Sequence[Row]) -> Table:
    return table_of(
        "R4: requests for manifests per second, and staleness in seconds",
        ("store", "writers"),
        ("GET", "PUT", "LIST", "max GET", "refused", "p50", "p99", "death", "pace", "$/h"),
        (
            (
                row.store,
                f"{row.writers:,}",
                *(f"{each:,.1f}" for each in (row.get, row.put, row.list)),
                f"{row.max_get:,}",
                str(row.refused),
                *(
                    f"{each:.1f}"
                    for each in (row.staleness_p50_s, row.staleness_p99_s, row.gap_s, row.pace_s)
                ),
                f"{row.dollars_per_hour:.2f}",
            )
            for row in rows
        ),
    )


def main(arguments: list[str] | None = None) -> None:
    parser: argparse.ArgumentParser = parser_of("stores.manifests", __doc__)
    parser.add_argument("--writers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--write-s", type=float, default=1.0, help="seconds between two packs")
    parser.add_argument("--poll-s", type=float, default=5.0)
    parser.add_argument("--seaweedfs", action="store_true", help="a real server, not the model")
    parser.add_argument("--times", type=float, nargs=3, default=[60.0, 150.0, 210.0])
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)
    times = tuple(options.times)
    run = real if options.seaweedfs else simulated
    rows = []
    for num in options.writers:
        rows.append(run(num, options.write_s, options.poll_s, times))
        print(rows[-1], file=sys.stderr, flush=True)
    report(
        options.json,
        "stores.manifests",
        machine_facts(),
        [row.as_json() for row in rows],
        [],
        table(rows),
        quick=False,
    )


if __name__ == "__main__":
    main()
