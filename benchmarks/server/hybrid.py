"""A hybrid model in kvtier's server: bytes per 4,096 tokens, and CPU time of a warm prompt.

    python -m benchmarks.server.hybrid            a table
    python -m benchmarks.server.hybrid --json -   JSON on stdout, the table on stderr
    python -m benchmarks.server.hybrid --quick    fewer rounds

Four layers of Qwen3-Next's shape (one of attention, three recurrent) with random weights and a
narrow hidden state. README.md says the method.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report
from benchmarks.server.sources import QUICK_ROUNDS, ROUNDS, measure, table_of
from kvtier.cache_layers import CacheLayers
from kvtier.config import BLOCK_SIZE, CHUNK_TOKENS
from kvtier.engine import Engine

LAYERS, ALL_LAYERS = 4, 48


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


def stored_bytes(engine: Engine, prompt: Sequence[int]) -> dict[str, int]:
    """Return the bytes that the first prompt of an engine takes in host memory."""
    used = engine.call(engine.cache.used_slots)["host"]
    num_kv = len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS // BLOCK_SIZE
    size = engine.info.bytes_per_block
    return {"kv_bytes": num_kv * size, "snapshot_bytes": (used - num_kv) * size}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server.hybrid", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(arguments)
    num_rounds = QUICK_ROUNDS if options.quick else ROUNDS
    medians, stored = measure(config(), num_rounds, stored_bytes)
    whole = sizes()
    bytes_table = Table("Qwen3-Next, bfloat16", "MiB")
    for what, num_bytes in whole.items():
        bytes_table.add_row(what.replace("_", " "), f"{num_bytes / 2**20:,.2f}")
    result = {
        "benchmark": "hybrid",
        "machine": machine_facts(),
        "rows": [{"rounds": num_rounds, **medians, **stored}],
        "model": whole,
        "targets": [],
    }
    report(result, options.json, table_of(medians), bytes_table)


if __name__ == "__main__":
    main()
