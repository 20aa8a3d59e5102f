"""From an environment to the first hit under vLLM: what is written and run, and how long it takes.

    python -m benchmarks.vllm.first_hit            a table
    python -m benchmarks.vllm.first_hit --json -   JSON on stdout, the table on stderr

Runs the command lines of ``WAYS``: those of kvtier, of vLLM's own offloading and of LMCache, from
an environment in which the packages are installed. Each way must find a prompt in its own memory
after vLLM has forgotten it, or in a new process after all of its processes were killed; otherwise
the result says why not, and for kvtier the benchmark fails. Needs vLLM, and for its ways LMCache.
See README.md for the method.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.engines.model import make_model
from benchmarks.engines.servers import Server, Size
from benchmarks.peers import ENVIRONMENTS
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, set_usual, table_of
from benchmarks.vllm.servers import BLOCK, QUIET, Vllm
from kvtier.tools.report.stats import median_with_interval, rounded

KVTIER, OWN, LMCACHE = "kvtier", "vLLM's own", "LMCache"
TIMES = "ready_s", "first_hit_s"
PROMPT = list(range(100, 100 + 8 * BLOCK + 1))
SIZE = Size(device_blocks=64)
POLL_S, HIT_S = 0.5, 60.0
STORED_S = 5.0
"""Seconds that every way has for its writes before it is killed."""
CONNECTOR_OWN = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [{"type": "fs", "root_dir": "FOLDER"}],
    },
}
LMCACHE_SERVER = "lmcache server --l1-size-gb 1 --eviction-policy LRU"
LMCACHE_CLIENT = "vllm serve MODEL --kv-offloading-backend lmcache --kv-offloading-size 1"
"""vLLM asks for a size, and leaves it to the server."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to reuse KV. is_durable: whether it is found by new processes.

    commands: as a user types them; that of vLLM is the last one. MODEL and FOLDER stand for paths.
    """

    name: str
    commands: Sequence[str]
    is_durable: bool = False
    environment: str = "vllm"

    @property
    def is_there(self) -> bool:
        return (ENVIRONMENTS / self.environment / "bin/python").exists()

    def counts(self) -> dict[str, int]:
        """Return the number of commands, and of what is written beside ``vllm serve MODEL``."""
        variables, words = _split(self.commands[-1])
        others = [word for command in self.commands[:-1] for word in shlex.split(command)]
        return {
            "commands": len(self.commands),
            "processes_beside_vllm": len(self.commands) - 1,
            "variables_and_options": len(variables)
            + sum(word.startswith("--") for word in (*others, *words)),
            "json_fields": sum(map(_fields, [*others, *words])),
            "characters": sum(map(len, self.commands)) - len("vllm serve MODEL"),
        }


WAYS = (
    Way(KVTIER, ["KVTIER_HOST_CAPACITY=1GiB vllm serve MODEL"]),
    Way(OWN, ["vllm serve MODEL --kv-offloading-size 1"]),
    Way(LMCACHE, [LMCACHE_SERVER, LMCACHE_CLIENT], environment="vllm-lmcache"),
    Way(
        KVTIER,
        ["KVTIER_HOST_CAPACITY=1GiB KVTIER_DISK_PATH=FOLDER vllm serve MODEL"],
        is_durable=True,
    ),
    Way(
        OWN,
        [f"vllm serve MODEL --kv-transfer-config '{json.dumps(CONNECTOR_OWN)}'"],
        is_durable=True,
    ),
    Way(
        LMCACHE,
        [
            LMCACHE_SERVER + """ --l2-adapter '{"type": "fs", "base_path": "FOLDER"}'""",
            LMCACHE_CLIENT,
        ],
        is_durable=True,
        environment="vllm-lmcache",
    ),
)


def _split(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables of a command line of vLLM, and the words behind ``serve MODEL``."""
    words = shlex.split(command)
    at = words.index("vllm")
    return dict(word.split("=", 1) for word in words[:at]), words[at + 3 :]


def _fields(word: str) -> int:
    """Return the number of values in a JSON argument."""
    return len(re.findall(r'":\s*(?![\s{\[])', word)) if word.startswith("{") else 0


@dataclass(frozen=True, slots=True)
class Typed(Vllm):
    """vLLM with the options of a way's command line."""

    options: Sequence[str] = field(default=(), kw_only=True)

    def command(self, model: Path, port: int, folder: Path, size: Size) -> list[str]:
        # Unlike super(), the name of the class works in a class with slots.
        return [*Vllm.command(self, model, port, folder, size), *self.options]


