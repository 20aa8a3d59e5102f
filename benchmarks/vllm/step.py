"""T5: own cost of a step of vLLM with a connector in which nothing moves.

    python -m benchmarks.vllm.step            a table
    python -m benchmarks.vllm.step --json -   JSON on stdout, the table on stderr

Runs vLLM's scheduler and a rank's half of the connector without a model, and compares it with the
same vLLM without a connector and with its own OffloadingConnector. Needs vLLM. See README.md for
the method.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.report.targets import judged
from benchmarks.vllm.steps import PAGE, PAGES, PROMPT, Replica, Step, prepare
from kvtier.tools.report.stats import Estimate, median_with_interval, rounded

ALONE, NOTHING = "vLLM", "a connector that does nothing"
VLLM, HOST, DISK = "vLLM's own", "kvtier", "kvtier with a disk"
FRONT = "kvtier, KvtierConnector"
OURS = (HOST, DISK, FRONT)
SIDES = ("scheduler", "rank")
TARGET_US = 10
"""CPU time of kvtier's own part, in each process: above a connector that does nothing."""
SPARE_BYTES = 64 << 20
"""Host memory in addition to that of the blocks."""
SETTLED = 6
"""Steps after all requests began a block until its store has ended."""
PAUSE_S = 0.01


@dataclass(slots=True)
class Samples:
    """Measurements of one contestant."""

    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    """By round and step."""
    functions: dict[str, dict[str, list[int]]] = field(
        default_factory=lambda: {side: {} for side in SIDES}
    )
    """Nanoseconds in each step, by process and function."""

    def add_functions(self, side: str, taken: Mapping[str, int]) -> None:
        for name, ns in taken.items():
            self.functions[side].setdefault(name, []).append(ns)

    def function_us(self, side: str) -> dict[str, float]:
        """Return the median of each function, most expensive first."""
        medians = {name: median(ns) / 1e3 for name, ns in self.functions[side].items()}
        return dict(sorted(medians.items(), key=lambda each: -each[1]))


def connections(
    names: Sequence[str], num_running: int, scratch: Path, settings: Mapping[str, object]
) -> dict[str, Any]:
    """Return ``--kv-transfer-config`` by contestant."""
    # kvtier's blocks begin on pages of 4 KiB; here they are larger than a page.
    num_bytes = num_running * (PAGES + 1) * 128 * 1024 + SPARE_BYTES

    def offloading(**extra: object) -> dict[str, Any]:
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def ours(**more: object) -> dict[str, Any]:
        extra = {"spec_name": "kvtier", "host_capacity": num_bytes, **more, **settings}
        return offloading(**extra)

    disk = {"disk_path": str(scratch / f"disk{num_running}"), "disk_capacity": num_bytes}
    made = {
        ALONE: None,
        NOTHING: {
            "kv_connector": "Nothing",
            "kv_connector_module_path": "benchmarks.vllm.nothing",
            "kv_role": "kv_both",
        },
        VLLM: offloading(cpu_bytes_to_use=num_bytes),
        HOST: ours(),
        DISK: ours(**disk),
        FRONT: {
            "kv_connector": "KvtierConnector",
            "kv_connector_module_path": "kvtier.connectors.vllm.entry",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_capacity": num_bytes, **settings},
        },
    }
    return {name: made[name] for name in names}


def measure(connects: Mapping[str, Any], num_running: int, rounds: int) -> dict[str, Samples]:
    """Take each step with every contestant in turn. Functions are timed in every second round."""
    replicas = {name: Replica(each, num_running) for name, each in connects.items()}
    found = {name: Samples() for name in replicas}
    for replica in replicas.values():
        replica.settle()
    gc.collect()
    gc.freeze()  # as vLLM's engine core does
    for number in range(2 * rounds + 1):
        is_timed = number % 2 == 0
        for replica in replicas.values():
            replica.begin()
            replica.time_functions(is_timed)
        # All requests are at the same token: in the first step of a block they all store one.
        for step in range(PAGES * PAGE - PROMPT):
            phase = step % PAGE
            if 0 < phase < SETTLED:
                time.sleep(PAUSE_S)
            for name, replica in replicas.items():
                is_idle = SETTLED <= phase < PAGE - 1 and not replica.is_pending
                taken = replica.step()
                functions = {side: replica.functions[side].take() for side in SIDES}
                if number == 0 or not is_idle or replica.is_pending:
                    continue
                if not is_timed:
                    found[name].steps[number, step] = taken
                for side in SIDES if is_timed else ():
                    found[name].add_functions(side, functions[side])
        for replica in replicas.values():
            replica.time_functions(False)
            replica.end()
    gc.unfreeze()
    for replica in replicas.values():
        replica.close()
    return found


