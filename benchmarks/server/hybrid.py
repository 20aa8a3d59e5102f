"""A hybrid model in kvtier's server: bytes per 4,096 tokens, and CPU time of a warm prompt.

    python -m benchmarks.server.hybrid            a table
    python -m benchmarks.server.hybrid --json -   JSON on stdout, the table on stderr
    python -m benchmarks.server.hybrid --quick    fewer rounds

Four layers of Qwen3-Next's shape (one of attention, three recurrent) with random weights and a
narrow hidden state, one thread, and a new prompt in each round. README.md says the method.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from benchmarks.engines.model import TOKENIZER
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report
from kvtier.cache_layers import CacheLayers
from kvtier.config import BLOCK_SIZE, CHUNK_TOKENS, CacheConfig
from kvtier.engine import Completion, Engine, EngineConfig, SamplingParams
from kvtier.tools.report.stats import median_with_interval
from kvtier.types import DEVICE

PROMPT_TOKENS = 4096 + 64
COLD, WARM = "cold", (DEVICE, "host", "disk")
LAYERS, ALL_LAYERS = 4, 48
PARAMS = SamplingParams(max_tokens=1, ignore_eos=True, keep_logits=True)


def config() -> Any:
    """Return four layers of Qwen3-Next, whose KV and states are as wide as the model's own."""
    return Qwen3NextConfig(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=LAYERS,
        intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        bos_token_id=None,
        eos_token_id=None,
    )


def sizes() -> dict[str, float]:
    """Return the bytes of the whole model, in bfloat16: of its 48 layers, 12 have attention."""
    model: Any = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    layers = CacheLayers(model, BLOCK_SIZE)
    times = ALL_LAYERS // LAYERS
    per_token = times * sum(each.num_bytes for each in layers.pieces) // BLOCK_SIZE
    snapshot = times * sum(each.num_bytes for each in layers.states)
    return {
        "kv_bytes_per_token": per_token,
        "bytes_per_snapshot": snapshot,
        "bytes_per_4096_tokens": 4096 * per_token + snapshot,
        "bytes_per_4096_tokens_at_every_chunk": 4096 * per_token + 4096 // CHUNK_TOKENS * snapshot,
    }


def ask(engine: Engine, prompt: Sequence[int], tier: str = "") -> tuple[float, Completion]:
    """Return the CPU seconds of one token, and the answer. AssertionError if not from ``tier``."""
    assert engine.drain()
    began = time.process_time()
    found = engine.submit(prompt, PARAMS).result(600)
    seconds = time.process_time() - began
    assert not tier or found.hit_tokens == {tier: len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS}
    return seconds, found


def measure(folder: Path, num_rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the CPU seconds of each source and round, and the bytes of a prompt in host memory.

    AssertionError if bits differ.
    """
    settings = EngineConfig(
        model=str(folder / "model"),
        device_capacity="128MiB",
        max_model_tokens=PROMPT_TOKENS + 1,
        threads=1,
        cache=CacheConfig(
            host_capacity="512MiB", disk_path=str(folder / "disk"), disk_capacity="512MiB"
        ),
    )
    made = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 8000, (num_rounds, PROMPT_TOKENS), generator=made).tolist()
    found: dict[str, list[float]] = {source: [] for source in (COLD, *WARM)}
    expected = []
    with Engine(settings) as engine:
        for number, prompt in enumerate(prompts):
            seconds, answer = ask(engine, prompt)
            found[COLD].append(seconds)
            expected.append(answer.logits)
            if not number:
                assert engine.drain()
                used = engine.call(engine.cache.used_slots)["host"]
            for tier in (DEVICE, "host"):
                seconds, answer = ask(engine, prompt, tier)
                found[tier].append(seconds)
                assert np.array_equal(answer.logits, expected[-1]), f"{tier}: other logits"
                assert engine.drain()
                engine.clear_tier(DEVICE)
        size = engine.info.bytes_per_block
        num_kv = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS // BLOCK_SIZE
        stored = {"kv_bytes": num_kv * size, "snapshot_bytes": (used - num_kv) * size}
    with Engine(settings) as engine:
        for prompt, right in zip(prompts, expected, strict=True):
            seconds, answer = ask(engine, prompt, "disk")
            found["disk"].append(seconds)
            assert np.array_equal(answer.logits, right), "disk: other logits"
    return found, stored


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server.hybrid", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
        model.save_pretrained(Path(name, "model"))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, Path(name, "model"))
        found, stored = measure(Path(name), 2 if options.quick else 8)
    medians = {source: 1e3 * median_with_interval(each).value for source, each in found.items()}
    table = Table(*medians, title=f"CPU ms of a prompt of {PROMPT_TOKENS} tokens, medians")
    table.add_row(*(f"{ms:,.0f}" for ms in medians.values()))
    whole = sizes()
    bytes_table = Table("Qwen3-Next, bfloat16", "MiB")
    for what, num_bytes in whole.items():
        bytes_table.add_row(what.replace("_", " "), f"{num_bytes / 2**20:,.2f}")
    row = {"rounds": len(found[COLD]), **medians, **stored}
    result = {
        "benchmark": "hybrid",
        "machine": machine_facts(),
        "rows": [row],
        "model": whole,
        "targets": [],
    }
    report(result, options.json, table, bytes_table)


if __name__ == "__main__":
    main()