@contextmanager
def started(way: Way, model: Path, folder: Path, store: Path) -> Iterator[Server]:
    """Run a way's commands; kill what they started at the end."""
    commands = [command.replace("FOLDER", str(store)) for command in way.commands]
    variables, options = _split(commands[-1])
    if way.name != KVTIER:
        variables["VLLM_PLUGINS"] = ""
    beside = []
    folder.mkdir()
    for command in commands[:-1]:
        program, *words = shlex.split(command)
        with (folder / "beside.log").open("w") as log:
            beside.append(
                subprocess.Popen(
                    [ENVIRONMENTS / program / "bin" / program, *words],
                    env={**os.environ, **QUIET},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    contestant = Typed(way.name, way.environment, variables=variables, options=options)
    server = Server(contestant, model, folder, SIZE)
    try:
        yield server
    finally:
        server.kill()
        for process in beside:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def first_hit(server: Server) -> None:
    """Send the prompt until some of it comes from a tier below vLLM's own pool.

    Raises:
        RuntimeError: it never does.
    """
    give_up = time.monotonic() + HIT_S
    while time.monotonic() < give_up:
        server.reset()
        before = server.tokens()
        server.ask(PROMPT, 1)
        if server.tokens().since(before).from_tier:
            return
        time.sleep(POLL_S)
    raise RuntimeError(f"{server.contestant.name}: nothing was found within {HIT_S:.0f} s")


def take(way: Way, model: Path, folder: Path) -> dict[str, float]:
    """Return the seconds from the first command until vLLM answers, and until the first hit.

    Of a durable way, those of the second start.
    """
    store = folder / "store"
    store.mkdir(parents=True)
    if way.is_durable:
        with started(way, model, folder / "before", store) as server:
            server.wait()
            server.ask(PROMPT, 1)
            server.ask(PROMPT[:3], 3)  # steps in which stores end
            time.sleep(STORED_S)
    begin = time.monotonic()
    with started(way, model, folder / "run", store) as server:
        server.wait()
        ready = time.monotonic()
        first_hit(server)
        return dict(zip(TIMES, (ready - begin, time.monotonic() - begin), strict=True))


def measure(ways: Sequence[Way], rounds: int) -> list[dict[str, Any]]:
    """Run every way in each round, except those of others that do not work here."""
    taken: list[list[dict[str, float]]] = [[] for _ in ways]
    refusals: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model")
        for number in range(rounds):
            for at, way in enumerate(ways):
                if at in refusals:
                    continue
                try:
                    taken[at].append(take(way, model, Path(scratch) / f"{number}-{at}"))
                except RuntimeError as error:
                    if way.name == KVTIER:
                        raise
                    refusals[at] = str(error)
    rows = []
    for at, (way, samples) in enumerate(zip(ways, taken, strict=True)):
        medians: dict[str, Any] = {}
        for name in TIMES if at not in refusals else ():
            times = [sample[name] for sample in samples]
            medians[name] = rounded(median_with_interval(times).value)
        rows.append(
            {
                "way": way.name,
                "is_durable": way.is_durable,
                **way.counts(),
                **medians,
                "rounds": rounds,
                "command_lines": list(way.commands),
                "refused": refusals.get(at),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    names = [
        *("commands", "processes_beside_vllm", "variables_and_options", "json_fields"),
        *("characters", *TIMES),
    ]
    return table_of(
        "From an environment to the first hit under vLLM",
        ["way", "after"],
        [name.removesuffix("_s").replace("_", " ") for name in names[:-2]]
        + ["ready, s", "first hit, s"],
        [
            [
                row["way"],
                "a kill" if row["is_durable"] else "vLLM forgot it",
                *(str(row.get(name, "not here")) for name in names),
            ]
            for row in rows
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("vllm.first_hit", __doc__)
    parser.add_argument("--quick", action="store_true", help="1 round")
    parser.add_argument("--rounds", type=int, help="(3)")
    options = parser.parse_args(arguments)
    set_usual(options, {"rounds": 3}, {"rounds": 1})
    rows = measure([way for way in WAYS if way.is_there], options.rounds)
    report(options.json, "vllm_first_hit", machine_facts(), rows, [], table(rows))


if __name__ == "__main__":
    main()
