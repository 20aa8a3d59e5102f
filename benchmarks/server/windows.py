"""Models with windows in kvtier's server: bytes on the device, and CPU time of a warm prompt.

    python -m benchmarks.server.windows            tables
    python -m benchmarks.server.windows --json -   JSON on stdout, the tables on stderr
    python -m benchmarks.server.windows --quick    fewer rounds

The bytes of well-known models follow from the number and the windows of their layers. Those of a
running sequence are measured, with random weights: twelve narrow layers, of which five in six have
a window of 512 tokens as in Gemma 3, one thread, and a new prompt in each round. README.md says the
method.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from benchmarks.engines.model import TOKENIZER
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report
from kvtier.config import BLOCK_SIZE, CHUNK_TOKENS, CacheConfig
from kvtier.engine import Completion, Engine, EngineConfig, SamplingParams
from kvtier.engine.profile import KVProfile
from kvtier.tools.report.stats import median_with_interval
from kvtier.types import DEVICE

CONTEXTS = (2048, 8192, 32768)
"""Tokens of the sequences of well-known models."""

PROMPT_TOKENS = 4096 + 64
COLD, WARM = "cold", (DEVICE, "host", "disk")
PARAMS = SamplingParams(max_tokens=1, ignore_eos=True, keep_logits=True)


def known_models() -> Mapping[str, KVProfile]:
    """Return well-known models, in bfloat16. Their windows are those of their configurations."""

    def model(windows: Sequence[int], heads: int, dim: int) -> KVProfile:
        shape = (heads, dim)
        return KVProfile(
            num_layers=len(windows),
            shapes=(shape, shape),
            dtype=torch.bfloat16,
            is_latent=False,
            layer_windows=tuple(windows),
            has_softcap=False,
            has_sinks=False,
            num_shared=0,
        )

    def every_sixth(num_layers: int, window: int) -> list[int]:
        return [window if (layer + 1) % 6 else 0 for layer in range(num_layers)]

    return {
        "Gemma 3 1B": model(every_sixth(26, 512), 1, 256),
        "Gemma 3 27B": model(every_sixth(62, 1024), 16, 128),
        "Gemma 2 9B": model([4096, 0] * 21, 8, 256),
        "gpt-oss-20b": model([128, 0] * 12, 8, 64),
        "Mistral 7B v0.1": model([4096] * 32, 8, 128),
    }


def device_bytes(profile: KVProfile, num_tokens: int) -> tuple[int, int]:
    """Return the device memory of a running sequence: with all KV, and with rings."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    num_kept = profile.pool_blocks(num_blocks, BLOCK_SIZE, CHUNK_TOKENS)
    return (
        num_blocks * profile.group(BLOCK_SIZE).bytes_per_block,
        num_kept * profile.pool_group(BLOCK_SIZE).bytes_per_block,
    )


def config() -> Any:
    """Return twelve narrow layers of Gemma 3's kind."""
    return Gemma3TextConfig(
        vocab_size=8192,
        hidden_size=256,
        num_hidden_layers=12,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=128,
        sliding_window=512,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )


def ask(engine: Engine, prompt: Sequence[int], tier: str = "") -> tuple[float, Completion]:
    """Return the CPU seconds of one token, and the answer. AssertionError if not from ``tier``."""
    assert engine.drain()
    began = time.process_time()
    found = engine.submit(prompt, PARAMS).result(600)
    seconds = time.process_time() - began
    assert not tier or found.hit_tokens == {tier: len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS}
    return seconds, found


def held_bytes(engine: Engine, prompt: Sequence[int]) -> int:
    """Return the bytes of device memory that a running sequence holds, by the index."""
    found: list[int] = []

    def look(_: object) -> None:
        (request,) = engine._scheduler.running
        index = engine.cache._index
        leased = sum(index.num_leases(node.block, DEVICE) > 0 for node in index.nodes())
        assert request.lease is not None
        if not engine.cache._ladder.transfers.transfers:  # copies hold blocks, too
            found.append((leased + len(request.lease.room)) * engine.cache.group.bytes_per_block)

    params = SamplingParams(max_tokens=64, ignore_eos=True)
    engine.submit(prompt, params, on_token=look).result(600)
    assert found, "copies were in flight all the time"
    assert len(set(found)) == 1, "a sequence that decodes holds what it has"
    return found[0]


def measure(folder: Path, num_rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the CPU seconds of each source and round, and bytes of a running sequence.

    AssertionError if bits differ.
    """
    settings = EngineConfig(
        model=str(folder / "model"),
        device_capacity="256MiB",
        threads=1,
        cache=CacheConfig(
            host_capacity="1GiB", disk_path=str(folder / "disk"), disk_capacity="1GiB"
        ),
    )
    made = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 8000, (num_rounds, PROMPT_TOKENS), generator=made).tolist()
    found: dict[str, list[float]] = {source: [] for source in (COLD, *WARM)}
    expected = []
    with Engine(settings) as engine:
        for prompt in prompts:
            seconds, answer = ask(engine, prompt)
            found[COLD].append(seconds)
            expected.append(answer.logits)
            for tier in (DEVICE, "host"):
                seconds, answer = ask(engine, prompt, tier)
                found[tier].append(seconds)
                assert np.array_equal(answer.logits, expected[-1]), f"{tier}: other logits"
                assert engine.drain()
                engine.clear_tier(DEVICE)
        num_blocks = -(-(PROMPT_TOKENS + 64) // BLOCK_SIZE)
        sizes = {
            "held_bytes": held_bytes(engine, prompts[0]),
            "bytes_of_all_kv": num_blocks * engine.info.bytes_per_block,
        }
    with Engine(settings) as engine:
        for prompt, right in zip(prompts, expected, strict=True):
            seconds, answer = ask(engine, prompt, "disk")
            found["disk"].append(seconds)
            assert np.array_equal(answer.logits, right), "disk: other logits"
    return found, sizes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server.windows", description=__doc__
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    known = Table("MiB of a sequence", *(f"{num:,} tokens" for num in CONTEXTS))
    of_models: dict[str, dict[str, tuple[int, int]]] = {}
    for name, profile in known_models().items():
        each = {str(num): device_bytes(profile, num) for num in CONTEXTS}
        of_models[name] = each
        known.add_row(
            name, *(f"{kept / 2**20:,.0f} of {whole / 2**20:,.0f}" for whole, kept in each.values())
        )
    with TemporaryDirectory() as name:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
        model.save_pretrained(Path(name, "model"))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, Path(name, "model"))
        found, sizes = measure(Path(name), 2 if options.quick else 8)
    medians = {source: 1e3 * median_with_interval(each).value for source, each in found.items()}
    table = Table(*medians, title=f"CPU ms of a prompt of {PROMPT_TOKENS} tokens, medians")
    table.add_row(*(f"{ms:,.0f}" for ms in medians.values()))
    bytes_table = Table(
        "held on the device", "all KV", title=f"MiB of a running sequence of {PROMPT_TOKENS} tokens"
    )
    bytes_table.add_row(*(f"{num / 2**20:,.1f}" for num in sizes.values()))
    result = {
        "benchmark": "windows",
        "machine": machine_facts(),
        "rows": [{"rounds": len(found[COLD]), **medians, **sizes}],
        "models": of_models,
        "targets": [],
    }
    report(result, options.json, known, table, bytes_table)


if __name__ == "__main__":
    main()
