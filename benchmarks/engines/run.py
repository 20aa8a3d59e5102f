"""Start of several servers, and the measurements on them that are the same for every engine."""

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

from benchmarks.engines.model import QWEN3, make_model
from benchmarks.engines.multi_turn_script import SCRIPT, Workload, run_script
from benchmarks.engines.report import (
    ASKED_RATIOS,
    BURST_RATIOS,
    Results,
    Row,
    median_ratio,
    tables,
)
from benchmarks.engines.requests import NewPrompts, ask_new, burst_new, check, in_turn
from benchmarks.engines.servers import Contestant, Server, Size
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the parts."""

    workload: Workload = field(default_factory=Workload)
    rounds: int = 6
    checks: int = 3
    starts: int = 6
    """Starts of the two servers that get new prompts."""
    new_prompts: int = 10
    """New prompts per start."""
    bursts: int = 4
    """Bursts per start, each of ``burst_prompts`` at once."""
    new_tokens: int = 1000
    new_output: int = 16
    burst_prompts: int = 4
    slow_prompts: int = 24
    slow_blocks: int = 8
    known_prompts: int = 0
    """Prompts that are sent twice; 0 if the benchmark has no such part."""
    known_blocks: int = 0


def value_of(text: str) -> object:
    """Return a setting as JSON, or unchanged if it is no JSON: "8GiB"."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def narrator(silent: bool) -> Say:
    """Return a function that prints an event on stderr, with the seconds since the start."""
    progress = Console(stderr=True, quiet=silent)
    begin = time.monotonic()

    def say(what: str) -> None:
        progress.print(f"[dim]{time.monotonic() - begin:5.0f} s[/]  {what}", highlight=False)

    return say


def start(chosen: Sequence[Contestant], model: Path, folder: Path, size: Size) -> list[Server]:
    """Start the contestants that can take part, and wait until they answer.

    Print a line on stderr for each peer that is left out.
    """
    begun = []
    for number, contestant in enumerate(chosen):
        if contestant.python.exists():
            begun.append(Server(contestant, model, folder / f"server{number}", size))
        elif contestant.is_optional:
            installed_by = f"make peers-{contestant.environment}"
            print(f"{contestant.name}: left out, `{installed_by}` installs it", file=sys.stderr)
        else:
            sys.exit(f"{contestant.name}: {contestant.python} is missing: see benchmarks/README.md")
    ready = []
    try:
        for server in begun:
            try:
                server.wait()
            except RuntimeError as error:
                server.close()
                name = server.contestant.name
                if not server.contestant.is_optional:
                    raise RuntimeError(f"{name}: {error}") from None
                print(f"{name}: left out: {error}", file=sys.stderr)
            else:
                ready.append(server)
    except BaseException:
        for server in begun:
            server.close()
        raise
    return ready


@contextmanager
def started(
    chosen: Sequence[Contestant], model: Path, folder: Path, size: Size
) -> Iterator[list[Server]]:
    """Yield the servers of ``start``, and close them."""
    servers = start(chosen, model, folder, size)
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


@contextmanager
def running(
    chosen: Sequence[Contestant], options: argparse.Namespace, size: Size | None = None
) -> Iterator[list[Server]]:
    """Yield the contestants' servers, in the order of the contestants."""
    size = size or Size(options.device_blocks)
    with (
        tempfile.TemporaryDirectory(dir=options.scratch) as folder,
        started(chosen, options.model, Path(folder), size) as servers,
    ):
        yield servers


def named(chosen: Sequence[Contestant], *names: str) -> list[Contestant]:
    return [each for each in chosen if each.name in names]


def measure_checks(
    servers: Sequence[Server], plan: Plan, must: Sequence[str], results: Results, say: Say
) -> None:
    """Compare the servers' answers.

    A wrong answer of a contestant in ``must`` raises AssertionError.
    """
    results.checks = check(servers, plan.checks)
    for server, each in zip(servers, results.checks, strict=True):
        if failure := each.failure(has_tier=server.contestant.has_tier):
            message = f"{each.contestant}: {failure}"
            if each.contestant in must:
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
    """Measure new prompts on two servers, one without kvtier and one with it.

    The servers are started several times, because servers of a kind differ.
    """
    lengths, seed = (plan.new_tokens, plan.new_output), options.seed * 1_000_000
    for number in range(plan.starts):
        with running(in_turn(pair, number), options) as started:
            servers = sorted(started, key=lambda server: pair.index(server.contestant))
            asked = ask_new(servers, plan.new_prompts, *lengths, seed + 10_000)
            bursts = burst_new(servers, plan.bursts, plan.burst_prompts, *lengths, seed + 20_000)
        new = NewPrompts(asked, bursts)
        results.new.setdefault(pair[1].name, []).append(new)
        ttft = median_ratio(new.asked, ASKED_RATIOS["ttft_ratio"])
        rate = median_ratio(new.bursts, BURST_RATIOS["tokens_per_s_ratio"])
        say(f"{pair[1].name}, new prompts: {ttft:.3f} of the TTFT, {rate:.3f} of the tokens per s")


def versions(contestant: Contestant) -> str:
    """Return the versions of the engine and of the packages under it."""
    program = (
        "import importlib.metadata as m, sys;"
        "print(*(f'{p} {m.version(p)}' for p in sys.argv[1:]), sep=', ')"
    )
    done = subprocess.run(
        [contestant.python, "-c", program, *contestant.packages],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def add_options(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """Add the options that the benchmarks of all engines have."""
    parser.add_argument("--quick", action="store_true", help="fewer of everything")
    parser.add_argument("--rounds", type=int, help="of the multi-turn benchmark (6)")
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts, help="only these")
    parser.add_argument("--model", type=Path, help="default: random weights, made for the run")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and conversations (1)")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="more settings for kvtier"
    )
    parser.add_argument("--silent", action="store_true", help="no progress on stderr")


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the settings of ``--set``."""
    return {name: value_of(text) for name, text in (each.split("=", 1) for each in options.set)}


Measures = Callable[[Sequence[Contestant], Plan, argparse.Namespace], Results]


def run_benchmark(
    name: str,
    options: argparse.Namespace,
    plan: Plan,
    contestants: Callable[[argparse.Namespace], Sequence[Contestant]],
    measure: Measures,
    result_of: Callable[[Results], dict[str, list[Row]]],
    shape: str = QWEN3,
) -> None:
    """Measure, print the tables and write the result. shape: of the model that is made."""
    machine = machine_facts()
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)
    if not SCRIPT.exists():
        sys.exit("vLLM's benchmark script is missing: `make peers-vllm` fetches it")
    with tempfile.TemporaryDirectory(prefix="kvtier-turns-") as folder:
        options.scratch = Path(folder)
        if options.model is None:
            options.model = make_model(options.scratch / "model", shape=shape)
        chosen = contestants(options)
        found = result_of(measure(chosen, plan, options))
    report(
        options.json,
        name,
        machine,
        found["rows"],
        found["targets"],
        *tables(found["rows"]),
        versions={each.name: versions(each) for each in chosen if each.python.exists()},
        plan={
            **asdict(plan),
            "shape": shape,
            "device_blocks": options.device_blocks,
            "host": options.host,
        },
    )
