"""V1: hit ratios of vLLM's host tier under eviction policies: vLLM's own LRU and ARC, and kvtier's.

    python -m benchmarks.vllm.policies --traces DIR            a table
    python -m benchmarks.vllm.policies --traces DIR --json -   JSON on stdout as well

Every request of a trace goes through vLLM's own CPUOffloadingManager as vLLM's scheduler would call
it: look-ups until the first miss, the load, stores a step at a time, the end of the request. A hit
is a block of the longest cached prefix at arrival. Needs vLLM and zstd. README.md says the method.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.policies.traces import BLOCK_TOKENS, Trace, agentic, conversation, documents
from benchmarks.report.machine import machine_facts
from benchmarks.report.targets import judged
from kvtier.tools.report.stats import exactly

OURS = "kvtier"
POLICIES = {"lru": None, "arc": None, "KvtierPolicy": "kvtier.connectors.vllm.standalone.policy"}
"""As in vLLM's settings: eviction_policy, and cache_policy_module_path where it is not vLLM's."""
CALLED = {"KvtierPolicy": OURS}
TRACES = ("conversation", "agentic", "documents")
STEP_BLOCKS = 16
"""Stored at a time, unless something else is said: 8,192 tokens, vLLM's usual step of a prefill."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity. share: of the trace's unique blocks."""

    trace: str
    policy: str
    share: float
    step_blocks: int
    capacity_chunks: int
    hit_ratio: float
    refused_stores: int
    cpu_us_per_chunk: float


# -- replay ----------------------------------------------------------------------------------------


def replay(trace: Trace, policy: str, capacity: int, step_blocks: int) -> tuple[int, int]:
    """Blocks that were hits, and stores that vLLM could not place."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(capacity, policy, POLICIES[policy])
    now = [0.0]
    if policy in CALLED:
        manager._policy.clock = lambda: now[0]
    keys_of: dict[int, bytes] = {}
    num_hits = num_refused = 0
    for number, chain in enumerate(trace.chains):
        now[0] = trace.times[number]
        keys = [
            keys_of.get(each)
            or keys_of.setdefault(each, make_offload_key(each.to_bytes(32, "big"), 0))
            for each in chain.tolist()
        ]
        context = ReqContext(str(number))
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, BLOCK_TOKENS * (place + 1))
        manager.on_new_request(context)
        hits = 0
        while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
            hits += 1
        num_hits += hits
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
        for first in range(hits, len(keys), step_blocks):
            output = manager.prepare_store(keys[first : first + step_blocks], context)
            if output is None:
                num_refused += 1
            else:
                manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
    return num_hits, num_refused


def measure(trace: Trace, policy: str, share: float, step_blocks: int) -> Row:
    capacity = max(1, int(share * trace.num_unique))
    began = time.process_time()
    hits, refused = replay(trace, policy, capacity, step_blocks)
    seconds = time.process_time() - began
    return Row(
        trace.name,
        CALLED.get(policy, policy),
        share,
        step_blocks,
        capacity,
        hits / trace.num_refs,
        refused,
        1e6 * seconds / trace.num_refs,
    )


def targets(rows: list[Row]) -> list[dict[str, object]]:
    """Percentage points above the better of vLLM's two, where that is least."""
    found = {(row.trace, row.share, row.policy): row.hit_ratio for row in rows}
    points = {(trace, share) for trace, share, policy in found if policy == OURS}
    above = {
        (trace, share): found[trace, share, OURS]
        - max(ratio for (t, s, p), ratio in found.items() if (t, s) == (trace, share) and p != OURS)
        for trace, share in points
        if any((t, s) == (trace, share) and p != OURS for t, s, p in found)
    }
    if not above:
        return []
    return [judged("V1", exactly(100 * min(above.values())), 0, at_least=True)]


def table(rows: list[Row]) -> Table:
    """A line per trace and capacity, a column per policy."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    result = Table(title="Hit ratio, % of blocks; capacity as a share of the trace's unique blocks")
    for heading in ("trace", "capacity", *policies):
        result.add_column(heading, justify="left" if heading == "trace" else "right")
    found = {(row.trace, row.share, row.policy): row for row in rows}
    for trace, share in dict.fromkeys((row.trace, row.share) for row in rows):
        cells = [found.get((trace, share, policy)) for policy in policies]
        result.add_row(
            trace,
            f"{100 * share:g} %",
            *(f"{100 * each.hit_ratio:.2f}" if each else "" for each in cells),
        )
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm.policies", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument(
        "--shares",
        nargs="+",
        type=float,
        default=[0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4],
        help="capacities, as shares of the unique blocks",
    )
    parser.add_argument(
        "--step-blocks", type=int, default=STEP_BLOCKS, help="stored at a time (16)"
    )
    parser.add_argument("--sessions", type=int, default=200, help="of the agentic trace (200)")
    parser.add_argument("--hours", type=float, default=2.3, help="that they begin in (2.3)")
    parser.add_argument("--seed", type=int, default=11, help="of their beginnings (11)")
    parser.add_argument("--processes", type=int, default=2, help="(2)")
    parser.add_argument("--only", choices=TRACES, help="one trace")
    options = parser.parse_args(arguments)

    traces = []
    if options.only in (None, "conversation"):
        traces.append(conversation(options.traces))
    if options.only in (None, "agentic"):
        traces.append(agentic(options.traces, options.sessions, options.hours, options.seed))
    if options.only in (None, "documents"):
        traces.append(documents())
    with ProcessPoolExecutor(options.processes) as pool:
        jobs = [
            pool.submit(measure, trace, policy, share, options.step_blocks)
            for trace in traces
            for share in options.shares
            for policy in options.policies
        ]
        rows = [job.result() for job in jobs]
    result = {
        "benchmark": "vllm_policies",
        "machine": machine_facts(),
        "traces": [
            {"name": each.name, "chunks": each.num_refs, "unique": each.num_unique}
            for each in traces
        ],
        "rows": [asdict(row) for row in rows],
        "targets": targets(rows),
    }
    console = Console(stderr=options.json == "-")
    console.print(table(rows))
    for target in targets(rows):
        console.print(target)
    if options.json == "-":
        json.dump(result, sys.stdout, indent=1)
        print()
    elif options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
