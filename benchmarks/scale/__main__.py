"""The command: runs parts, prints rows and targets."""

from __future__ import annotations

import argparse
from importlib import import_module

from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report
from benchmarks.scale.part import Part

PARTS = ("deciding", "learned", "long_prompt", "restart", "compaction", "engine")


def table(name: str, part: Part) -> Table:
    result = Table(title=f"{name}: CPU time of one call, microseconds")
    result.add_column("operation")
    result.add_column("contestant", no_wrap=True)
    for heading in ("size", "median", "worst", "calls"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in part.rows:
        times = (f"{seconds * 1e6:,.1f}" for seconds in (row.median_s, max(row.seconds)))
        size = f"{row.num:,} {row.axis}"
        result.add_row(row.operation, row.contestant, size, *times, str(len(row.seconds)))
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(all)")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    options = parser.parse_args(arguments)

    machine = machine_facts()
    parts = {}
    for name in options.parts:
        parts[name] = import_module(f"benchmarks.scale.{name}").measure(options.quick)
    result = {
        "benchmark": "scale",
        "machine": machine,
        "quick": options.quick,
        "rows": [{"part": name, **row.as_json()} for name in parts for row in parts[name].rows],
        "targets": [target for part in parts.values() for target in part.targets],
    }
    report(result, options.json, *(table(name, part) for name, part in parts.items()))


if __name__ == "__main__":
    main()
