"""A store that replicas share: time to first token in another process.

An engine computes all prompts once and writes them to the store. Then it is closed, and another
engine is opened whose only cached blocks are those in the store. The blocks are written below a
name of their own, and removed at the end.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from kvtier.core.config import parse_size
from kvtier.core.types import DEVICE, HOST
from kvtier.observe import specs
from kvtier.serve.engine import Engine
from kvtier.tiers.remote.pruning import make_keeper, prune
from kvtier.tools.bench_serve.engines import Setting, clear_tiers, open_engine, settle
from kvtier.tools.bench_serve.experiment import ExperimentResult, RequestRunner
from kvtier.tools.bench_serve.options import BenchError
from kvtier.tools.report.progress import Progress
from kvtier.tools.report.stats import (
    Estimate,
    Summary,
    mean_saved,
    rounded,
    summarize,
    summary_json,
    value_json,
)

STORE = "store"
"""Name of the tier in this report, for any store."""
OUTPUT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class StoreRow:
    """One prompt.

    cold_ms, ttft_ms: time to first token when computed, and with the store. hit_tokens: tokens from
    the store. same_logits: whether the logits are equal, bit for bit.
    """

    prompt: int
    cold_ms: float
    ttft_ms: float
    hit_tokens: int
    same_logits: bool


@dataclass(frozen=True)
class StoreResult(ExperimentResult):
    """All prompts, in order.

    Attributes:
        where: the store, without secrets.
        num_bytes: bytes read from the store.
        num_lookups: number of look-ups in it.
        lookup_ms: mean duration of a look-up; None if there were none.
    """

    name = "store"
    rows: tuple[StoreRow, ...]
    where: str
    num_bytes: int
    num_lookups: int
    lookup_ms: float | None

    @property
    def hits(self) -> list[StoreRow]:
        """Prompts with tokens from the store."""
        return [row for row in self.rows if row.hit_tokens]

    @property
    def cold(self) -> Summary:
        summary = summarize([row.cold_ms for row in self.rows])
        assert summary is not None, "there is at least one prompt"
        return summary

    @property
    def warm(self) -> Summary | None:
        """Times of the hits; None if there are none."""
        return summarize([row.ttft_ms for row in self.hits])

    @property
    def saved(self) -> Estimate | None:
        """Share of the mean time to first token that hits save, against their own cold times."""
        pairs = [(row.ttft_ms, row.cold_ms) for row in self.hits]
        return mean_saved(pairs) if pairs else None

    @property
    def hit_tokens(self) -> int:
        return sum(row.hit_tokens for row in self.rows)

    @property
    def all_same(self) -> bool:
        return all(row.same_logits for row in self.rows)

    def as_json(self) -> Mapping[str, object]:
        return {
            "where": self.where,
            "prompts": len(self.rows),
            "hits": len(self.hits),
            "hit_tokens": self.hit_tokens,
            "prompt_tokens": self.prompt_tokens,
            "ttft_ms": {"cold": self.cold.as_json(), "store": summary_json(self.warm)},
            "reduction": value_json(self.saved),
            "bytes_read": self.num_bytes,
            "lookups": self.num_lookups,
            "lookup_ms": rounded(self.lookup_ms, 3),
            "same_logits": sum(row.same_logits for row in self.rows),
        }


def check_store(setting: Setting) -> None:
    """Raise an error if the store can't be used, before other experiments run for an hour."""
    options = setting.options
    cached = options.blocks(options.cached_tokens(options.ttft_tokens))
    needed = (options.ttft_prompts + 1) * cached * setting.info.bytes_per_block
    capacity = parse_size(options.storage_capacity, "storage_capacity")
    if capacity < needed:
        raise BenchError(
            f"storage_capacity: {capacity} bytes are below the {needed} of all prompts' KV; raise "
            "it, or ask for fewer or shorter prompts"
        )
    keeper = make_keeper(options.storage)
    try:
        keeper.test()
    finally:
        keeper.close()


