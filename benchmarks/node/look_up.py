"""M2: look-ups of a long prompt by four clients, in a node and in the client's own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.node.part import JsonRow, Part
from benchmarks.node.processes import SPAWN, attached, check_all_there, running_node, store
from benchmarks.node.work import REQUEST_BLOCKS
from benchmarks.report.targets import judged
from benchmarks.scale.keyed import PROMPT_BLOCKS, new_keys
from kvtier.cache.block_cache import BlockCache
from kvtier.cache.ladder import LadderOptions
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer.ranks import RankMover
from kvtier.core.hot import NATIVE
from kvtier.core.types import HOST
from kvtier.devices.cpu import CpuDevice
from kvtier.index import make_key_index
from kvtier.index.policies.replayed import RUNS
from kvtier.node.config import NodeConfig
from kvtier.node.server.engines import Holdings
from kvtier.node.server.node import CacheNode
from kvtier.node.server.partition import Partition
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.server.users import SlotUser
from kvtier.node.wire import protocol
from kvtier.tiers import DistantAllocator
from kvtier.tools.report.stats import median_with_interval

NUM_CLIENTS = 4
RATE = 100.0
"""Requests per second of each client."""
BLOCK_BYTES = 512
HOST_BYTES, SEGMENT_BYTES = 64 << 20, 4 << 20
NODE, NOT_SEEN, IN_PROCESS = "node", "node, blocks not seen before", "in process"
P50_MS, P99_MS = 0.1, 1.0
NAMESPACE = b"n" * 32


class Requests(NamedTuple):
    """Requests of one client in one round."""

    seconds: list[float]
    """Duration of each request."""
    cpu_s: float
    """CPU seconds of the client's thread."""
    wall_s: float
    """Duration of the round."""


def cache_in_process(num_blocks: int) -> LocalBlockCache:
    """Return a cache of this process with room for ``num_blocks`` blocks, and no storage."""
    host = DistantAllocator(num_blocks)
    host.open(num_blocks)
    index = make_key_index({HOST: RUNS}, lambda: NAMESPACE)
    mover = RankMover({}, BLOCK_BYTES, 1, 1)
    options = LadderOptions(BLOCK_BYTES)
    return LocalBlockCache(index, {HOST: host}, mover, options, lambda: NAMESPACE, time.monotonic)


def ask(
    cache: BlockCache,
    keys: Sequence[bytes],
    num_requests: int,
    rate: float = RATE,
    prepare: Callable[[], object] = lambda: None,
) -> Requests:
    """Look a prompt up repeatedly, at a fixed rate. prepare: called before each time."""
    seconds = []
    began, cpu_s = time.perf_counter(), time.thread_time()
    for number in range(num_requests):
        left_s = began + number / rate - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        prepare()
        start = time.perf_counter()
        places, _ = cache.lookup(keys)
        cache.poll()
        seconds.append(time.perf_counter() - start)
        check_all_there(places)
    return Requests(seconds, time.thread_time() - cpu_s, time.perf_counter() - began)


def _client(socket: Path, keys: list[bytes], pipe: Connection) -> None:
    """Look the prompt up in the cache that each message on the pipe names, until None arrives."""
    own = cache_in_process(2 * len(keys))
    store(own, keys)
    with attached(socket, BLOCK_BYTES) as cache:
        pipe.send(None)
        while (told := pipe.recv()) is not None:
            way, num_requests = told
            if way == NOT_SEEN:
                pipe.send(ask(cache, keys, num_requests, prepare=cache.forget_seen))
            else:
                pipe.send(ask(own if way == IN_PROCESS else cache, keys, num_requests))


class Round(NamedTuple):
    """One round of one way: milliseconds."""

    p50_ms: float
    p99_ms: float
    client_cpu_ms: float
    node_cpu_ms: float
    rate: float


def measure(quick: bool) -> Part:
    """Measure all ways in turn."""
    num_rounds, num_requests = (2, 20) if quick else (12, 200)
    keys = new_keys(PROMPT_BLOCKS)
    rounds: dict[str, list[Round]] = {NODE: [], NOT_SEEN: [], IN_PROCESS: []}
    with running_node(HOST_BYTES, SEGMENT_BYTES) as node:
        socket = node.config.socket
        with attached(socket, BLOCK_BYTES) as cache:
            store(cache, keys)
            clients = []
            for _ in range(NUM_CLIENTS):
                ours, theirs = SPAWN.Pipe()
                process = SPAWN.Process(target=_client, args=(socket, keys, theirs))
                process.start()
                theirs.close()
                clients.append((process, ours))
            for _, pipe in clients:
                pipe.recv()
            for number in range(num_rounds + 1):
                for way, of_way in rounds.items():
                    cpu_s = node.cpu_s
                    for _, pipe in clients:
                        pipe.send((way, num_requests))
                    found = [pipe.recv() for _, pipe in clients]
                    if number:
                        of_way.append(_round(found, node.cpu_s - cpu_s))
            for process, pipe in clients:
                pipe.send(None)
                process.join()
    rows = [_row(way, of_way) for way, of_way in rounds.items()]
    num_calls = 20 if quick else 200
    for num_blocks in (REQUEST_BLOCKS, PROMPT_BLOCKS):
        rows += _steps(num_blocks, num_calls)
    judged_rounds = targets(rounds[NODE], rounds[IN_PROCESS])
    judged_rounds += targets(rounds[NOT_SEEN], rounds[IN_PROCESS], "ms more, not seen before")
    return Part(rows, judged_rounds)


