"""P: hit ratios of models whose KV groups have blocks of different lengths.

    python -m benchmarks.policies.groups --traces DIR            a table
    python -m benchmarks.policies.groups --traces DIR --json -   JSON on stdout as well

The requests of traces go through index and ladder, by the rules of kvtier's connectors for vLLM and
SGLang, and through the cache of the embedded engine. Needs zstd. See README.md for the method.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

from rich.table import Table

from benchmarks.policies.tiers import NAMESPACE, AtOnce
from benchmarks.policies.traces import (
    BLOCK_TOKENS,
    FOLDER,
    Keys,
    Trace,
    agentic,
    conversation,
    default_folder,
)
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.report.targets import judged
from kvtier.cache.block_cache import BlockState
from kvtier.cache.ladder import LadderOptions
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.states import SnapshotCache, WindowCache, WindowShape
from kvtier.connectors.sglang.shared.prefix_hits import side_cuts
from kvtier.connectors.vllm.shared.names import EngineFacts, GroupFacts
from kvtier.connectors.vllm.shared.prompt import GROUP_BYTES, RequestBlocks, group_key
from kvtier.connectors.vllm.shared.reach import Cuts
from kvtier.core.config import CacheConfig
from kvtier.core.types import HOST, Label, LoadPolicy, WritePolicy
from kvtier.devices.cpu import CpuDevice
from kvtier.index import make_key_index
from kvtier.layout import DType, full_attention, named_layout
from kvtier.testing import host_memory
from kvtier.tiers import DeviceTier, DistantAllocator
from kvtier.tools.report.stats import exactly

OURS, LRU = "runs", "lru"
POLICIES = (OURS, LRU)
MAX_BELOW_LRU = 0.3
SHARES = (0.01, 0.02, 0.05, 0.1)
SESSIONS, HOURS, SEED = 30, 0.35, 11


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group.

    reach: tokens in front of a cut whose blocks it needs; 1 for a state, 0 for all tokens.
    """

    block_tokens: int
    reach: int = 0

    @property
    def spec(self) -> object:
        """A KV cache spec as vLLM would have."""
        if self.reach < 2:
            return SimpleNamespace()
        return SlidingWindowSpec(self.reach + 1)


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """Stands for vLLM's class of this name."""

    sliding_window: int


def windows(tokens: int, block_tokens: int) -> Group:
    return Group(block_tokens, tokens - 1)


FULL, STATES = Group(512), Group(4096, 1)
MODELS = {
    "windows of 128": (FULL, windows(128, 128)),
    "windows of 1,024": (FULL, windows(1024, 128)),
    "windows of 4,096": (FULL, windows(4096, 128)),
    "windows of 512, longer blocks": (Group(128), windows(512, 512)),
    "states": (FULL, STATES),
    "states, windows of 128": (FULL, windows(128, 128), STATES),
    "states, windows of 1,024": (FULL, windows(1024, 512), STATES),
    "states, windows of 4,096": (FULL, windows(4096, 256), STATES),
}
"""Groups by what a model has besides full attention. States are every 4,096 tokens."""


