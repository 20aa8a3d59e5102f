"""T4, T2 and T3 under vLLM: its own multi-turn benchmark, new prompts, a slow disk.

    python -m benchmarks.vllm.multi_turn            a table
    python -m benchmarks.vllm.multi_turn --json -   JSON on stdout, the table on stderr
    python -m benchmarks.vllm.multi_turn --quick    fewer of everything
    python -m benchmarks.vllm.multi_turn --vllm 0.23.0 --contestants vllm kvtier
    python -m benchmarks.vllm.multi_turn --shape qwen3-next --contestants vllm kvtier

Compares vLLM alone, with kvtier and, if installed, with LMCache. All are real servers on the CPU
that get requests in turn. `make bench-vllm` installs the requirements.

See README.md for the method.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from benchmarks.engines.model import GPT_OSS, KV_BYTES_PER_TOKEN, QWEN3, QWEN3_NEXT, SHAPES
from benchmarks.engines.multi_turn_script import Workload
from benchmarks.engines.report import Results, Row, TurnTarget
from benchmarks.engines.report import result_json as engine_result
from benchmarks.engines.run import (
    Plan,
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
from benchmarks.engines.slow_disk import Slow, measure_slow_disk
from benchmarks.peers import ENVIRONMENTS
from benchmarks.report.output import parser_of
from benchmarks.vllm.servers import (
    AUDITED,
    ENDLESS,
    LMCACHE,
    ON_DISK,
    OURS,
    OWN_FRONT,
    VLLM,
    Vllm,
    vllm_alone,
    vllm_endless,
    with_kvtier,
    with_lmcache,
)
from kvtier.connectors.vllm.shared.fronts import OWN, Front, choose
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.config import parse_size

GIB = 1 << 30
ENDLESS_BLOCKS = 640
"""Blocks of the endless pool. A run of the script needs 200 to 250."""
DEVICE_BLOCKS = {QWEN3: 48, QWEN3_NEXT: 56, GPT_OSS: 64}
"""Blocks of the device pool. The groups of layers of a model have blocks of their own."""
SMALL_HOST = "60MiB"
"""Host memory for a fifth of the KV of a run's conversations."""
NEEDED = ("disk_path", "disk_capacity", "disk_bytes_per_s")
HOST_PROMPTS = 2
"""Prompts for which host memory has room above a slow disk."""
MULTI_TURN, NEW_PROMPTS, SLOW_DISK = PARTS = ("multi-turn", "new-prompts", "slow-disk")
TURN_TARGETS = (
    TurnTarget("T4'", "ttft_to_endless", {OURS: 1.05, OWN_FRONT: 1.05, ON_DISK: 1.1}),
    TurnTarget("T4", "ttft_ratio", dict.fromkeys((OURS, OWN_FRONT, LMCACHE, ON_DISK), -0.5), True),
)
"""T4': limit of the time to first token, divided by that of a pool that never evicts. T4: limit of
its change against vLLM alone."""
QUICK = Plan(
    Workload(num_conversations=7, num_active=5, turns=(8, 10)),
    rounds=1,
    checks=1,
    starts=1,
    new_prompts=8,
    bursts=2,
    slow_prompts=15,
)


def contestants(options: argparse.Namespace) -> list[Contestant]:
    settings = settings_of(options)
    front = front_of(options.environment)
    host = parse_size(options.host, "--host")
    disk = {"disk_path": str(options.scratch / "disk"), "disk_capacity": "4GiB"}
    made: list[Vllm] = [
        vllm_alone(),
        with_kvtier(options.host, front=front, **settings),
        with_kvtier(options.host, OWN_FRONT, OWN, **settings),
        with_kvtier(options.host, AUDITED, front, **{**settings, "audit": 0.001}),
        with_lmcache(host / GIB),
        vllm_endless(ENDLESS_BLOCKS),
        with_kvtier(SMALL_HOST, ON_DISK, front, **disk, **settings),
    ]
    names = {
        "vllm": VLLM,
        "kvtier": OURS,
        "kvtier-own-front": OWN_FRONT,
        "kvtier-audited": AUDITED,
        "lmcache": LMCACHE,
        "endless": ENDLESS,
        "kvtier-on-disk": ON_DISK,
    }
    chosen = [names[contestant] for contestant in options.contestants]
    return [
        replace(each, shape=options.shape)
        if each.is_optional
        else replace(each, environment=options.environment, shape=options.shape)
        for each in made
        if each.name in chosen
    ]