def above(ours: Samples, alone: Samples, side: str) -> Estimate:
    """Return microseconds of CPU time above another contestant's, the median over rounds."""
    by_round: dict[int, list[float]] = {}
    for (number, step), taken in ours.steps.items():
        base = alone.steps.get((number, step))
        if base is not None:
            more_ns = getattr(taken, side) - getattr(base, side)
            by_round.setdefault(number, []).append(more_ns / 1e3)
    return median_with_interval([median(each) for each in by_round.values()])


def rows_of(found: Mapping[str, Samples], num_running: int) -> list[dict[str, Any]]:
    rows = []
    for name, samples in found.items():
        steps = samples.steps.values()
        row: dict[str, Any] = {"contestant": name, "running": num_running, "steps": len(steps)}
        for side in SIDES:
            row[f"{side}_us"] = rounded(median(getattr(step, side) for step in steps) / 1e3, 1)
            if name != ALONE:
                more = above(samples, found[ALONE], side)
                functions = samples.function_us(side)
                row[f"{side}_above_us"] = rounded(more.value, 1)
                row[f"{side}_above_us_interval_95"] = more.interval_json(1)
                if name != NOTHING and NOTHING in found:
                    own = above(samples, found[NOTHING], side)
                    row[f"{side}_own_us"] = rounded(own.value, 1)
                    row[f"{side}_own_us_interval_95"] = own.interval_json(1)
                row[f"{side}_functions_us"] = rounded(sum(functions.values()), 1)
                row[f"{side}_by_function_us"] = {
                    each: rounded(us, 2) for each, us in functions.items()
                }
        row["message_bytes"] = [median(step.num_bytes[way] for step in steps) for way in (0, 1)]
        rows.append(row)
    return rows


def targets(found: Mapping[int, Mapping[str, Samples]]) -> list[dict[str, object]]:
    """Return T5, by the CPU time above a connector that does nothing."""
    return [
        judged(
            "T5",
            above(samples[name], samples[NOTHING], side),
            TARGET_US,
            at_least=False,
            digits=1,
            contestant=name,
            running=num_running,
            process=side,
        )
        for num_running, samples in found.items()
        for name in OURS
        if name in samples and NOTHING in samples
        for side in SIDES
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = []
    for row in rows:
        cells = [row["contestant"], str(row["running"])]
        for side in SIDES:
            if row["contestant"] == ALONE:
                cells += [f"({row[f'{side}_us']})", "", ""]
                continue
            cells += [_cell(row, f"{side}_{part}_us") for part in ("above", "own")]
            cells.append(str(row[f"{side}_functions_us"]))
        there, back = row["message_bytes"]
        lines.append([*cells, f"{there:g} + {back:g} B", str(row["steps"])])
    return table_of(
        "CPU time of a step in which nothing moves, microseconds above vLLM alone",
        ("contestant",),
        (
            "running",
            *("scheduler", "own part", "in functions"),
            *("rank", "own part", "in functions"),
            *("message", "steps"),
        ),
        lines,
    )


def _cell(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return ""
    low, high = row[f"{name}_interval_95"]
    return f"{row[name]} [{low}, {high}]"


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("vllm.step", __doc__)
    parser.add_argument("--running", nargs="+", type=int, default=[1, 64, 256], help="(1 64 256)")
    parser.add_argument("--rounds", type=int, default=8, help="of 48 steps (8)")
    parser.add_argument(
        "--contestants",
        nargs="+",
        default=["nothing", "vllm", "kvtier", "kvtier-with-disk", "kvtier-own-front"],
        help="beside vLLM alone: nothing vllm kvtier kvtier-with-disk kvtier-own-front (all)",
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="for kvtier")
    options = parser.parse_args(arguments)
    names = {
        "nothing": NOTHING,
        "vllm": VLLM,
        "kvtier": HOST,
        "kvtier-with-disk": DISK,
        "kvtier-own-front": FRONT,
    }
    chosen = [ALONE, *(names[contestant] for contestant in options.contestants)]
    settings = dict(each.split("=", 1) for each in options.set)

    machine = machine_facts()
    prepare()
    found, rows = {}, []
    for num_running in options.running:
        with tempfile.TemporaryDirectory() as scratch:
            connects = connections(chosen, num_running, Path(scratch), settings)
            found[num_running] = measure(connects, num_running, options.rounds)
        rows += rows_of(found[num_running], num_running)
    report(options.json, "vllm_step", machine, rows, targets(found), table(rows))


if __name__ == "__main__":
    main()