class GroupReplay:
    """A host tier of ``capacity_blocks``, used as vLLM's scheduler does.

    All blocks take one slot, as in kvtier's tiers under vLLM.

    Attributes:
        num_hits: tokens in front of the last cut, at each request's arrival, for which every group
            has what it needs.
    """

    def __init__(self, groups: tuple[Group, ...], policy: str, capacity_blocks: int) -> None:
        self.num_hits = 0
        self._groups = groups
        sizes = [group.block_tokens for group in groups]
        self._grain, self._every = math.gcd(*sizes), math.lcm(*sizes)
        facts = tuple(GroupFacts(at, size, ()) for at, size in enumerate(sizes))
        vllm_groups = [SimpleNamespace(kv_cache_spec=group.spec) for group in groups]
        self._cuts = Cuts.of(EngineFacts(facts, 0, 1, self._grain, ""), vllm_groups)
        self._now = 0.0
        host = DistantAllocator(capacity_blocks)
        host.open(capacity_blocks)
        self._index = make_key_index({HOST: policy}, lambda: NAMESPACE, GROUP_BYTES)
        self._cache = LocalBlockCache(
            self._index,
            {HOST: host},
            AtOnce([]),
            LadderOptions(1),
            lambda: NAMESPACE,
            lambda: self._now,
        )

    def path(self, keys: Keys) -> dict[bytes, int]:
        """Return the blocks of a prompt that vLLM stores, in its order, and where each ends.

        A prefix is named by the trace's block that it ends in, and where.
        """
        names = [key.tobytes() for key in keys]
        ends: dict[bytes, int] = {}
        for number, group in enumerate(self._groups):
            size = group.block_tokens
            for end in range(size, len(keys) * BLOCK_TOKENS + 1, size):
                at, rest = divmod(end - 1, BLOCK_TOKENS)
                ends[group_key(names[at] + rest.to_bytes(2, "big"), number)] = end
        return {key: ends[key] for key in RequestBlocks("", ends).path(self._grain, self._cuts)}

    def request(self, keys: Keys, now_s: float) -> None:
        self._now = now_s
        ends = self.path(keys)
        path = list(ends)
        self._cache.on_request(path)
        cut = self._find_cut(ends, len(keys) * BLOCK_TOKENS)
        needed = [key for key in path if self._is_needed(key, ends[key], cut)]
        self._cache.hold(needed)
        self._cache.release(needed)
        new = [key for key in path if ends[key] > cut]
        room = self._cache.reserve(new)
        if room is None:  # as many as there is room for
            room = self._cache.reserve(new[: self._cache.ladder.num_available(HOST)])
        if room is not None:
            self._cache.commit(room.keys, [0] * len(room.keys))
        self._cache.touch(path)  # as vLLM reports a finished request
        self._cache.take_changes()
        self.num_hits += cut

    def _find_cut(self, ends: dict[bytes, int], num_tokens: int) -> int:
        states = self._cache.locate_all(list(ends))
        pairs = zip(ends.items(), states, strict=True)
        missing = [item for item, state in pairs if state is not BlockState.MEMORY]
        for cut in range(num_tokens // self._every * self._every, 0, -self._every):
            if not any(self._is_needed(key, end, cut) for key, end in missing):
                return cut
        return 0

    def _is_needed(self, key: bytes, end: int, cut: int) -> bool:
        return end <= cut and cut - end < (self._groups[key[-1]].reach or cut)

    def check_invariants(self) -> None:
        self._cache.check_invariants()
        self._index.check_invariants()


POOLS = {
    "SGLang, states": 1,
    "SGLang, windows of 1,024": 2,
    "SGLang, windows of 4,096": 8,
}
"""Pages in front of a cut that a pool beside the KV pool needs; it gets the last of a prompt."""


class PoolReplay:
    """Two pools of ``capacity_blocks`` pages each, used as SGLang's tree does.

    A page is a block of the trace. Its last one, which is not whole, is none.

    Attributes:
        num_hits: tokens in front of the last cut, at each request's arrival.
    """

    def __init__(self, num_last: int, policy: str, capacity_blocks: int) -> None:
        self.num_hits = 0
        self._num_last = num_last
        self._now = 0.0
        self._kv, self._side = (self._pool(policy, capacity_blocks) for _ in range(2))
        self._side.set_num_last(num_last)

    def _pool(self, policy: str, capacity_blocks: int) -> LocalBlockCache:
        host = DistantAllocator(capacity_blocks)
        host.open(capacity_blocks)
        index = make_key_index({HOST: policy}, lambda: NAMESPACE)
        options, mover = LadderOptions(1), AtOnce([])
        return LocalBlockCache(
            index, {HOST: host}, mover, options, lambda: NAMESPACE, lambda: self._now
        )

    def request(self, keys: Keys, now_s: float) -> None:
        self._now = now_s
        path = [key.tobytes() for key in keys[:-1]]
        in_kv, in_side = (
            [state is BlockState.MEMORY for state in pool.locate_all(path)]
            for pool in (self._kv, self._side)
        )
        num_found = [*in_kv, False].index(False)
        cut = max(side_cuts(in_side, self._num_last, num_found), default=0)
        last = slice(max(0, cut - self._num_last), cut)
        tail = path[max(cut, len(path) - self._num_last) :]
        for pool, loaded, new in (
            (self._kv, path[:cut], path[cut:]),
            (self._side, path[last], tail),
        ):
            pool.on_request(path)
            pool.hold(loaded)
            pool.release(loaded)
            room = pool.reserve(new)
            if room is None:  # as many as there is room for
                room = pool.reserve(new[: pool.ladder.num_available(HOST)])
            if room is not None:
                pool.commit(room.keys, [0] * len(room.keys))
            pool.touch([*loaded, *new])
            pool.take_changes()
        self.num_hits += cut * BLOCK_TOKENS

    def check_invariants(self) -> None:
        self._kv.check_invariants()
        self._side.check_invariants()


ENGINE_DEVICE_BLOCKS = 600
"""More than the longest prompt takes."""
CHUNK_BLOCKS = 2
STATE_BLOCKS = 6
"""Blocks as large as a state: Qwen3-Next's is three quarters of the KV of 4,096 tokens."""
ENGINE_GROUP = full_attention(1, 1, 1, DType.FLOAT16, BLOCK_TOKENS)
ENGINES = {
    "embedded engine, states": 0,
    "embedded engine, windows of 1,024": 1024,
    "embedded engine, windows of 4,096": 4096,
}
"""Tokens of the window; 0 for states. As many layers have a window as have none."""


class EngineReplay:
    """The embedded engine's cache, with a host tier of ``capacity_blocks``, and tiny KV.

    Attributes:
        num_hits: as of ``PoolReplay``.
    """

    def __init__(self, window: int, policy: str, capacity_blocks: int) -> None:
        self.num_hits = 0
        self._now = 0.0
        layout = named_layout("layer_first", ENGINE_GROUP, ENGINE_DEVICE_BLOCKS)
        pool = DeviceTier(host_memory(layout.nbytes), layout)
        config = CacheConfig(
            host_capacity=capacity_blocks * ENGINE_GROUP.bytes_per_block,
            eviction_policy=policy,
            load_policy=LoadPolicy.ALWAYS,
            write_policy=WritePolicy.WRITE_THROUGH,
        )
        given = config, CpuDevice(), pool, lambda: self._now
        self._cache: SnapshotCache | WindowCache
        if window:
            shape = WindowShape(window, 1, BLOCK_TOKENS, CHUNK_BLOCKS)
            self._cache = WindowCache(*given, shape=shape)
        else:
            self._cache = SnapshotCache(
                *given, blocks_per_snapshot=STATE_BLOCKS, grain_blocks=CHUNK_BLOCKS
            )

    def request(self, keys: Keys, now_s: float) -> None:
        self._now = now_s
        labels = [Label(key.tobytes()) for key in keys[:-1]]  # the last block is not whole
        if not labels:
            return
        num_blocks = len(labels)
        num_tokens = num_blocks * BLOCK_TOKENS + 1
        lease = self._cache.fetch(
            NAMESPACE, labels, num_tokens, num_blocks + 1, grain_blocks=CHUNK_BLOCKS
        )
        assert lease is not None, "one request has room"
        assert lease.decision is not None
        assert self._cache.drain()
        cut = lease.decision.plan.num_reused_blocks
        for at in range(cut + CHUNK_BLOCKS, num_blocks + 1, CHUNK_BLOCKS):
            lease.snapshot_slots(at)  # the engine would write there
            self._cache.commit(lease, at)
        self._cache.commit(lease, num_blocks)
        self._cache.release(lease)
        assert self._cache.drain()
        self.num_hits += cut * BLOCK_TOKENS

    def check_invariants(self) -> None:
        self._cache.check_invariants()


@dataclass(frozen=True, slots=True)
class Row:
    """One policy, model and capacity."""

    trace: str
    model: str
    policy: str
    share: float
    """Capacity as a share of the trace's unique blocks of all groups."""
    capacity_blocks: int
    hit_ratio: float


_replayed: list[Trace] = []
"""Traces in a worker process."""


def measure(number: int, model: str, share: float) -> list[Row]:
    """Replay a whole trace under each policy, beginning with an empty tier."""
    trace, unique, rows = _replayed[number], set[int](), []
    make: Callable[[str, int], GroupReplay | PoolReplay | EngineReplay]
    if model in POOLS:
        make, capacity = partial(PoolReplay, POOLS[model]), int(share * trace.num_unique)
    elif model in ENGINES:
        make, capacity = partial(EngineReplay, ENGINES[model]), int(share * trace.num_unique)
    else:
        make = partial(GroupReplay, MODELS[model])
        maker = GroupReplay(MODELS[model], LRU, 1)
        for keys in trace.chains:
            unique.update(map(hash, maker.path(keys)))
        capacity = int(share * len(unique))
    for policy in POLICIES:
        replay = make(policy, capacity)
        for at, keys in zip(trace.times, trace.chains, strict=True):
            replay.request(keys, at)
        replay.check_invariants()
        ratio = replay.num_hits / (trace.num_refs * BLOCK_TOKENS)
        rows.append(Row(trace.name, model, policy, share, capacity, ratio))
    return rows


def gains(rows: list[Row]) -> list[float]:
    """Return by how many points ``runs`` finds more than LRU, for each model and capacity."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [100 * (ours.hit_ratio - lru.hit_ratio) for ours, lru in pairs]


def targets(rows: list[Row]) -> list[dict[str, object]]:
    below = exactly(-min(gains(rows)))
    mean = exactly(statistics.fmean(gains(rows)))
    return [
        judged("P", below, MAX_BELOW_LRU, at_least=False, digits=2, column="below LRU, points"),
        judged("P", mean, 0.0, at_least=True, digits=2, column="above LRU in the mean, points"),
    ]


def tables(rows: list[Row]) -> Iterator[Table]:
    """Yield a table per trace: a line per model, and the hits of both policies per size."""
    shares = list(dict.fromkeys(row.share for row in rows))
    for trace in dict.fromkeys(row.trace for row in rows):
        lines = []
        for model in dict.fromkeys(row.model for row in rows):
            found = {
                (row.share, row.policy): 100 * row.hit_ratio
                for row in rows
                if (row.trace, row.model) == (trace, model)
            }
            cells = (f"{found[at, OURS]:.2f} ({found[at, LRU]:.2f})" for at in shares)
            lines.append([model, *cells])
        headings = [f"{100 * share:g} %" for share in shares]
        yield table_of(f"{trace}: hits of runs (LRU), % of tokens", ("model",), headings, lines)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("policies.groups", __doc__)
    parser.add_argument(
        "--traces",
        type=Path,
        default=default_folder(),
        help=f"folder of the traces; else ${FOLDER}, or shared/traces beside the sources",
    )
    names = [*MODELS, *POOLS, *ENGINES]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--shares", nargs="+", type=float, default=list(SHARES), help="of the unique blocks"
    )
    parser.add_argument("--only", choices=["conversation", "agentic"], help="one trace")
    parser.add_argument("--processes", type=int, default=2, help="(2)")
    options: argparse.Namespace = parser.parse_args(arguments)
    if not options.traces.is_dir():
        print(f"policies: left out, no traces in {options.traces}", file=sys.stderr)
        return
    traces = []
    if options.only in (None, "conversation"):
        traces.append(conversation(options.traces))
    if options.only in (None, "agentic"):
        traces.append(agentic(options.traces, SESSIONS, HOURS, SEED))
    jobs = [
        (number, model, share)
        for number in range(len(traces))
        for model in options.models
        for share in options.shares
    ]
    machine, fork = machine_facts(), get_context("fork")
    with ProcessPoolExecutor(options.processes, fork, _replayed.extend, (traces,)) as pool:
        rows = [row for pair in pool.map(measure, *zip(*jobs, strict=True)) for row in pair]
    report(options.json, "policies_groups", machine, rows, targets(rows), *tables(rows))


if __name__ == "__main__":
    main()