def front_of(environment: str) -> Front:
    """Return the connector of kvtier that serves an environment's vLLM."""
    found = (ENVIRONMENTS / environment / "lib").glob("python*/site-packages/vllm")
    chosen = choose(next(found, None))
    if chosen.front is None:
        sys.exit(f"kvtier can't serve vLLM {chosen.version}: {chosen.why}")
    return chosen.front


def measure(chosen: Sequence[Contestant], plan: Plan, options: argparse.Namespace) -> Results:
    """Measure all parts, one request or run of the script at a time."""
    results = Results()
    say = narrator(options.silent)
    with running(chosen, options) as servers:
        measure_checks(servers, plan, (OURS, OWN_FRONT, ON_DISK), results, say)
        if MULTI_TURN in options.parts:
            measure_multi_turn(servers, plan, options, results, say)
    pair = named(chosen, VLLM, OURS)
    if NEW_PROMPTS in options.parts and len(pair) == 2:
        measure_new_prompts(pair, plan, options, results, say)
    if SLOW_DISK in options.parts and (alone := named(chosen, VLLM)):
        if missing := missing_settings():
            print(f"{SLOW_DISK}: left out: kvtier has no {missing[0]} under vLLM", file=sys.stderr)
        else:
            with running(alone, options) as servers:
                results.slow_disk[OURS] = measure_slow_disk(
                    servers[0],
                    lambda rate, prompt_bytes: with_slow_disk(rate, prompt_bytes, plan, options),
                    Slow(plan.slow_prompts, plan.slow_blocks, KV_BYTES_PER_TOKEN),
                    options.model,
                    options.scratch / "slow",
                    Size(options.device_blocks),
                    say,
                )
    return results


def with_slow_disk(
    rate: int, prompt_bytes: int, plan: Plan, options: argparse.Namespace
) -> Contestant:
    return with_kvtier(
        str(HOST_PROMPTS * prompt_bytes),
        disk_path=str(options.scratch / "slow" / "slab"),
        disk_capacity=2 * plan.slow_prompts * prompt_bytes,
        disk_bytes_per_s=rate,
    )


def missing_settings() -> list[str]:
    """Return the settings of kvtier under vLLM that a slow disk needs."""
    known = {field.name for field in fields(VllmSettings)}
    return [name for name in NEEDED if name not in known]


def result_json(results: Results) -> dict[str, list[Row]]:
    """Return ``rows`` and ``targets`` of the result."""
    return engine_result(results, VLLM, {"endless": ENDLESS}, TURN_TARGETS)


def main(arguments: list[str] | None = None) -> None:
    options = read_options(arguments)
    plan = QUICK if options.quick else Plan()
    run_benchmark(
        "vllm_multi_turn", options, plan, contestants, measure, result_json, options.shape
    )


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("vllm.multi_turn", __doc__)
    add_options(parser, PARTS)
    parser.add_argument(
        "--contestants",
        nargs="*",
        default=["vllm", "kvtier", "lmcache", "endless", "kvtier-on-disk"],
        help="vllm kvtier lmcache endless kvtier-on-disk (these), kvtier-own-front kvtier-audited",
    )
    parser.add_argument(
        "--vllm",
        metavar="VERSION",
        help="another version, installed by `make test-vllm VLLM=VERSION`",
    )
    parser.add_argument("--host", default="1GiB", help="host memory for KV (1GiB)")
    parser.add_argument("--device-blocks", type=int, help="vLLM's own pool (48; shapes: 96, 64)")
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default=QWEN3,
        help="of the model (qwen3); with others the part multi-turn only",
    )
    options = parser.parse_args(arguments)
    if options.shape != QWEN3:
        options.parts = [MULTI_TURN]
    options.device_blocks = options.device_blocks or DEVICE_BLOCKS[options.shape]
    options.environment = f"vllm-{options.vllm}" if options.vllm else "vllm"
    return options


if __name__ == "__main__":
    main()
