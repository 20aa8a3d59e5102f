"""A1: time of a prompt under `kvtier.attach`, against `generate` alone.

    python -m benchmarks.server.attached            a table
    python -m benchmarks.server.attached --json -   JSON on stdout, the table on stderr
    python -m benchmarks.server.attached --quick    fewer rounds
    python -m benchmarks.server.attached --device cuda    elapsed time, and a model of 1.7 billion
    python -m benchmarks.server.attached --deep     a small model of 80 layers, whose weights take
                                                    long to look at

Each round runs a new prompt through the built-in model with one thread. On a CPU it measures CPU
time, elsewhere elapsed time. See README.md for the method.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

import kvtier
from benchmarks.engines.model import TOKENIZER as MODEL
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report
from benchmarks.report.targets import judged
from kvtier.tools.report.stats import median_with_interval

PROMPT_TOKENS = 3000
CHUNKS = (256, 128)
ONE_SHOT, CHUNKED, AGAIN = "one shot", "chunked", "chunked, again"
COLD, WARM = "attached, cold", "from host memory"
CONTROLLED = (AGAIN, COLD, WARM)
"""Ways whose logits must equal those of ``CHUNKED``; ``AGAIN`` shows that it is repeatable."""
MAX_SHARE = 0.1
LARGE = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=32768,
    pad_token_id=0,
)
"""Model for accelerators."""
DEEP = LlamaConfig(
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=80,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    pad_token_id=0,
)
"""Model of 723 small tensors."""


def load_model(device: str, is_deep: bool) -> Any:
    """Return the model to measure with."""
    model: Any
    if device == "cpu" and not is_deep:
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        config, dtype = (DEEP, torch.float32) if is_deep else (LARGE, torch.bfloat16)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return model.eval()


def generate(model: Any, ids: torch.Tensor, **options: int) -> tuple[float, torch.Tensor]:
    """Return the seconds of generating one token, and its logits.

    The seconds are CPU time on a CPU, and elapsed time elsewhere.
    """
    clock = time.process_time if ids.device.type == "cpu" else time.perf_counter
    began = clock()
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    logits = found.logits[0].cpu()  # waits for the device
    return clock() - began, logits


def measure(
    device: str, is_deep: bool, chunk_tokens: int, num_rounds: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of each way by round, and how often each way's logits were equal."""
    model = load_model(device, is_deep)
    found: dict[str, list[float]] = {way: [] for way in (ONE_SHOT, CHUNKED, *CONTROLLED)}
    equal = dict.fromkeys(CONTROLLED, 0)
    for number in range(num_rounds + 1):
        seeded = torch.Generator().manual_seed(number)
        ids = torch.randint(10, 4000, (1, PROMPT_TOKENS), generator=seeded).to(device)
        times = {ONE_SHOT: generate(model, ids)[0]}
        times[CHUNKED], expected = generate(model, ids, prefill_chunk_size=chunk_tokens)
        given = {}
        times[AGAIN], given[AGAIN] = generate(model, ids, prefill_chunk_size=chunk_tokens)
        with kvtier.attach(model, host_capacity="1GiB", chunk_tokens=chunk_tokens) as cache:
            cache._weights.wait()  # nothing is stored before
            generate(model, ids[:, -2 * chunk_tokens :])  # the first prompt looks at all code
            for way in (COLD, WARM):
                times[way], given[way] = generate(model, ids)
            assert cache.stats().num_reused_tokens >= PROMPT_TOKENS - chunk_tokens
        if number:  # the first round warms up
            for way, seconds in times.items():
                found[way].append(seconds)
            for way, logits in given.items():
                equal[way] += torch.equal(logits, expected)
    return found, equal


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("server.attached", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--device", default="cpu", help="as torch calls it (cpu)")
    parser.add_argument("--deep", action="store_true", help="a small model of 80 layers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, targets = [], []
    unit = "CPU ms" if options.device == "cpu" else "ms"
    ways = (ONE_SHOT, CHUNKED, *CONTROLLED)
    table = Table("chunk_tokens", *ways, "equal logits", title=f"{unit}, medians")
    for chunk in CHUNKS:
        found, equal = measure(options.device, options.deep, chunk, 3 if options.quick else 12)
        medians = {way: 1e3 * median_with_interval(each).value for way, each in found.items()}
        share = [b / a for a, b in zip(found[CHUNKED], found[WARM], strict=True)]
        rows.append({"chunk_tokens": chunk, "rounds": len(share), **medians, "equal": equal})
        targets.append(
            judged("A1", median_with_interval(share), MAX_SHARE, at_least=False, chunk_tokens=chunk)
        )
        same = ", ".join(f"{way} {num} of {len(share)}" for way, num in equal.items())
        table.add_row(str(chunk), *(f"{ms:,.0f}" for ms in medians.values()), same)
    report(options.json, "attached", machine_facts(), rows, targets, table)


if __name__ == "__main__":
    main()
