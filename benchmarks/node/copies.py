"""M5: loads and stores of a rank through a node, and the same copies to memory of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.node.part import JsonRow, Part
from benchmarks.node.processes import PATIENCE_S, Bytes, running_node, until
from benchmarks.report.targets import judged
from kvtier.core.hot import copy_batch
from kvtier.core.types import BlockKey, BlockName
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import named_layout, opaque
from kvtier.node.client.channel import NodeClient
from kvtier.node.client.tier import NodeTier
from kvtier.tiers import Outcome, Pieces, StorageSite
from kvtier.tiers.memory.arena import Arena, ArenaOptions
from kvtier.tools.report.stats import median_with_interval

SIZES = {"4 KiB": 4 << 10, "32 KiB": 32 << 10}
"""Bytes of a fragment."""
NUM_FRAGMENTS = 56
"""Fragments of a block: keys and values of 28 layers."""
SET_BYTES = 64 << 20
NUM_SETS = 2
"""Sets of blocks that the memory can hold."""
SEGMENT_BYTES = 16 << 20
LEAST = 0.95
WARM_UP = 4
"""Rounds until the node's memory is full, so that every slot was used before."""
NAMESPACE = b"n" * 32
STORE, LOAD = "store", "load"
NODE, IN_PROCESS = "node", "in process"


class Timed(NamedTuple):
    """Speed of one call, and CPU seconds of this process."""

    gb_per_s: float
    cpu_s_per_gb: float


class Pool:
    """Device memory in layer-first order: bytes [num_fragments, num_blocks, fragment_bytes]."""

    def __init__(self, num_blocks: int, fragment_bytes: int) -> None:
        self.bytes: Bytes = np.zeros((NUM_FRAGMENTS, num_blocks, fragment_bytes), np.uint8)
        base = self.bytes.ctypes.data
        at = np.arange(num_blocks, dtype=np.uint64)[:, None] * np.uint64(fragment_bytes)
        layers = np.arange(NUM_FRAGMENTS, dtype=np.uint64) * np.uint64(num_blocks * fragment_bytes)
        sizes = np.full(NUM_FRAGMENTS, fragment_bytes, np.int64)
        self.pieces = Pieces(np.uint64(base) + at + layers, sizes)

    def fill(self, number: int) -> None:
        """Fill it with bytes that no other round has."""
        rng = np.random.default_rng(number)
        self.bytes[:] = np.frombuffer(rng.bytes(self.bytes[0].nbytes), np.uint8).reshape(
            self.bytes[0].shape
        )
        self.bytes ^= np.arange(NUM_FRAGMENTS, dtype=np.uint8)[:, None, None]


class Own:
    """Host memory of this process, as large as the node's, for an engine without a node."""

    def __init__(self, num_blocks: int, pool: Pool) -> None:
        block_bytes, num_slots = int(pool.pieces.sizes.sum()), NUM_SETS * num_blocks
        layout = named_layout("block_first", opaque(block_bytes), num_slots)
        self._arena = Arena(layout, CpuDevice(), ArenaOptions())
        until(lambda: self._arena.num_ready_blocks == num_slots)
        begins = self._arena.memory.address + block_bytes * np.arange(num_slots)
        self._places = Pieces.whole(begins, block_bytes).cut(pool.pieces.sizes)
        self._num_blocks = num_blocks
        self._set = self._places

    def prepare(self, number: int) -> None:
        first = number % NUM_SETS * self._num_blocks
        self._set = self._places.pick(slice(first, first + self._num_blocks))

    def store(self, pieces: Pieces) -> None:
        _copy(self._set, pieces)

    def load(self, pieces: Pieces) -> None:
        _copy(pieces, self._set)

    def close(self) -> None:
        self._arena.close()


class InNode:
    """The node's memory, accessed through its storage tier."""

    def __init__(self, tier: NodeTier, num_blocks: int) -> None:
        self._tier = tier
        self._num_blocks = num_blocks
        self._names: list[BlockName] = []

    def prepare(self, number: int) -> None:
        self._names = [
            BlockName(NAMESPACE, block, BlockKey(f"{number} {block}".encode().ljust(32, b"\0")))
            for block in range(self._num_blocks)
        ]

    def store(self, pieces: Pieces) -> None:
        _check(self._tier.put(self._names, pieces, PATIENCE_S))

    def load(self, pieces: Pieces) -> None:
        _check(self._tier.get([name.key for name in self._names], pieces, PATIENCE_S))


