"""Make engines of the size that an experiment needs, and run one request at a time on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvtier.core.config import CacheConfig
from kvtier.core.types import LoadPolicy
from kvtier.serve.engine import Completion, Engine, EngineConfig, EngineInfo, SamplingParams
from kvtier.tools.bench_serve.options import BenchError, ServeOptions
from kvtier.tools.report.corpus import Corpus, Prompt

SHOWN_TOKENS = 40
DISK_PAGE_BYTES = 4096
"""Page size of the disk; a block takes whole pages."""
REQUEST_TIMEOUT_S = 1800.0
"""Timeout of a single request."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The end of a prompt and the model's greedy continuation: a person sees what was served."""

    ending: str
    continuation: str


@dataclass(frozen=True, slots=True)
class Setting:
    """Common input of all experiments: options, facts about the model, and tokenized text."""

    options: ServeOptions
    info: EngineInfo
    corpus: Corpus
    sample: Sample | None = None

    def prompts(self, num_prompts: int, num_tokens: int) -> list[Prompt]:
        """Return prompts of which no two share a block."""
        return self.corpus.prompts(num_prompts, num_tokens, self.options.block_size)


@contextmanager
def open_engine(
    options: ServeOptions,
    info: EngineInfo,
    device_blocks: int,
    host_blocks: int,
    disk: Path | None = None,
    disk_blocks: int = 0,
    load_policy: LoadPolicy = LoadPolicy.AUTO,
    disk_bytes_per_s: int = 0,
    storage: tuple[str, int] | None = None,
) -> Iterator[Engine]:
    """Yield a running engine with tiers of the given sizes.

    Args:
        options: options of the benchmark.
        info: facts about the model.
        device_blocks: blocks of the device tier.
        host_blocks: blocks of the host tier; 0 turns the cache off.
        disk: directory of the disk tier; None for none.
        disk_blocks: blocks of the disk tier.
        load_policy: when cached blocks are loaded.
        disk_bytes_per_s: throttled rate of the disk; 0 for no limit.
        storage: URL and capacity of a store; None for none.
    """
    slot_bytes = -(-info.bytes_per_block // DISK_PAGE_BYTES) * DISK_PAGE_BYTES
    config = EngineConfig(
        model=options.model,
        device=options.device,
        block_size=options.block_size,
        chunk_tokens=options.chunk_tokens,
        device_capacity=device_blocks * info.bytes_per_block,
        prefix_cache=host_blocks > 0,
        threads=options.threads,
        audit=options.audit,
        cache=CacheConfig(
            host_capacity=host_blocks * info.bytes_per_block,
            load_policy=load_policy,
            disk_path="" if disk is None else str(disk),
            disk_capacity=disk_blocks * slot_bytes,
            disk_bytes_per_s=disk_bytes_per_s,
            storage=() if storage is None else storage[:1],
            storage_capacity=0 if storage is None else storage[1],
        ),
    )
    with Engine(config) as engine:
        yield engine


@contextmanager
def scratch_disk(options: ServeOptions) -> Iterator[Path]:
    """Yield an empty directory for a disk tier, and remove it afterwards."""
    with TemporaryDirectory(prefix="kvtier-bench-", dir=options.disk_path) as folder:
        yield Path(folder) / "slab"


def probe(options: ServeOptions) -> Setting:
    """Load the model once, for its sizes, its tokenizer, and a sample of its text."""
    engine = Engine(
        EngineConfig(
            model=options.model,
            device=options.device,
            block_size=options.block_size,
            chunk_tokens=options.chunk_tokens,
            threads=options.threads,
        )
    )
    corpus = Corpus(engine.tokenizer.encode, options.text, options.seed)
    (prompt,) = corpus.prompts(1, options.chunk_tokens, options.block_size)
    with engine:
        params = SamplingParams(max_tokens=SHOWN_TOKENS)
        completion = engine.submit(prompt, params).result(REQUEST_TIMEOUT_S)
        decode = engine.tokenizer.decode
        sample = Sample(decode(prompt[-SHOWN_TOKENS:]), decode(completion.token_ids))
        return Setting(options, engine.info, corpus, sample)


def run_one(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, salt: str = ""
) -> Completion:
    """Serve one request alone. Raise ``BenchError`` if it is not answered in full."""
    completion = engine.submit(prompt, params, salt=salt).result(REQUEST_TIMEOUT_S)
    check_complete(completion, params)
    return completion


def check_complete(completion: Completion, params: SamplingParams) -> None:
    """Raise ``BenchError`` unless the completion has all requested tokens."""
    if len(completion.token_ids) != params.max_tokens:
        raise BenchError(
            f"a request ended with {completion.finish_reason!r} after "
            f"{len(completion.token_ids)} of {params.max_tokens} tokens: "
            f"{completion.error or 'no reason given'}"
        )


def clear_tiers(engine: Engine, *tiers: str) -> None:
    """Finish all copies, then empty the tiers."""
    settle(engine)
    for tier in tiers:
        engine.clear_tier(tier)


def settle(engine: Engine) -> None:
    """Wait until no request runs and every copy has ended."""
    if not engine.drain():
        raise BenchError("copies did not end within 60 s; is the machine out of memory?")
