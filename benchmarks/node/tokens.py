"""M1: tokens found by engines behind random routing, over one node or with a cache each.

No model is run: requests of a trace pass through index, ladder and policy, as in
``benchmarks.policies``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.node.part import JsonRow, Part
from benchmarks.policies.tiers import TierReplay
from benchmarks.report.targets import judged
from kvtier.core.errors import ConfigError
from kvtier.index.policies.replayed import RUNS
from kvtier.observe.recording import Chains
from kvtier.tools.replay.trace import Trace
from kvtier.tools.replay.traces import ReadOptions, read_traces
from kvtier.tools.report.stats import Estimate, exactly, median_with_interval

NUM_ENGINES = (2, 4)
SHARES = (0.02, 0.05, 0.1, 0.2)
"""Memory of all engines together, as a share of the trace's unique blocks."""
LEAST_RATIO = 1.8
BLOCK_TOKENS = 512
QUICK_REQUESTS = 1500


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens of a trace: those found in a cache, and all."""

    found: int
    asked: int

    @property
    def share(self) -> float:
        return self.found / self.asked


def measure(quick: bool, path: Path) -> Part:
    """Replay a trace with one cache and with one per engine, for several random routings."""
    if not path.is_file():
        raise SystemExit(f"no trace at {path}; name one by --trace, or leave out the part tokens")
    try:
        trace = read_traces([path], ReadOptions(Chains(bytes(32), BLOCK_TOKENS)))
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    requests = _requests(trace, QUICK_REQUESTS if quick else trace.num_requests)
    num_unique = len(np.unique(np.concatenate([keys for _, keys, _ in requests])))
    rows: list[JsonRow] = []
    targets: list[dict[str, object]] = []
    for share in SHARES[1:2] if quick else SHARES:
        capacity = int(share * num_unique)
        together = replay(requests, trace.block_tokens, [0] * len(requests), capacity)
        for num in NUM_ENGINES:
            apart = []
            for seed in range(1 if quick else 6):
                engines = np.random.default_rng(seed).integers(num, size=len(requests)).tolist()
                apart.append(replay(requests, trace.block_tokens, engines, capacity // num))
            ratio = ratio_of(together, apart)
            rows.append(
                {
                    "engines": num,
                    "memory": share,
                    "memory_blocks": capacity,
                    "requests": len(requests),
                    "found in a node": together.share,
                    "found apart": float(np.median([each.share for each in apart])),
                    "ratio": ratio.value,
                }
            )
            targets.append(
                judged("M1", ratio, LEAST_RATIO, at_least=True, engines=num, memory=share)
            )
    return Part(rows, targets)


Request = tuple[float, np.ndarray, int]
"""Time, keys of the blocks, and number of tokens."""


def _requests(trace: Trace, num: int) -> list[Request]:
    chains = np.split(trace.keys, trace.offsets[1:-1])
    all_of = zip(trace.times.tolist(), chains, trace.input_tokens.tolist(), strict=True)
    return [each for each in all_of if len(each[1])][:num]


def replay(
    requests: Sequence[Request], block_tokens: int, engines: Sequence[int], capacity: int
) -> Tokens:
    """Replay requests. Each goes to the engine named, whose cache has room for ``capacity``."""
    caches = [TierReplay(RUNS, max(1, capacity)) for _ in range(max(engines) + 1)]
    found = asked = 0
    for (time_s, keys, num_tokens), engine in zip(requests, engines, strict=True):
        num_blocks = caches[engine].request(keys, time_s)
        tokens = num_tokens or len(keys) * block_tokens
        found += min(num_blocks * block_tokens, tokens)
        asked += tokens
    for cache in caches:
        cache.check_invariants()
    return Tokens(found, asked)


def ratio_of(together: Tokens, apart: Sequence[Tokens]) -> Estimate:
    """Return the ratio of the tokens found together to those found apart, over the routings."""
    if together.found and not all(each.found for each in apart):
        return exactly(float("inf"))
    return median_with_interval([together.found / max(1, each.found) for each in apart])
