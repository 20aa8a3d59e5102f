"""A store that replicas share: what does another process find there, and how soon?

An engine computes all prompts once and writes them to the store; then it is closed, and another one
opened that has nothing but the store. What is made there has a name of its own, and is removed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import parse_qsl, urlencode

from kvtier.config import parse_size
from kvtier.engine import Engine, SamplingParams
from kvtier.tiers.remote.pruning import make_keeper, prune
from kvtier.tools.bench_serve.engines import Setting, clear_tiers, open_engine, run_one, settle
from kvtier.tools.bench_serve.options import BenchError
from kvtier.tools.report.corpus import Prompt
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
from kvtier.types import DEVICE, HOST

STORE = "store"
"""Name of the tier in this report, whichever store it is."""
OUTPUT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class StoreRow:
    """One prompt.

    cold_ms, ttft_ms: time to first token computed, and with the store. hit_tokens: that came from
    there. same_logits: equal to the first time, bit for bit.
    """

    prompt: int
    cold_ms: float
    ttft_ms: float
    hit_tokens: int
    same_logits: bool


@dataclass(frozen=True, slots=True)
class StoreResult:
    """All prompts, in order.

    where: the store, without what is secret. num_bytes: read from it. lookup_ms: until it had said
    what it has, on average; None for a store that this process knows by heart. num_lookups:
    questions.
    """

    rows: tuple[StoreRow, ...]
    where: str
    prompt_tokens: int
    num_bytes: int
    num_lookups: int
    lookup_ms: float | None

    @property
    def hits(self) -> list[StoreRow]:
        """Prompts of which something came from the store."""
        return [row for row in self.rows if row.hit_tokens]

    @property
    def cold(self) -> Summary:
        summary = summarize([row.cold_ms for row in self.rows])
        assert summary is not None, "there is at least one prompt"
        return summary

    @property
    def warm(self) -> Summary | None:
        """Return the times of the hits; None for no hit."""
        return summarize([row.ttft_ms for row in self.hits])

    @property
    def saved(self) -> Estimate | None:
        """Return the share of the mean time to first token that hits save.

        Against their own cold times.
        """
        pairs = [(row.ttft_ms, row.cold_ms) for row in self.hits]
        return mean_saved(pairs) if pairs else None

    @property
    def hit_tokens(self) -> int:
        return sum(row.hit_tokens for row in self.rows)

    @property
    def all_same(self) -> bool:
        return all(row.same_logits for row in self.rows)

    def as_json(self) -> Mapping[str, object]:
        """Return what was found in the store, and how soon."""
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

    def rows_json(self) -> list[Mapping[str, object]]:
        """One object for each prompt."""
        return [
            {
                "experiment": "store",
                "prompt": row.prompt,
                "cold_ms": round(row.cold_ms, 3),
                "ttft_ms": round(row.ttft_ms, 3),
                "hit_tokens": row.hit_tokens,
                "same_logits": row.same_logits,
            }
            for row in self.rows
        ]


def num_steps(num_prompts: int) -> int:
    """Requests in the whole experiment, for the progress bar."""
    return 2 * num_prompts + 3


def check_store(setting: Setting) -> None:
    """Raise what is wrong with the store, before anything else is measured for an hour."""
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
    """Fill a store by one engine, and ask another one for what is there."""
    options, info = setting.options, setting.info
    count, length = options.ttft_prompts, options.ttft_tokens
    *prompts, warm_up = setting.prompts(count + 1, length)
    cached = options.blocks(options.cached_tokens(length))
    device_blocks = 2 * options.blocks(length + OUTPUT_TOKENS)
    capacity = parse_size(options.storage_capacity, "storage_capacity")
    progress.begin("A store", num_steps(count))
    bench = _Asking(progress)
    sizes = (device_blocks, (count + 1) * cached)
    with scratch_place(options.storage) as (url, where):
        storage = (f"{STORE}={url}", capacity)
        with open_engine(options, info, *sizes, storage=storage) as engine:
            bench.ask(engine, warm_up)
            cold = [bench.ask(engine, prompt) for prompt in prompts]
            settle(engine)
        gc.collect()
        with open_engine(options, info, *sizes, storage=storage) as engine:
            for _ in range(2):  # a load, then what a load runs over is warm
                bench.ask(engine, warm_up)
                clear_tiers(engine, DEVICE, HOST)
            before = _Counts.of(engine)
            warm = [bench.ask(engine, prompt) for prompt in prompts]
            found = _Counts.of(engine).since(before)
    rows = tuple(
        StoreRow(
            number, first.ttft_ms, again.ttft_ms, again.hit_tokens, again.digest == first.digest
        )
        for number, (first, again) in enumerate(zip(cold, warm, strict=True))
    )
    lookup_ms = 1000 * found.lookup_s / found.num_lookups if found.num_lookups else None
    return StoreResult(rows, where, length, int(found.num_bytes), int(found.num_lookups), lookup_ms)


@contextmanager
def scratch_place(url: str) -> Iterator[tuple[str, str]]:
    """A place in a store that nobody else uses: its URL, and what to call the store.

    What is in it is removed at the end.
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
    """Return the URL of a place of its own in the store.

    url: as ``--storage`` has it. A folder of its own in a bucket, else a prefix of keys.
    """
    before, _, query = url.partition("?")
    if before.rpartition("=")[2].startswith("s3:"):
        return f"{before.rstrip('/')}/{name}" + (f"?{query}" if query else "")
    given = dict(parse_qsl(query, keep_blank_values=True))
    given["prefix"] = f"{given.get('prefix', 'kvtier:')}{name}:"
    return f"{before}?{urlencode(given)}"


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of an engine on its store."""

    num_bytes: float
    num_lookups: float
    lookup_s: float

    @classmethod
    def of(cls, engine: Engine) -> _Counts:
        settle(engine)
        registry, tier = engine.cache.metrics.registry, {"tier": STORE}
        route = {"src": STORE, "dst": HOST}
        return cls(
            registry.get_sample_value("kvtier_copied_bytes_total", route) or 0.0,
            registry.get_sample_value("kvtier_lookup_seconds_count", tier) or 0.0,
            registry.get_sample_value("kvtier_lookup_seconds_sum", tier) or 0.0,
        )

    def since(self, before: _Counts) -> _Counts:
        return _Counts(
            self.num_bytes - before.num_bytes,
            self.num_lookups - before.num_lookups,
            self.lookup_s - before.lookup_s,
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    ttft_ms: float
    hit_tokens: int
    digest: bytes


class _Asking:
    """Asks one request after the other."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, keep_logits=True)

    def ask(self, engine: Engine, prompt: Prompt) -> _Answer:
        completion = run_one(engine, prompt, self._params)
        self._progress.advance(f"{completion.ttft_s * 1000:.0f} ms")
        assert completion.logits is not None
        digest = blake2b(completion.logits.tobytes(), digest_size=16).digest()
        return _Answer(completion.ttft_s * 1000, completion.hit_tokens.get(STORE, 0), digest)
