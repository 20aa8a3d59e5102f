"""Time to the first token when the KV of a prompt comes from a store behind a slow link.

Part of ``python -m benchmarks.codecs --links``. The embedded engine serves a small model with large
KV: 32 KiB per token in bfloat16. Each prompt is computed and stored twice, plain and with
the codec ``lossless``. A new engine then generates its first token over a link of limited bandwidth
to a real Valkey server. Both ways take turns, and each prompt is requested once.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.report.targets import judged
from benchmarks.stores.link import Link
from kvtier.core.config import CacheConfig
from kvtier.core.types import LoadPolicy
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams
from kvtier.serve.engine.model_names import BUILTIN
from kvtier.tools.report.stats import LEAST_VALUES, Estimate, percentile_ratio
from tests.kit.servers import ValkeyServer

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 8, 8, 128
KV_BYTES = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 2
"""KV bytes per token."""
LOADED_TOKENS = 2048
PROMPT_TOKENS = LOADED_TOKENS + 16
"""Loaded tokens, and a few after them that are computed."""
GIGABITS = (1, 10)
CODECS = ("none", "lossless")
MEMORY = 2 << 30
LEAST_SOONER = 1.25


@dataclass(frozen=True, slots=True)
class LinkRow:
    """Time to the first token over one link, medians in seconds."""

    gigabits_per_s: int
    kv_bytes: int
    rounds: int
    plain_s: float
    lossless_s: float
    sooner: Estimate
    """Time without a codec, divided by the time with it."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def target(self) -> dict[str, object] | None:
        """Return the verdict on 1 Gb/s; None for other links."""
        if self.gigabits_per_s != 1:
            return None
        return judged(
            "first token over 1 Gb/s",
            self.sooner,
            LEAST_SOONER,
            at_least=True,
            measure="seconds to the first token as it is, over those with lossless",
        )


def interval(found: Estimate) -> str:
    """Return an estimate as text."""
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def make_model(folder: Path) -> Path:
    """Make a Llama with random weights and the tokenizer of the built-in model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_KV_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=4096,
        max_position_embeddings=4 * PROMPT_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / "kvtier-tiny" / name, folder)
    return folder


@contextmanager
def engine(model: Path, port: int, codec: str) -> Iterator[Engine]:
    """Yield an engine over a store, with empty memory. Each codec has its own key prefix."""
    cache = CacheConfig(
        host_capacity="256MiB",
        storage=(f"valkey://127.0.0.1:{port}?prefix={codec}:",),
        codec=codec,
        load_policy=LoadPolicy.ALWAYS,
        lookup_deadline_s=5.0,
    )
    config = EngineConfig(model=str(model), dtype="bfloat16", device="cpu", cache=cache)
    with Engine(config) as made:
        yield made


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 4000) for _ in range(PROMPT_TOKENS)]


def first_token_s(served: Engine, tokens: list[int]) -> tuple[float, int]:
    """Return the time to the first token, and the tokens that were loaded."""
    done = served.submit(tokens, SamplingParams(max_tokens=1)).result(600)
    assert not done.error, done.error
    return done.ttft_s, done.num_cached_tokens


def measure_links(rounds: int) -> list[LinkRow]:
    """Measure all links, each with ``rounds`` prompts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        for gigabits in GIGABITS:
            place = Path(folder) / f"{gigabits}"
            place.mkdir()
            server = ValkeyServer(place, "--maxmemory", str(MEMORY))
            try:
                rows.append(_measure(model, server, gigabits, rounds))
            finally:
                server.close()
    return rows


def _measure(model: Path, server: ValkeyServer, gigabits: int, rounds: int) -> LinkRow:
    prompts = [prompt(seed) for seed in range(rounds + 1)]
    for codec in CODECS:
        with engine(model, server.port, codec) as writer:
            for tokens in prompts:
                first_token_s(writer, tokens)
            writer.drain()
    link, pairs = Link(server.port, gigabits * 1e9), []
    with ExitStack() as stack:
        stack.callback(link.close)
        readers = [stack.enter_context(engine(model, link.port, codec)) for codec in CODECS]
        for turn, tokens in enumerate(prompts):
            took = {}
            for at in (0, 1) if turn % 2 else (1, 0):
                took[at], num_cached = first_token_s(readers[at], tokens)
                assert num_cached == LOADED_TOKENS, f"{num_cached} tokens were loaded"
                time.sleep(0.1)
            if turn:  # the first one warms up
                pairs.append((took[0], took[1]))
    return LinkRow(
        gigabits,
        KV_BYTES * LOADED_TOKENS,
        rounds,
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        percentile_ratio(pairs, 50, LEAST_VALUES),
    )
