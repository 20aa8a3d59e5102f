"""R1, R2, R3: stores, each compared with its own client; and the cost of a dead store.

    python -m benchmarks.stores            a table
    python -m benchmarks.stores --json -   JSON on stdout, the table on stderr

The servers are real ones on loopback, started here. Both sides use as many threads and the same
memory, in turns. See README.md for the method.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, set_usual
from benchmarks.stores.clients import Row, rows_of, table
from benchmarks.stores.lookup import Lookup, lookup_table, measure_lookup
from benchmarks.stores.processes import SIZES, STORES, measure_apart, opened
from benchmarks.stores.servers import DEAD, SLOW

if TYPE_CHECKING:
    from benchmarks.stores.outage import TroubleRow

CLIENTS, LOOKUP = "clients", "look-up"
PARTS = CLIENTS, LOOKUP, DEAD, SLOW


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("stores", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer of everything: to see it run")
    parser.add_argument("--stores", nargs="*", default=[*STORES], help=f"{' '.join(STORES)} (all)")
    parser.add_argument("--parts", nargs="*", default=[*PARTS], choices=PARTS, help="(all)")
    parser.add_argument("--sizes", nargs="*", default=[*SIZES], choices=SIZES, help="(all)")
    parser.add_argument("--processes", type=int, help="that measure one after the other (7)")
    parser.add_argument("--rounds", type=int, help="of each process (3)")
    parser.add_argument("--lookups", type=int, help="(400)")
    parser.add_argument("--pairs", type=int, help="of prompts, beside a dead store (400)")
    parser.add_argument("--mib", type=int, help="moved at a time (128)")
    parser.add_argument("--threads", type=int, default=2, help="of each side (2)")
    options = parser.parse_args(arguments)
    usual = {"processes": 7, "rounds": 3, "mib": 128, "pairs": 400, "lookups": 400}
    quick = {"processes": 1, "rounds": 1, "mib": 8, "pairs": 8, "lookups": 8}
    set_usual(options, usual, quick)
    machine = machine_facts()
    there = []
    for name in options.stores:
        if reason := STORES[name].missing():
            print(f"{name}: left out: {reason}", file=sys.stderr)
        else:
            there.append(STORES[name])
    rows: list[Row] = []
    lookups: list[Lookup] = []
    versions: dict[str, str] = {}
    for kind in there if CLIENTS in options.parts else ():
        processes = [measure_apart(kind.name, options) for _ in range(options.processes)]
        for block in options.sizes:
            rows += rows_of(kind, block, [found[block] for found in processes])
    for kind in there if LOOKUP in options.parts else ():
        with opened(kind) as place:
            if found := measure_lookup(place, options.lookups):
                lookups.append(found)
    for kind in there:
        versions |= kind.versions()
    tables = [table(rows)] if rows else []
    tables += [lookup_table(lookups)] if lookups else []
    troubles: list[TroubleRow] = []
    for part in (DEAD, SLOW):
        if part in options.parts:
            from benchmarks.stores.outage import measure_trouble, trouble_table

            found_here = measure_trouble(there, part, options.pairs)
            troubles += found_here
            tables.append(trouble_table(part, found_here))
    report(
        options.json,
        "remote",
        machine,
        (*rows, *lookups, *(trouble.as_json() for trouble in troubles)),
        (
            *(target for row in rows for target in row.targets()),
            *(each.target() for each in (*lookups, *troubles)),
        ),
        *tables,
        versions=versions,
        plan={name: getattr(options, name) for name in ("parts", *usual, "threads")},
    )


if __name__ == "__main__":
    main()
