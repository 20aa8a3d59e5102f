"""T4, T1, T2 and T3 under SGLang: conversations, known prompts, new ones, a slow disk.

    python -m benchmarks.sglang.multi_turn            a table
    python -m benchmarks.sglang.multi_turn --json -   JSON on stdout, the table on stderr
    python -m benchmarks.sglang.multi_turn --quick    fewer of everything

Compares SGLang alone, with HiCache, with HiCache's `file`, with kvtier's storage back end and with
kvtier's linker. All are real servers on the CPU that get requests in turn. `make bench-sglang`
installs the requirements. See README.md for the method.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.engines.model import KV_BYTES_PER_TOKEN
from benchmarks.engines.multi_turn_script import Workload
from benchmarks.engines.report import Results, Row, TurnTarget
from benchmarks.engines.report import result_json as engine_result
from benchmarks.engines.run import (
    Plan,
    Say,
    add_options,
    measure_checks,
    measure_multi_turn,
    measure_new_prompts,
    named,
    narrator,
    run_benchmark,
    running,
    settings_of,
)
from benchmarks.engines.servers import Contestant, Size
from benchmarks.engines.slow_disk import Asked, Slow, measure_slow_disk
from benchmarks.report.output import parser_of
from benchmarks.sglang import second_pass
from benchmarks.sglang.second_pass import SecondPass, measure_second_pass, size_for
from benchmarks.sglang.servers import (
    BLOCK,
    FILE,
    HICACHE,
    LINKER,
    OURS,
    SGLANG,
    Sglang,
    sglang_alone,
    slowed,
    with_file,
    with_hicache,
    with_kvtier,
    with_linker,
)

DISK = "4GiB"
SMALLEST_RATIO = 1.1
"""Host memory as a multiple of device memory, above a slow disk."""
PARTS = MULTI_TURN, SECOND_PASS, NEW_PROMPTS, SLOW_DISK = (
    "multi-turn",
    "second-pass",
    "new-prompts",
    "slow-disk",
)
NAMES = {"sglang": SGLANG, "hicache": HICACHE, "file": FILE, "kvtier": OURS, "linker": LINKER}
WITH_KVTIER = (OURS, LINKER)
TURN_TARGETS = (
    TurnTarget("T4", "ttft_ratio", dict.fromkeys(WITH_KVTIER, -0.5), True, {"against": HICACHE}),
    TurnTarget("T4", "ttft_to_file", dict.fromkeys(WITH_KVTIER, 1.0), facts={"against": FILE}),
)
SLOW_STARTS = 3
"""Starts of each pair of servers, one of which has a slow disk. Servers of a kind differ from start
to start. All starts together have a hundred prompts, enough for a p99."""
WITHOUT = {OURS: HICACHE, LINKER: SGLANG}
"""For each contestant with kvtier, the one without it."""
USUAL = Plan(
    Workload(num_conversations=9, num_active=8, turns=(12, 16), opening_tokens=(1800, 2300)),
    known_prompts=100,
    known_blocks=16,
    slow_prompts=34,
    slow_blocks=16,
)
"""The KV of the active conversations exceeds device and host memory together."""
QUICK = Plan(
    Workload(num_conversations=7, num_active=5, turns=(6, 8)),
    rounds=1,
    checks=1,
    starts=1,
    new_prompts=4,
    bursts=2,
    slow_prompts=16,
    slow_blocks=16,
    known_prompts=12,
    known_blocks=10,
)


def contestants(options: argparse.Namespace) -> list[Contestant]:
    settings = settings_of(options)
    made: list[Contestant] = [
        sglang_alone(),
        with_hicache(options.ratio),
        with_file(options.ratio),
        with_kvtier(options.ratio, DISK, **settings),
        with_linker(host_bytes(options.ratio, options.device_blocks), DISK, **settings),
    ]
    chosen = [NAMES[contestant] for contestant in options.contestants]
    return [each for each in made if each.name in chosen]


def host_bytes(ratio: float, device_blocks: int) -> int:
    """Return the bytes of the linker's host memory: as many as HiCache has."""
    return int(ratio * device_blocks * BLOCK * KV_BYTES_PER_TOKEN)


