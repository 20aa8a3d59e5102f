"""Everything that needs an accelerator, in one go: its tests, its copies, and serving with it.

Each part is a process of its own, so one that fails or hangs costs its own figures only. All parts
together take less than ten minutes. G1 comes from ``kvtier bench copy``, G2 and G3 from ``kvtier
bench serve``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report.machine import machine_facts

KVTIER = (sys.executable, "-m", "kvtier.cli")
MARK = "mark.gpu"
SERVE = (*KVTIER, "bench", "serve", "--no-report", "--experiments")
ATTACHED = (sys.executable, "-m", "benchmarks.server.attached")


@dataclass(frozen=True, slots=True)
class Part:
    """A command; one that ends with ``--json`` gets a file to write its result to."""

    name: str
    command: tuple[str, ...]
    timeout_s: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """returncode: None where the part took too long. tail: its last words, where it failed."""

    part: str
    returncode: int | None
    wall_s: float
    tail: str


def parts(device: str) -> list[Part]:
    """Return the parts to run, the shortest first."""
    marked = [str(file) for file in Path("tests").rglob("test_*.py") if MARK in file.read_text()]
    test = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", *sorted(marked))
    accuracy = ("accuracy,ttft", "--ttft-prompts", "40", "--accuracy-prompts", "8")
    return [
        Part("doctor", (*KVTIER, "doctor", "--disk-path", "."), 60),
        Part("tests", test, 90),
        Part("copy", (*KVTIER, "bench", "copy", "--device", device, "--json"), 120),
        Part(
            "overlap",
            (*SERVE, "overlap", "--device", device, "--model", "random-8b", "--json"),
            180,
        ),
        Part("attached", (*ATTACHED, "--device", device, "--quick", "--json"), 90),
        Part("serve", (*SERVE, *accuracy, "--device", device, "--json"), 150),
    ]


def run(part: Part, folder: Path) -> tuple[Outcome, dict[str, object] | None]:
    """Run a part; its result, if it wrote one."""
    file = folder / f"{part.name}.json"
    writes = part.command[-1] == "--json"
    command = [*part.command, *([str(file)] if writes else [])]
    print(f"-- {part.name}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=part.timeout_s,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = None, (error.stdout or b"").decode(errors="replace")
    print(output, file=sys.stderr, flush=True)
    tail = "" if code == 0 else output[-2000:]
    result = json.loads(file.read_text()) if file.exists() else None
    return Outcome(part.name, code, time.monotonic() - began, tail), result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__)
    parser.add_argument("--device", default="cuda", help="as torch calls it (cuda)")
    parser.add_argument("--json", metavar="FILE", help="write the results here; - is stdout")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts")
    options = parser.parse_args(arguments)

    outcomes: list[Outcome] = []
    results: dict[str, object] = {}
    targets: list[object] = []
    summary = {
        "benchmark": "accelerator",
        "machine": machine_facts(),
        "rows": [],
        "targets": targets,
        "results": results,
    }
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(options.device):
            if options.only and part.name not in options.only:
                continue
            outcome, result = run(part, Path(folder))
            outcomes.append(outcome)
            if result is not None:
                results[part.name] = result
                found = result.get("targets")
                targets += found if isinstance(found, list) else []
            summary["rows"] = [asdict(outcome) for outcome in outcomes]
            if options.json not in (None, "-"):  # after each part, in case the next one never ends
                text = json.dumps(summary, indent=1) + "\n"
                Path(options.json).write_text(text, encoding="utf-8")
    for outcome in outcomes:
        print(f"{outcome.part}: {outcome.returncode}, {outcome.wall_s:.0f} s", file=sys.stderr)
    if options.json == "-":
        print(json.dumps(summary, indent=1))
    return max((1 if outcome.returncode != 0 else 0 for outcome in outcomes), default=0)


if __name__ == "__main__":
    sys.exit(main())
