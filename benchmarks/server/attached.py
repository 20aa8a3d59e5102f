"""A1: CPU time of a prompt under `kvtier.attach`, against `generate` alone.

    python -m benchmarks.server.attached            a table
    python -m benchmarks.server.attached --json -   JSON on stdout, the table on stderr
    python -m benchmarks.server.attached --quick    fewer rounds

The built-in model, one thread, and a new prompt in each round. README.md says the method.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

import kvtier
from benchmarks.engines.model import TOKENIZER as MODEL
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report
from benchmarks.report.targets import judged
from kvtier.tools.report.stats import median_with_interval

PROMPT_TOKENS = 3000
CHUNKS = (256, 128)
ONE_SHOT, CHUNKED, COLD, WARM = "one shot", "chunked", "attached, cold", "from host memory"
MOST_SHARE = 0.1


def generate(model: Any, ids: torch.Tensor, **options: int) -> tuple[float, torch.Tensor]:
    """Return the CPU seconds of one token, and its logits."""
    began = time.process_time()
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return time.process_time() - began, found.logits[0]


def measure(chunk_tokens: int, num_rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each way and round. AssertionError if bits differ."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    found: dict[str, list[float]] = {way: [] for way in (ONE_SHOT, CHUNKED, COLD, WARM)}
    for number in range(num_rounds + 1):
        seeded = torch.Generator().manual_seed(number)
        ids = torch.randint(10, 4000, (1, PROMPT_TOKENS), generator=seeded)
        times = {ONE_SHOT: generate(model, ids)[0]}
        times[CHUNKED], expected = generate(model, ids, prefill_chunk_size=chunk_tokens)
        with kvtier.attach(model, host_capacity="256MiB", chunk_tokens=chunk_tokens):
            for way in (COLD, WARM):
                times[way], logits = generate(model, ids)
                assert torch.equal(logits, expected), f"{way}: other logits"
            assert model.kvtier.stats().num_reused_tokens >= PROMPT_TOKENS - chunk_tokens
        for way, seconds in times.items():
            if number:  # the first round warms up
                found[way].append(seconds)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server.attached", description=__doc__
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, targets = [], []
    table = Table("chunk_tokens", ONE_SHOT, CHUNKED, COLD, WARM, title="CPU ms, medians")
    for chunk in CHUNKS:
        found = measure(chunk, 3 if options.quick else 12)
        medians = {way: 1e3 * median_with_interval(each).value for way, each in found.items()}
        share = [b / a for a, b in zip(found[CHUNKED], found[WARM], strict=True)]
        rows.append({"chunk_tokens": chunk, "rounds": len(share), **medians})
        targets.append(
            judged(
                "A1", median_with_interval(share), MOST_SHARE, at_least=False, chunk_tokens=chunk
            )
        )
        table.add_row(str(chunk), *(f"{ms:,.0f}" for ms in medians.values()))
    result = {
        "benchmark": "attached",
        "machine": machine_facts(),
        "rows": rows,
        "targets": targets,
    }
    report(result, options.json, table)


if __name__ == "__main__":
    main()
