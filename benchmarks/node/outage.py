"""M4: a node that is killed, and one that is stopped, while engines use it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.node.killed import BLOCK_BYTES, load, store
from benchmarks.node.part import Part
from benchmarks.node.processes import (
    PATIENCE_S,
    SCOPE,
    SPAWN,
    Node,
    attached,
    mapped,
    running_node,
    until,
)
from benchmarks.report.targets import judged
from benchmarks.scale.keyed import new_keys
from kvtier.devices.cpu import CpuDevice
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import NodeClient
from kvtier.node.client.control import ControlClient
from kvtier.node.client.host import NodeHost
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.server.records import FOLDER, PartitionRows
from kvtier.tools.report.stats import exactly

HOST_BYTES, SEGMENT_BYTES = 128 << 20, 4 << 20
NUM_ENGINES, NUM_PROMPTS, PROMPT_BLOCKS = 2, 256, 8
"""All prompts fit into the memory, so that nothing is evicted."""
KEY_BYTES = len(new_keys(1)[0])
DEADLINE_S = 0.005
SLACK_S = 0.25
"""Allowance for delays by other processes on the machine."""


def measure(quick: bool) -> Part:
    """Kill a node under load several times and check its blocks; then stop it for a while."""
    num_kills, stopped_s = (3, 3.0) if quick else (20, 60.0)
    prompts = [new_keys(PROMPT_BLOCKS) for _ in range(NUM_PROMPTS)]
    found: Counter[str] = Counter()
    with running_node(HOST_BYTES, SEGMENT_BYTES) as node:
        engines = [_Engine(node.config.socket, prompts, seed) for seed in range(NUM_ENGINES)]
        _verified(node)
        for _ in range(num_kills):
            time.sleep(1.0)
            node.kill()
            sealed = _sealed(node)
            node.start()
            _verified(node)
            found += _look_for(node.config.socket, sealed)
        node.pause()
        time.sleep(stopped_s)
        node.resume()
        time.sleep(2.0)
        told = sum((engine.close() for engine in engines), Counter[str]())
    row: dict[str, object] = {
        "kills": num_kills,
        "stopped_s": stopped_s,
        "requests": told["requests"],
        "failed": told["failed"],
        "late": told["late"],
        "loaded": told["loaded"],
        "checksummed": found["sealed"],
        "found": found["found"],
        "wrong": told["wrong"] + found["wrong"],
    }
    failed = exactly(float(told["failed"] + told["late"]))
    share = exactly(found["found"] / max(1, found["sealed"]))
    wrong = exactly(float(told["wrong"] + found["wrong"]))
    targets = [
        judged("M4", failed, 0.0, at_least=False, measure="failed or late requests"),
        judged("M4", share, 0.99, at_least=True, measure="checksummed blocks found"),
        judged("M4", wrong, 0.0, at_least=False, measure="wrong bytes"),
    ]
    return Part([row], targets)


def _verified(node: Node) -> None:
    """Wait until a node has verified all blocks of the previous process."""
    control = ControlClient(node.config.socket, PATIENCE_S)

    def is_done() -> bool:
        state = control.get("/status")
        return bool(state["rooms"]) and not state["unverified_blocks"]

    until(is_done)


def _sealed(node: Node) -> list[bytes]:
    """Return the keys of the blocks whose checksums a node had when it was killed."""
    config = node.config
    name = PartitionKey("default", SCOPE, BLOCK_BYTES, KEY_BYTES).folder
    num_slots = config.host_bytes // BLOCK_BYTES
    rows = PartitionRows(config.directory / FOLDER, name, KEY_BYTES, num_slots)
    valid = np.flatnonzero(rows.are_valid(range(num_slots)))
    rows.close()
    keys: list[bytes] = rows.records["key"][valid].tolist()
    return keys


def _look_for(socket: Path, keys: Sequence[bytes]) -> Counter[str]:
    """Return how many of the blocks a node has, and how many with wrong bytes."""
    with (
        attached(socket, BLOCK_BYTES, "reader") as cache,
        mapped(socket, BLOCK_BYTES, "reader") as host,
    ):
        until(lambda: host.memory_of(cache.hold([]).guard))
        num, wrong, _ = load(cache, host, keys)
    return Counter(sealed=len(keys), found=num, wrong=wrong)


class _Engine:
    """A process that loads prompts, and stores what is missing, until ``close``."""

    def __init__(self, socket: Path, prompts: Sequence[Sequence[bytes]], seed: int) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(socket, prompts, seed, theirs))
        self._process.start()
        theirs.close()

    def close(self) -> Counter[str]:
        """End the process. Return its counts."""
        self._pipe.send("end")
        told: Counter[str] = self._pipe.recv()
        self._process.join()
        return told


def _serve(socket: Path, prompts: Sequence[Sequence[bytes]], seed: int, pipe: Connection) -> None:
    rng, told = random.Random(seed), Counter[str]()
    name = f"engine {seed}"
    cache = NodeCache(NodeClient(socket, engine=name), lambda: SCOPE, BLOCK_BYTES, DEADLINE_S)
    host = NodeHost(NodeClient(socket, engine=name), CpuDevice(), BLOCK_BYTES, 0, 1)
    while not pipe.poll():
        prompt = rng.choice(prompts)
        told["requests"] += 1
        try:
            began_s = time.monotonic()
            num, wrong, missing = load(cache, host, prompt)
            if missing:
                store(cache, host, missing)
                cache.poll()
            told["late"] += time.monotonic() - began_s > 2 * DEADLINE_S + SLACK_S
        except Exception:
            told["failed"] += 1
            raise
        told["loaded"] += num
        told["wrong"] += wrong
        time.sleep(0.002)
    host.close()
    cache.close()
    pipe.send(told)