class Measurement:
    """All measurements, one request or run of the script at a time.

    ``twice`` holds the second passes by contestant.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results = Results()
        self.twice: dict[str, SecondPass] = {}

    def measure(
        self, chosen: Sequence[Contestant], plan: Plan, options: argparse.Namespace
    ) -> Results:
        say = narrator(options.silent)
        if MULTI_TURN in options.parts:
            with running(chosen, options) as servers:
                measure_checks(servers, plan, WITH_KVTIER, self.results, say)
                measure_multi_turn(servers, plan, options, self.results, say)
        if SECOND_PASS in options.parts:
            self._second_passes(chosen, plan, say)
        for name, without in WITHOUT.items():
            pair = named(chosen, without, name)
            if NEW_PROMPTS in options.parts and len(pair) == 2:
                measure_new_prompts(pair, plan, options, self.results, say)
            if SLOW_DISK in options.parts and len(pair) == 2:
                self._slow_disk(pair, plan, say)
        return self.results

    def _second_passes(self, chosen: Sequence[Contestant], plan: Plan, say: Say) -> None:
        size = size_for(plan.known_prompts, plan.known_blocks)
        options = self.options
        for contestant in chosen:
            if contestant.name == LINKER:
                room = host_bytes(options.ratio, size.device_blocks)
                contestant = with_linker(room, DISK, **settings_of(options))
            with running([contestant], options, size) as servers:
                self.twice[contestant.name] = measure_second_pass(
                    servers[0],
                    plan.known_prompts,
                    plan.known_blocks,
                    options.seed * 1_000_000 + 30_000,
                    say,
                )

    def _slow_disk(self, pair: Sequence[Contestant], plan: Plan, say: Say) -> None:
        alone, name = pair[0], pair[1].name
        options = self.options
        asked: list[Asked] = []
        slow = Slow(plan.slow_prompts, plan.slow_blocks, KV_BYTES_PER_TOKEN)

        def with_disk(rate: int, prompt_bytes: int) -> Sglang:
            if name == LINKER:
                made = with_linker(host_bytes(SMALLEST_RATIO, options.device_blocks), DISK)
            else:
                made = with_kvtier(SMALLEST_RATIO, DISK)
            return slowed(made, rate)

        for number in range(1 if options.quick else SLOW_STARTS):
            with running([alone], options) as servers:
                found = measure_slow_disk(
                    servers[0],
                    with_disk,
                    slow,
                    options.model,
                    options.scratch / f"slow-{name.split()[-1]}-{number}",
                    Size(options.device_blocks),
                    say,
                )
            slow = replace(slow, bytes_per_s=found.bytes_per_s)
            asked += found.asked
            self.results.slow_disk[name] = replace(found, asked=asked)

    def result(self, results: Results) -> dict[str, list[Row]]:
        return result_json(results, self.twice)


def result_json(results: Results, twice: Mapping[str, SecondPass]) -> dict[str, list[Row]]:
    """Return ``rows`` and ``targets`` of the result."""
    rows = [row for name, each in twice.items() for row in second_pass.rows(name, each)]
    beside, targets = {"alone": SGLANG, "file": FILE}, second_pass.targets(rows, WITH_KVTIER)
    return engine_result(results, HICACHE, beside, TURN_TARGETS, rows, targets)


def main(arguments: list[str] | None = None) -> None:
    options = read_options(arguments)
    options.host = f"{options.ratio} of the device's"
    plan = QUICK if options.quick else USUAL
    if options.known_blocks:
        plan = replace(plan, known_blocks=options.known_blocks)
    both = Measurement(options)
    run_benchmark("sglang_multi_turn", options, plan, contestants, both.measure, both.result)


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("sglang.multi_turn", __doc__)
    add_options(parser, PARTS)
    parser.add_argument(
        "--contestants", nargs="*", default=[*NAMES], help=f"{' '.join(NAMES)} (all)"
    )
    parser.add_argument("--ratio", type=float, default=1.1, help="of host memory (1.1)")
    parser.add_argument("--device-blocks", type=int, default=128, help="SGLang's own pool (128)")
    parser.add_argument(
        "--known-blocks", type=int, help=f"per prompt of the second pass ({USUAL.known_blocks})"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