def _round(found: Sequence[Requests], node_cpu_s: float) -> Round:
    times = np.concatenate([each.seconds for each in found]) * 1e3
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    return Round(
        p50,
        p99,
        1e3 * sum(each.cpu_s for each in found) / len(times),
        1e3 * node_cpu_s / len(times),
        len(times) / max(each.wall_s for each in found),
    )


def _row(name: str, rounds: Sequence[Round]) -> JsonRow:
    medians = {
        field: float(np.median([getattr(each, field) for each in rounds]))
        for field in Round._fields
    }
    return {"what": f"look up {PROMPT_BLOCKS:,} blocks", "way": name, **medians}


def targets(
    node: Sequence[Round], in_process: Sequence[Round], unit: str = "ms more"
) -> list[dict[str, object]]:
    """Judge how much longer a look-up takes in a node, round by round."""
    found = []
    for field, wanted in ("p50_ms", P50_MS), ("p99_ms", P99_MS):
        pairs = zip(node, in_process, strict=True)
        more = median_with_interval(
            [getattr(one, field) - getattr(other, field) for one, other in pairs]
        )
        found.append(judged("M2", more, wanted, at_least=False, measure=f"{field[:3]}, {unit}"))
    return found


# -- where the time goes ---------------------------------------------------------------------------


def partition_in_process(node: CacheNode, keys: Sequence[bytes], block_bytes: int) -> Partition:
    """Return a partition of a node in this process that has the blocks."""
    key = node.check_key(PartitionKey("", NAMESPACE, block_bytes, len(keys[0])))
    _, partition = node.enter(key, node.open_storages(key))
    store(partition.cache, keys)
    return partition


def _steps(num_blocks: int, num_calls: int) -> list[JsonRow]:
    """Time the steps of a look-up one by one, in CPU microseconds of one thread."""
    from tempfile import TemporaryDirectory

    keys = new_keys(num_blocks)
    with TemporaryDirectory(prefix="kvtier-node-") as folder:
        config = NodeConfig(
            socket=Path(folder) / "node.sock",
            host_capacity=str(HOST_BYTES),
            segment_capacity=str(SEGMENT_BYTES),
        )
        node = CacheNode(config, CpuDevice())
        held = Holdings(partition_in_process(node, keys, BLOCK_BYTES), SlotUser(1, 0, "engine"))
        told = b"".join(keys)
        frame = protocol.frame(protocol.LookupRequest(1, 0, told))
        split = protocol.split_keys(told, len(keys[0]))
        ready = held.partition.locate(split).ready
        slots = protocol.unpack(held.lease(ready)[0])
        held.release(slots)
        codes = bytes([protocol.MEMORY]) * len(keys)
        packed = protocol.pack(slots)
        answer = protocol.LookupAnswer(1, codes, packed, packed, codes)

        def lease() -> None:
            held.release(protocol.unpack(held.lease(ready)[0]))

        lookup = memoryview(frame)[protocol.FRAME_HEADER.size :]
        notice = protocol.frame(protocol.ReleaseNotice(0, packed))[protocol.FRAME_HEADER.size :]

        def serve() -> None:
            held.serve(lookup, 0)
            held.serve(memoryview(notice), 0)

        steps: dict[str, Callable[[], object]] = {
            "join the keys": lambda: b"".join(keys),
            "make the frame": lambda: protocol.frame(protocol.LookupRequest(1, 0, told)),
            "take the frame": lambda: protocol.decode_engine(frame[4:]),
            "split the keys": lambda: protocol.split_keys(told, len(keys[0])),
            "find in the index": lambda: held.partition.lookup(split),
            "lease and release": lease,
            "serve both in one call each": serve,
            "make and take the answer": lambda: protocol.decode_node(protocol.frame(answer)[4:]),
        }
        rows = [
            _step(f"{name}, {num_blocks:,} blocks", step, num_calls) for name, step in steps.items()
        ]
        node.close()
    return rows


def _step(name: str, step: Callable[[], object], num_calls: int) -> JsonRow:
    times = []
    for _ in range(num_calls):
        began = time.thread_time()
        step()
        times.append(1e3 * (time.thread_time() - began))
    nothing = dict.fromkeys(Round._fields, "")
    native = "native" if NATIVE else "Python"
    return {"what": name, "way": native, **nothing, "node_cpu_ms": float(np.median(times))}
