"""Mixed traffic without faults, every hit audited: does an audit ever report a difference?

    python -m benchmarks.server.audited              an hour, a table
    python -m benchmarks.server.audited --json -     JSON on stdout, the table on stderr

Small random checkpoints of every kind of model that the engine serves, in every dtype, share the
time. See README.md for the method.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.table import Table

from benchmarks.engines.requests import tokens
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from kvtier.cache.audit import AuditOutcome
from kvtier.core.config import CacheConfig
from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy
from kvtier.observe.specs import AUDITS
from kvtier.serve.engine import Completion, Engine, EngineConfig, Grammar, SamplingParams
from scripts.model_coverage import BLOCK, CHUNK, DTYPES, kinds, outcomes_of, read_record, save

TIERS = (DEVICE, HOST, DISK)
MAX_TOKENS = 500
"""Length of a prompt at which a conversation begins anew."""
NUM_CONVERSATIONS, SALTS = 5, ("", "one tenant", "another")
LEAST_BATCHES = 5
"""Number of batches per engine, whatever the time: enough for hits from every tier."""
JSON_GRAMMAR = '%llguidance {}\nstart: %json {"type": "array", "items": {"type": "integer"}}'


@dataclass(slots=True)
class Row:
    """Counts of one kind of model in one dtype.

    audits: by "TIER OUTCOME".
    """

    kind: str
    dtype: str
    requests: int = 0
    hits: int = 0
    aborted: int = 0
    seconds: float = 0.0
    audits: dict[str, int] = field(default_factory=dict)

    def num(self, outcome: AuditOutcome, *tiers: str) -> int:
        """Return the number of audits with an outcome, in some tiers or all."""
        return sum(self.audits.get(f"{tier} {outcome}", 0) for tier in tiers or TIERS)


class Conversations:
    """Clients of one engine: conversations of several tenants, each turn upon the one before."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._grammar: Grammar | None = None
        self._all = [(SALTS[at % len(SALTS)], self._new()) for at in range(NUM_CONVERSATIONS)]

    def _new(self) -> list[int]:
        # Some begin with the same system prompt.
        shared = tokens(0, self._random.choice((0, 48, 100)))
        return [*shared, *self._text(20, 200)]

    def _text(self, least: int, most: int) -> list[int]:
        return tokens(self._random.randrange(1 << 30), self._random.randrange(least, most))

    def params(self, engine: Engine) -> SamplingParams:
        """Return settings of an answer: greedy, at random, or JSON."""
        params = SamplingParams(max_tokens=self._random.choice((1, 2, 12)), ignore_eos=True)
        form = self._random.randrange(4)
        if form == 0:
            self._grammar = self._grammar or engine.grammar(JSON_GRAMMAR)
            params = replace(params, ignore_eos=False, grammar=self._grammar)
        elif form == 1:
            params = replace(params, temperature=1.0, num_logprobs=2)
        return params

    def send(self, engine: Engine, row: Row, size: int) -> None:
        """Send the next turns of ``size`` conversations together, and add the answers to them."""
        chosen = self._random.sample(range(NUM_CONVERSATIONS), size)
        handles = []
        for at in chosen:
            salt, prompt = self._all[at]
            handles.append(engine.submit(prompt, self.params(engine), salt=salt))
        if size > 2 and self._random.random() < 0.3:
            handles[0].abort()
        for at, handle in zip(chosen, handles, strict=True):
            done = handle.result(3600)
            self._note(done, row)
            salt, prompt = self._all[at]
            if self._random.random() < 0.6:  # others repeat their prompt
                prompt = [*prompt, *done.token_ids, *self._text(1, 80)]
            self._all[at] = salt, prompt if len(prompt) < MAX_TOKENS else self._new()

    def _note(self, done: Completion, row: Row) -> None:
        if done.error:
            raise RuntimeError(f"{row.kind}, {row.dtype}: {done.error}")
        row.requests += 1
        row.hits += bool(done.num_cached_tokens)
        row.aborted += done.finish_reason == "abort"