def measure_store(setting: Setting, progress: Progress) -> StoreResult:
    """Fill a store by one engine, and request its prompts from another one."""
    options, info = setting.options, setting.info
    count, length = options.ttft_prompts, options.ttft_tokens
    *prompts, warm_up = setting.prompts(count + 1, length)
    cached = options.blocks(options.cached_tokens(length))
    device_blocks = 2 * options.blocks(length + OUTPUT_TOKENS)
    capacity = parse_size(options.storage_capacity, "storage_capacity")
    progress.begin("A store", 2 * count + 3)
    bench = RequestRunner(progress, OUTPUT_TOKENS)
    sizes = (device_blocks, (count + 1) * cached)
    with scratch_place(options.storage) as (url, where):
        storage = (f"{STORE}={url}", capacity)
        with open_engine(options, info, *sizes, storage=storage) as engine:
            bench.ask(engine, warm_up)
            cold = [bench.ask(engine, prompt) for prompt in prompts]
            settle(engine)
        gc.collect()
        with open_engine(options, info, *sizes, storage=storage) as engine:
            for _ in range(2):  # compute, then load: warms up the load path
                bench.ask(engine, warm_up)
                clear_tiers(engine, DEVICE, HOST)
            before = _Counts.of(engine)
            warm = [bench.ask(engine, prompt) for prompt in prompts]
            found = _Counts.of(engine).since(before)
    rows = tuple(
        StoreRow(
            number,
            first.ttft_ms,
            again.ttft_ms,
            again.hit_tokens.get(STORE, 0),
            again.digest == first.digest,
        )
        for number, (first, again) in enumerate(zip(cold, warm, strict=True))
    )
    lookup_ms = 1000 * found.lookup_s / found.num_lookups if found.num_lookups else None
    return StoreResult(rows, length, where, int(found.num_bytes), int(found.num_lookups), lookup_ms)


@contextmanager
def scratch_place(url: str) -> Iterator[tuple[str, str]]:
    """Yield the URL of an unused place in a store, and the name of the store for messages.

    Blocks in that place are removed at the end.
    """
    keeper = make_keeper(url)
    where = keeper.where
    keeper.close()
    place = _place_in(url, f"bench-{os.urandom(4).hex()}")
    yield place, where
    keeper = make_keeper(place)
    try:
        prune(keeper, max_bytes=0)
    finally:
        keeper.close()


def _place_in(url: str, name: str) -> str:
    """Return the URL of a place named ``name`` in the store.

    It is a folder in a bucket, otherwise a prefix of keys.

    url: URL of the store, as in ``--storage``.
    """
    before, _, query = url.partition("?")
    if before.rpartition("=")[2].startswith("s3:"):
        return f"{before.rstrip('/')}/{name}" + (f"?{query}" if query else "")
    given = dict(parse_qsl(query, keep_blank_values=True))
    given["prefix"] = f"{given.get('prefix', 'kvtier:')}{name}:"
    return f"{before}?{urlencode(given)}"


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters of an engine's use of its store."""

    num_bytes: float
    num_lookups: float
    lookup_s: float

    @classmethod
    def of(cls, engine: Engine) -> _Counts:
        settle(engine)
        registry, tier = engine.cache.metrics.registry, {"tier": STORE}
        route = {"src": STORE, "dst": HOST}
        return cls(
            registry.get_sample_value(specs.COPIED_BYTES.name, route) or 0.0,
            registry.get_sample_value(f"{specs.LOOKUP_SECONDS.name}_count", tier) or 0.0,
            registry.get_sample_value(f"{specs.LOOKUP_SECONDS.name}_sum", tier) or 0.0,
        )

    def since(self, before: _Counts) -> _Counts:
        return _Counts(
            self.num_bytes - before.num_bytes,
            self.num_lookups - before.num_lookups,
            self.lookup_s - before.lookup_s,
        )
