"""M1 to M6: one cache for all engines of a machine, against a cache in each of them.

    python -m benchmarks.node            tables
    python -m benchmarks.node --json -   JSON on stdout, the tables on stderr

See README.md for the method.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from benchmarks.node.part import Part, table
from benchmarks.policies.traces import FOLDER, default_folder
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report

PARTS = ("look_up", "work", "copies", "killed", "outage", "tokens")
REAL = ("replicas", "engines")
"""Parts with real engines: only if named, in vLLM's environment of ``make peers-vllm``."""
TRACE = "mooncake/conversation_trace.jsonl.zst"


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("node", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer of everything: to see it run")
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, *REAL), default=PARTS)
    parser.add_argument(
        "--trace",
        type=Path,
        default=default_folder() / TRACE,
        help=f"requests of the part tokens; else {TRACE} in ${FOLDER}",
    )
    options = parser.parse_args(arguments)
    machine = machine_facts()
    parts: dict[str, Part] = {}
    for name in options.parts:
        module = import_module(f"benchmarks.node.{name}")
        more = (options.trace,) if name == "tokens" else ()
        parts[name] = module.measure(options.quick, *more)
    report(
        options.json,
        "node",
        machine,
        [{"part": name, **row} for name, part in parts.items() for row in part.rows],
        [target for part in parts.values() for target in part.targets],
        *(table(name, part) for name, part in parts.items()),
        quick=options.quick,
    )


if __name__ == "__main__":
    main()
