"""Price of the setting ``grid``: time to the first token, and throughput, against vLLM's own cuts.

    python -m benchmarks.vllm.grid            a table
    python -m benchmarks.vllm.grid --json -   JSON on stdout, the table on stderr
    python -m benchmarks.vllm.grid --quick    fewer rounds, one grid

Runs engines with kvtier's host tier on the CPU, without a grid and with some. Needs vLLM. See
README.md for the method.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.engines.model import make_model
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, set_usual, table_of
from benchmarks.vllm.servers import BLOCK, QUIET
from kvtier.connectors.vllm.shared.fronts import front_named
from kvtier.connectors.vllm.shared.grid import SCHEDULER
from kvtier.tools.report.stats import median_with_interval, rounded

PROMPT, ANSWER, NUM_AT_ONCE = 3500, 32, 8
CROWD = 1200
"""Tokens of a prompt that is answered among others."""
BUDGET = 2048
"""Tokens of a step."""
FIGURES = {
    "miss_s": "miss, s",
    "hit_s": "hit, s",
    "tokens_per_s": "tokens/s",
}
USUAL, QUICK = {"rounds": 12, "grids": [256, 512, 1024]}, {"rounds": 6, "grids": [512]}

Samples = Mapping[str, Sequence[float]]
"""By figure, the value of each round."""


def start(model: Path, grid: int, stack: ExitStack) -> Any:
    """Return an engine that ends with ``stack``. grid: 0 for none."""
    import vllm
    from vllm.config import KVTransferConfig

    front = front_named("auto")
    extra = {**front.extra, "host_capacity": "1GiB", "load_policy": "always", "grid": grid}
    connects = KVTransferConfig(
        kv_connector=front.connector,
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        **front.config,
    )
    llm = vllm.LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=2 * BUDGET,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=16,
        num_gpu_blocks_override=128,
        kv_transfer_config=connects,
        **({"scheduler_cls": SCHEDULER} if grid else {}),
    )
    stack.callback(llm.llm_engine.engine_core.shutdown)
    return llm


def answer(llm: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Return the seconds until all prompts have been answered by so many tokens."""
    import vllm

    params = vllm.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    given = [{"prompt_token_ids": list(each)} for each in prompts]
    began = time.perf_counter()
    llm.generate(given, params, use_tqdm=False)
    return time.perf_counter() - began


def take_round(llm: Any, seed: int) -> dict[str, float]:
    """Measure each figure once, with prompts that are new to the engine."""
    rng = random.Random(seed)
    one = [rng.randrange(10, 4000) for _ in range(PROMPT)]
    crowd = [[rng.randrange(10, 4000) for _ in range(CROWD)] for _ in range(NUM_AT_ONCE)]
    miss_s = answer(llm, [one], 1)
    answer(llm, [one[:3]], 3)  # the steps in which stores end
    assert llm.reset_prefix_cache()
    hit_s = answer(llm, [one], 1)
    taken_s = answer(llm, crowd, ANSWER)
    return {
        "miss_s": miss_s,
        "hit_s": hit_s,
        "tokens_per_s": NUM_AT_ONCE * (CROWD + ANSWER) / taken_s,
    }


def measure(model: Path, grids: Sequence[int], rounds: int) -> dict[int, Samples]:
    """Take each round with every engine in turn; the first one does not count."""
    with ExitStack() as stack:
        engines = {grid: start(model, grid, stack) for grid in grids}
        found: dict[int, dict[str, list[float]]] = {
            grid: {name: [] for name in FIGURES} for grid in grids
        }
        for number in range(rounds + 1):
            for grid, llm in engines.items():
                for name, value in take_round(llm, number).items():
                    if number:
                        found[grid][name].append(value)
    return dict(found)


def rows_of(found: Mapping[int, Samples]) -> list[dict[str, Any]]:
    """Return medians, and medians of the ratios to the engine without a grid in the same round."""
    rows = []
    for grid, samples in found.items():
        row: dict[str, Any] = {"grid": grid, "rounds": len(samples["miss_s"])}
        for name in FIGURES:
            row[name] = rounded(median_with_interval(samples[name]).value)
            if grid:
                pairs = zip(samples[name], found[0][name], strict=True)
                ratio = median_with_interval([ours / theirs for ours, theirs in pairs])
                row[f"{name}_ratio"] = rounded(ratio.value)
                row[f"{name}_ratio_interval_95"] = ratio.interval_json()
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = []
    for row in rows:
        cells = [str(row["grid"] or "none")]
        for name in FIGURES:
            ratio = f" ({row[f'{name}_ratio']:.2f})" if row["grid"] else ""
            cells.append(f"{row[name]:.4g}{ratio}")
        lines.append([*cells, str(row["rounds"])])
    title = "Time to the first token, and throughput (ratio to no grid)"
    return table_of(title, ("grid",), (*FIGURES.values(), "rounds"), lines)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("vllm.grid", __doc__)
    parser.add_argument("--quick", action="store_true", help="6 rounds, a grid of 512 tokens")
    parser.add_argument("--rounds", type=int, help="(12)")
    parser.add_argument("--grids", nargs="+", type=int, help="(256 512 1024)")
    options = parser.parse_args(arguments)
    set_usual(options, USUAL, QUICK)
    if bad := [grid for grid in options.grids if grid < 1 or grid % BLOCK]:
        parser.error(f"--grids: {bad[0]} is no multiple of {BLOCK}")
    machine = machine_facts()
    cores = str(min(os.sched_getaffinity(0)))
    os.environ.update({**QUIET, "VLLM_CPU_OMP_THREADS_BIND": cores})
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        found = measure(model, [0, *options.grids], options.rounds)
    rows = rows_of(found)
    report(options.json, "vllm_grid", machine, rows, [], table(rows))


if __name__ == "__main__":
    main()