def _check(outcomes: Sequence[Outcome]) -> None:
    num = sum(outcome is not Outcome.THERE for outcome in outcomes)
    if num:
        raise RuntimeError(f"{num} of {len(outcomes)} blocks were not copied")


def _copy(to: Pieces, at: Pieces) -> None:
    sizes = np.tile(to.sizes.astype(np.uint64), len(to))
    copy_batch(to.addresses.ravel(), at.addresses.ravel(), sizes)


def turn(side: Own | InNode, number: int, pool: Pool) -> dict[str, Timed]:
    """Store blocks with new bytes, and load them into cleared memory.

    Raises RuntimeError if other bytes come back.
    """
    pool.fill(number)
    side.prepare(number)
    expected = pool.bytes.copy()
    found = {STORE: _timed(lambda: side.store(pool.pieces), expected.nbytes)}
    pool.bytes[:] = 0
    found[LOAD] = _timed(lambda: side.load(pool.pieces), expected.nbytes)
    if not np.array_equal(pool.bytes, expected):
        raise RuntimeError("other bytes came back than were stored")
    return found


def _timed(work: Callable[[], None], num_bytes: int) -> Timed:
    began, cpu_s = time.perf_counter(), time.process_time()
    work()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    return Timed(num_bytes / 1e9 / wall_s, cpu_s * 1e9 / num_bytes)


def measure(quick: bool) -> Part:
    """Measure both ways in turn, for each size of a fragment."""
    num_rounds = 2 if quick else 15
    rows: list[JsonRow] = []
    targets: list[dict[str, object]] = []
    for name, fragment_bytes in SIZES.items():
        found = _measure(fragment_bytes, num_rounds, SET_BYTES // (4 if quick else 1))
        for direction in STORE, LOAD:
            node, own = (found[way, direction] for way in (NODE, IN_PROCESS))
            pairs = zip(node, own, strict=True)
            ratio = median_with_interval([a.gb_per_s / b.gb_per_s for a, b in pairs])
            cpu = zip(node, own, strict=True)
            rows.append(
                {
                    "fragments": name,
                    "way": direction,
                    **_medians(NODE, node),
                    **_medians(IN_PROCESS, own),
                    "GB/s ratio": ratio.value,
                    "CPU ratio": float(
                        np.median([a.cpu_s_per_gb / b.cpu_s_per_gb for a, b in cpu])
                    ),
                }
            )
            targets.append(judged("M5", ratio, LEAST, at_least=True, fragments=name, way=direction))
    return Part(rows, targets)


def _medians(name: str, found: Sequence[Timed]) -> dict[str, float]:
    rate, cpu = np.median(found, axis=0).tolist()
    return {f"{name} GB/s": rate, f"{name} CPU s/GB": cpu}


def _measure(
    fragment_bytes: int, num_rounds: int, set_bytes: int
) -> dict[tuple[str, str], list[Timed]]:
    block_bytes = fragment_bytes * NUM_FRAGMENTS
    num_blocks = max(1, set_bytes // block_bytes)
    pool = Pool(num_blocks, fragment_bytes)
    host_bytes = -(-NUM_SETS * set_bytes // SEGMENT_BYTES) * SEGMENT_BYTES
    found: dict[tuple[str, str], list[Timed]] = {
        (way, direction): [] for way in (NODE, IN_PROCESS) for direction in (STORE, LOAD)
    }
    with running_node(host_bytes, SEGMENT_BYTES) as node:
        site = StorageSite("node", "node", opaque(block_bytes), host_bytes)
        tier = NodeTier(site, NodeClient(node.config.socket))
        own = Own(num_blocks, pool)
        sides: dict[str, Own | InNode] = {NODE: InNode(tier, num_blocks), IN_PROCESS: own}
        until(
            lambda: (
                tier.put([BlockName(NAMESPACE, 0, BlockKey(bytes(32)))], pool.pieces.pick([0]), 1.0)
                == [Outcome.THERE]
            )
        )
        for number in range(WARM_UP + num_rounds):
            for way in sorted(sides, reverse=bool(number % 2)):
                for direction, timed in turn(sides[way], number, pool).items():
                    if number >= WARM_UP:
                        found[way, direction].append(timed)
        own.close()
        tier.close()
    return found
