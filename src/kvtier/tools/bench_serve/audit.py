"""``kvtier bench audit``: faults are put in on purpose, one after the other. Is each one found?

For each fault an engine caches a prompt, the KV in one tier becomes wrong, and the prompt is
repeated with every hit audited, until an audit finds a difference. Faults that checksums would find
are left out: these are in bytes that were stored as they are, or copied intact.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from logging.handlers import QueueHandler
from math import ceil, log
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtier.cache.lease import Lease
from kvtier.core.config import CacheConfig
from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy
from kvtier.layout import part_view
from kvtier.observe.specs import AUDITS
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams, paged
from kvtier.serve.engine.attention import attention
from kvtier.tools.bench_serve.engines import clear_tiers, run_one, settle
from kvtier.tools.bench_serve.tamper import Blocks, Damage, damaged
from kvtier.tools.report.corpus import Corpus, Prompt
from kvtier.tools.report.progress import Progress

NUM_CHUNKS = 6
"""Chunks of the prompt that are cached."""
MISSED = 1e-3
"""Probability that an audit of a random chunk misses a fault in one chunk every time."""
PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)
TIERS = (DEVICE, HOST, DISK)

Spoil = Callable[[Engine, Prompt, Prompt], AbstractContextManager[None]]
"""Makes KV of the first prompt wrong; the second one is another whose KV is cached."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    tier: tier that the wrong KV is found in.
    spoil: makes it.
    while_stored: whether ``spoil`` is in effect while the prompt is computed and stored, or begins
        afterwards and lasts while it is used.
    num_wrong: chunks of ``NUM_CHUNKS`` that are wrong, at least.
    """

    name: str
    tier: str
    spoil: Spoil
    while_stored: bool = False
    num_wrong: int = 1

    @property
    def expected_hits(self) -> float:
        """Mean number of audited hits until one finds it."""
        return NUM_CHUNKS / self.num_wrong

    @property
    def max_hits(self) -> int:
        """Number of audited hits of which one finds it, but for a probability of ``MISSED``."""
        part = self.num_wrong / NUM_CHUNKS
        return 1 if part == 1 else ceil(log(MISSED) / log(1 - part))


def _nothing(engine: Engine, prompt: Prompt, other: Prompt) -> AbstractContextManager[None]:
    return nullcontext()


def _swapped(tier: str) -> Spoil:
    def spoil(engine: Engine, prompt: Prompt, other: Prompt) -> AbstractContextManager[None]:
        return damaged(engine, tier, Damage.OTHER, prompt, other, seed=0)

    return spoil


@contextmanager
def _last_token_missing(engine: Engine, prompt: Prompt, other: Prompt) -> Iterator[None]:
    blocks = Blocks(engine, HOST)

    def spoil() -> None:
        place = blocks.places(prompt)[-1]
        content = blocks.read(place)
        for part in range(len(blocks.layout.group.parts)):
            part_view(content, blocks.layout, part)[:, :, -1] = 0
        blocks.write(place, content)

    engine.call(spoil)
    yield


@contextmanager
def _copied_too_early(engine: Engine, prompt: Prompt, other: Prompt) -> Iterator[None]:
    """Copy blocks to host memory while their slots still have what was there before."""
    cache, commit = engine.cache, engine.cache.commit
    tier: Any = cache.places(DEVICE, engine.namespace_of(""), [])[0]
    pool = tier.memory.owner

    def early(lease: Lease, num_blocks: int) -> None:
        computed = pool.clone()
        pool.fill_(0.25)
        commit(lease, num_blocks)
        cache.drain()
        pool.copy_(computed)

    with patch.object(cache, "commit", early):
        yield


@contextmanager
def _other_attention(engine: Engine, prompt: Prompt, other: Prompt) -> Iterator[None]:
    real = attention
    with patch.object(paged, "attention", lambda query, *rest: real(query * 1.1, *rest)):
        yield


@contextmanager
def _other_adapter(engine: Engine, prompt: Prompt, other: Prompt) -> Iterator[None]:
    """Add to the weights what a merged adapter of rank 1 adds."""
    generator = np.random.default_rng(0)
    matrices = [weight.data for weight in engine.module.parameters() if weight.dim() == 2]
    weights = [weight for weight in matrices if len(weight) != engine.info.vocab_size]
    kept = [weight.clone() for weight in weights]
    for weight in weights:
        up, down = (weight.new_tensor(generator.standard_normal(num)) for num in weight.shape)
        weight += 0.5 * weight.std() * up[:, None] * down
    yield
    for weight, values in zip(weights, kept, strict=True):
        weight.copy_(values)


@contextmanager
def _other_positions(engine: Engine, prompt: Prompt, other: Prompt) -> Iterator[None]:
    parts: list[Any] = [*engine.module.modules()]
    tables = [part.inv_freq for part in parts if hasattr(part, "inv_freq")]
    kept = [table.clone() for table in tables]
    for table in tables:
        table.mul_(0.9)
    yield
    for table, values in zip(tables, kept, strict=True):
        table.copy_(values)


FAULTS = (
    Fault("none", HOST, _nothing),
    Fault("a block has another prompt's bytes", DEVICE, _swapped(DEVICE)),
    Fault("a block has another prompt's bytes", HOST, _swapped(HOST)),
    Fault("a block has another prompt's bytes", DISK, _swapped(DISK)),
    Fault("the last token of a block is missing", HOST, _last_token_missing),
    Fault("blocks were copied before they were computed", HOST, _copied_too_early, True, 6),
    Fault("attention was patched when KV was stored", HOST, _other_attention, True, 6),
    Fault("attention was patched when KV was stored", DISK, _other_attention, True, 6),
    Fault("positions had another scale when KV was stored", HOST, _other_positions, True, 6),
    Fault("another adapter was in effect when KV was stored", HOST, _other_adapter, True, 6),
)
"""The first is a control: no audit may find anything."""


@dataclass(frozen=True, slots=True)
class FaultResult:
    """Outcome of one fault.

    Attributes:
        num_hits: audited hits until it was found, or all of them.
        found: whether an audit found a difference in the tier that it is in.
        line: what the log said about it.
        is_used_after: whether KV of the prompt that was stored before is still used after it.
    """

    fault: str
    tier: str
    expected_hits: float
    num_hits: int
    found: bool
    line: str
    is_used_after: bool

    @property
    def is_right(self) -> bool:
        """Whether a fault was found and its KV not used any more; or none where there is none."""
        return self.found == (self.fault != "none") and self.found != self.is_used_after


def run_fault(fault: Fault, config: EngineConfig, seed: int = 0) -> FaultResult:
    """Run one fault on an engine of its own."""
    with (
        TemporaryDirectory(prefix="kvtier-bench-") as folder,
        _differences() as lines,
        Engine(_with_tiers(config, Path(folder) / "slab")) as engine,
    ):
        size = engine.info.chunk_tokens
        corpus = Corpus(engine.tokenizer.encode, seed=seed)
        # One token more, which is computed: all chunks are cached.
        prompt, other = corpus.prompts(2, NUM_CHUNKS * size + 1, size)
        spoil = fault.spoil(engine, prompt, other)
        with spoil if fault.while_stored else nullcontext():
            for tokens in (prompt, other):
                run_one(engine, tokens, PARAMS)
            settle(engine)
        with nullcontext() if fault.while_stored else spoil:
            num_hits, found = 0, False
            while num_hits < fault.max_hits and not found:
                clear_tiers(engine, *TIERS[: TIERS.index(fault.tier)])
                run_one(engine, prompt, PARAMS)
                settle(engine)
                num_hits, found = num_hits + 1, _num_different(engine, fault.tier) > 0
            is_used_after = run_one(engine, prompt, PARAMS).num_cached_tokens > 0
        line = lines.get_nowait().getMessage() if not lines.empty() else ""
    return FaultResult(
        fault.name, fault.tier, fault.expected_hits, num_hits, found, line, is_used_after
    )


def _with_tiers(config: EngineConfig, disk: Path) -> EngineConfig:
    cache = CacheConfig(
        host_capacity="128MiB",
        disk_path=str(disk),
        disk_capacity="128MiB",
        load_policy=LoadPolicy.ALWAYS,
        store_batch_bytes=0,
    )
    return replace(config, cache=cache)


def _num_different(engine: Engine, tier: str) -> float:
    labels = {"tier": tier, "outcome": "different"}
    found = engine.cache.metrics.registry.get_sample_value(AUDITS.name, labels)
    return found or 0.0


@contextmanager
def _differences() -> Iterator[SimpleQueue[logging.LogRecord]]:
    """Yield what the log says about differences, which does not go to stderr meanwhile."""
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger, handler = logging.getLogger("kvtier.cache.audit"), QueueHandler(records)
    logger.addHandler(handler)
    with patch.object(logger, "propagate", False):
        yield records
    logger.removeHandler(handler)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Result of all faults."""

    model: str
    share: float
    rows: Sequence[FaultResult]

    @property
    def is_right(self) -> bool:
        return all(row.is_right for row in self.rows)

    def as_json(self) -> Mapping[str, object]:
        """Return the result as one object, as every benchmark prints it."""
        return {"benchmark": "audit", **asdict(self)}


