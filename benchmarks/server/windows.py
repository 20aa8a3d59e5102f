"""Models with windows in kvtier's server: bytes on the device, and CPU time of a warm prompt.

    python -m benchmarks.server.windows            tables
    python -m benchmarks.server.windows --json -   JSON on stdout, the tables on stderr
    python -m benchmarks.server.windows --quick    fewer rounds

The bytes of well-known models follow from the number and the windows of their layers. Those of a
running sequence are measured, with random weights: twelve narrow layers, of which five in six have
a window of 512 tokens as in Gemma 3. README.md says the method.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from transformers import Gemma3TextConfig

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report
from benchmarks.server.sources import PROMPT_TOKENS, QUICK_ROUNDS, ROUNDS, measure, table_of
from kvtier.config import BLOCK_SIZE, CHUNK_TOKENS
from kvtier.engine import Engine, SamplingParams
from kvtier.engine.profile import KVProfile
from kvtier.types import DEVICE

CONTEXTS = (2048, 8192, 32768)
"""Tokens of the sequences of well-known models."""


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


def sizes(engine: Engine, prompt: Sequence[int]) -> dict[str, int]:
    """Return the bytes of a running sequence, and those of all its KV."""
    num_blocks = -(-(PROMPT_TOKENS + 64) // BLOCK_SIZE)
    return {
        "held_bytes": held_bytes(engine, prompt),
        "bytes_of_all_kv": num_blocks * engine.info.bytes_per_block,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server.windows", description=__doc__
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(arguments)
    known = Table("MiB of a sequence", *(f"{num:,} tokens" for num in CONTEXTS))
    of_models: dict[str, dict[str, tuple[int, int]]] = {}
    for name, profile in known_models().items():
        each = {str(num): device_bytes(profile, num) for num in CONTEXTS}
        of_models[name] = each
        known.add_row(
            name, *(f"{kept / 2**20:,.0f} of {whole / 2**20:,.0f}" for whole, kept in each.values())
        )
    num_rounds = QUICK_ROUNDS if options.quick else ROUNDS
    medians, held = measure(config(), num_rounds, sizes)
    bytes_table = Table(
        "held on the device", "all KV", title=f"MiB of a running sequence of {PROMPT_TOKENS} tokens"
    )
    bytes_table.add_row(*(f"{num / 2**20:,.1f}" for num in held.values()))
    result = {
        "benchmark": "windows",
        "machine": machine_facts(),
        "rows": [{"rounds": num_rounds, **medians, **held}],
        "models": of_models,
        "targets": [],
    }
    report(result, options.json, known, table_of(medians), bytes_table)


if __name__ == "__main__":
    main()
