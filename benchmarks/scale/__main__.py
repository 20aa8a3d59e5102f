"""The command: runs parts, prints rows and targets."""

from __future__ import annotations

from importlib import import_module

from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.scale.part import Part

PARTS = ("deciding", "learned", "long_prompt", "restart", "compaction", "engine")


def table(name: str, part: Part) -> Table:
    return table_of(
        f"{name}: CPU time of one call, microseconds",
        ("operation", "contestant"),
        ("size", "median", "worst", "calls"),
        (
            (
                row.operation,
                row.contestant,
                f"{row.num:,} {row.axis}",
                *(f"{seconds * 1e6:,.1f}" for seconds in (row.median_s, max(row.seconds))),
                str(len(row.seconds)),
            )
            for row in part.rows
        ),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("scale", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(all)")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    options = parser.parse_args(arguments)

    machine = machine_facts()
    parts = {}
    for name in options.parts:
        parts[name] = import_module(f"benchmarks.scale.{name}").measure(options.quick)
    report(
        options.json,
        "scale",
        machine,
        [{"part": name, **row.as_json()} for name in parts for row in parts[name].rows],
        [target for part in parts.values() for target in part.targets],
        *(table(name, part) for name, part in parts.items()),
        quick=options.quick,
    )


if __name__ == "__main__":
    main()