def run_audit(config: EngineConfig, progress: Progress) -> AuditResult:
    """Put in one fault after the other."""
    progress.begin("faults", len(FAULTS))
    rows = []
    for fault in FAULTS:
        rows.append(run_fault(fault, config))
        progress.advance()
    return AuditResult(config.model, config.audit, rows)


def show_audit(console: Console, result: AuditResult) -> None:
    """Print a table with a line per fault, and what the log said."""
    table = Table(title=f"{result.model}: every hit is audited", title_justify="left", box=None)
    for heading in ("fault", "in", "found", "hits", "expected", "used after"):
        table.add_column(heading, no_wrap=True)
    for row in result.rows:
        table.add_row(
            row.fault,
            row.tier,
            "yes" if row.found else "no",
            str(row.num_hits),
            f"{row.expected_hits:.0f}" if row.fault != "none" else "never",
            "yes" if row.is_used_after else "no",
        )
    console.print(table)
    for row in result.rows:
        cause = re.search(r"likely_cause=(['\"])(.*?)\1", row.line)
        if cause:
            console.print(f"{row.fault}, in {row.tier}: {cause[2]}.")
    console.print(
        "hits: audited until it was found. expected: mean number, one chunk of a hit at random. "
        "used after: whether what was stored before is."
    )