def serve(config: EngineConfig, conversations: Conversations, row: Row, until: float) -> int:
    """Serve batches until a time, by ``time.monotonic``. Return a capacity that is soon full."""
    with Engine(config) as engine:
        for number in itertools.count():
            if number >= LEAST_BATCHES and time.monotonic() > until:
                break
            size = 1 if number % 2 else NUM_CONVERSATIONS - number // 2 % NUM_CONVERSATIONS
            conversations.send(engine, row, size)
            assert engine.drain()
            for tier in {1: (DEVICE,), 3: (DEVICE, HOST)}.get(number % 4, ()):
                engine.clear_tier(tier)
        for tier, outcome in itertools.product(TIERS, AuditOutcome):
            labels = {"tier": tier, "outcome": outcome}
            num = engine.cache.metrics.registry.get_sample_value(AUDITS.name, labels)
            row.audits[f"{tier} {outcome}"] = row.num(outcome, tier) + int(num or 0)
        room = engine.profile.room
        blocks = next(
            num
            for num in itertools.count(1)
            if room(num, BLOCK, CHUNK) * BLOCK >= 2 * config.max_model_tokens
        )
        return blocks * engine.profile.pool_group(BLOCK).bytes_per_block


def serve_kind(model: Path, disk: Path, row: Row, seconds: float) -> None:
    """Serve one kind of model in one dtype by two engines, one after the other, from one disk.

    The second one's device is small: its blocks are evicted all the time.
    """
    config = EngineConfig(
        model=str(model),
        dtype=row.dtype,
        block_size=BLOCK,
        chunk_tokens=CHUNK,
        device_capacity="24MiB",
        max_model_tokens=MAX_TOKENS + 100,
        threads=1,
        audit=1.0,
        cache=CacheConfig(
            host_capacity="2MiB",
            disk_path=str(disk),
            disk_capacity="64MiB",
            load_policy=LoadPolicy.ALWAYS,  # on a busy machine so small a model computes faster
        ),
    )
    began = time.monotonic()
    conversations = Conversations(f"{row.kind} {row.dtype}")
    capacity = serve(config, conversations, row, began + seconds / 2)
    small = replace(config, device_capacity=capacity)
    serve(small, conversations, row, began + seconds)
    row.seconds = time.monotonic() - began


@contextmanager
def checkpoint(name: str) -> Iterator[Path]:
    """Yield a folder with a small checkpoint of a kind."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        save(name, kinds()[name], Path(folder))
        yield Path(folder)


def run(names: list[str], seconds: float, note: Callable[[Row], None]) -> list[Row]:
    """Serve kinds of models in all dtypes in which they are served, for ``seconds`` in all.

    Each kind comes in one dtype before any comes in the next. An interrupt ends it early.
    """
    served = {
        name: [dtype for dtype in DTYPES if outcomes[dtype].served]
        for name, outcomes in outcomes_of(read_record()).items()
        if not names or name in names
    }
    pairs = [
        (name, dtypes[(number + turn) % len(dtypes)])
        for turn in range(len(DTYPES))
        for number, (name, dtypes) in enumerate(served.items())
        if turn < len(dtypes)
    ]
    end = time.monotonic() + seconds
    rows: list[Row] = []
    with suppress(KeyboardInterrupt):
        for name, dtype in pairs:
            row = Row(name, dtype)
            share = max(0.0, end - time.monotonic()) / (len(pairs) - len(rows))
            with checkpoint(name) as model:
                serve_kind(model, model / dtype, row, share)
            rows.append(row)
            note(row)
    return rows


def table(rows: list[Row]) -> Table:
    """Return a line per dtype and tier."""
    found = []
    for dtype, tier in itertools.product(DTYPES, TIERS):
        own = [row for row in rows if row.dtype == dtype]
        nums = [str(sum(row.num(outcome, tier) for row in own)) for outcome in AuditOutcome]
        without = sum(not row.num(AuditOutcome.EQUAL, tier) for row in own)
        found.append((dtype, tier, str(len(own)), *nums, str(without)))
    return table_of(
        "audits of hits",
        ("dtype", "tier"),
        ("kinds", "equal", "within", "different", "skipped", "none equal"),
        found,
        sections=1,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("server.audited", __doc__)
    parser.add_argument("kinds", nargs="*", help="of docs/models.md (all that are served)")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all kinds together (60)")
    options = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def note(row: Row) -> None:
        nums = ", ".join(f"{name} {num}" for name, num in row.audits.items() if num)
        what = f"{row.kind}, {row.dtype}: {row.seconds:.0f} s, {row.hits} hits; {nums}"
        print(what, file=sys.stderr, flush=True)

    machine = machine_facts()
    rows = run(options.kinds, 60 * options.minutes, note)
    report(options.json, "audited", machine, map(asdict, rows), [], table(rows))
    if any(row.num(AuditOutcome.DIFFERENT) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
