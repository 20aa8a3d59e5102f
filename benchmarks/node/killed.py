"""M3: blocks of killed engines, which later engines find in the node."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.node.part import Part
from benchmarks.node.processes import (
    SPAWN,
    Bytes,
    attached,
    blocks_of,
    mapped,
    running_node,
    until,
)
from benchmarks.report.targets import judged
from benchmarks.scale.keyed import new_keys
from kvtier.cache.block_cache import BlockState
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.host import NodeHost
from kvtier.tools.report.stats import exactly

BLOCK_BYTES = 16 << 10
PROMPT_BLOCKS = 16
PROMPTS_BEFORE = 8
"""Prompts that an engine stores before it is killed, at least."""
HOST_BYTES, SEGMENT_BYTES = 256 << 20, 4 << 20


class Checked(NamedTuple):
    """Numbers of blocks that were looked up, found in memory, and had wrong bytes."""

    num: int
    found: int
    wrong: int


def content_of(key: bytes) -> Bytes:
    """Return the bytes of a block, which follow from its key."""
    seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def store(cache: NodeCache, host: NodeHost, keys: Sequence[bytes]) -> bool:
    """Store a prompt with its bytes, as an engine's scheduler and rank do."""
    reserved = cache.reserve(keys)
    if reserved is None:
        return False
    blocks = blocks_of(host.memory_of(reserved.guard), BLOCK_BYTES)
    for key, slot in zip(reserved.keys, reserved.slots, strict=True):
        blocks[slot] = content_of(key)
    cache.commit(reserved.keys, range(len(reserved.keys)))
    return True


def check(cache: NodeCache, host: NodeHost, keys: Sequence[bytes]) -> Checked:
    """Look blocks up, and compare the bytes of those in memory."""
    places, _ = cache.lookup(keys)
    ready = [k for k, place in zip(keys, places, strict=True) if place is BlockState.MEMORY]
    wrong = 0
    if ready:
        held = cache.hold(ready)
        slots, guard = held.slots, held.guard
        memory = host.memory_of(guard)
        copied = blocks_of(memory, BLOCK_BYTES)[slots]
        assert memory is not None
        assert memory.generations is not None
        assert guard is not None
        is_right = memory.generations[slots] == guard.generations
        for key, block, is_same in zip(ready, copied, is_right.tolist(), strict=True):
            wrong += not is_same or not np.array_equal(block, content_of(key))
        cache.release(ready)
    cache.poll()
    return Checked(len(keys), len(ready), wrong)


def _engine(socket: Path, pipe: Connection) -> None:
    """Store prompts until killed.

    Send each prompt's keys before it is stored, and again when the node has it.
    """
    with (
        attached(socket, BLOCK_BYTES, "engine") as cache,
        mapped(socket, BLOCK_BYTES, "engine") as host,
    ):
        while True:
            keys = new_keys(PROMPT_BLOCKS)
            pipe.send((False, keys))
            until(lambda keys=keys: store(cache, host, keys))  # type: ignore[misc]
            if cache.lookup_again(keys[-1]) is BlockState.MEMORY:
                pipe.send((True, keys))
            cache.poll()


def measure(quick: bool) -> Part:
    """Kill engines that store, and look for their blocks."""
    num_kills = 2 if quick else 20
    acknowledged: list[bytes] = []
    rest: list[bytes] = []
    with running_node(HOST_BYTES, SEGMENT_BYTES) as node:
        socket = node.config.socket
        for _ in range(num_kills):
            done, others = _kill_one(socket)
            acknowledged += done
            rest += others
        with (
            attached(socket, BLOCK_BYTES, "next") as cache,
            mapped(socket, BLOCK_BYTES, "next") as host,
        ):
            found = check(cache, host, acknowledged)
            half = check(cache, host, rest) if rest else Checked(0, 0, 0)
    rows = [
        {"blocks": name, "kills": num_kills, **each._asdict()}
        for name, each in (("acknowledged", found), ("others", half))
    ]
    share = exactly((found.found - found.wrong) / found.num)
    wrong = exactly(float(found.wrong + half.wrong))
    targets = [
        judged("M3", share, 1.0, at_least=True, measure="acknowledged blocks found"),
        judged("M3", wrong, 0.0, at_least=False, measure="wrong bytes"),
    ]
    return Part(rows, targets)


def _kill_one(socket: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the keys of blocks that an engine has stored when it is killed, and of others."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_engine, args=(socket, theirs))
    process.start()
    theirs.close()
    told: list[tuple[bool, list[bytes]]] = []
    while sum(is_stored for is_stored, _ in told) < PROMPTS_BEFORE or told[-1][0]:
        told.append(ours.recv())  # it is in the middle of a prompt when it is killed
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    while True:  # messages sent before the kill
        try:
            told.append(ours.recv())
        except EOFError:
            break
    done = [key for is_stored, keys in told if is_stored for key in keys]
    begun = [key for _, keys in told for key in keys]
    stored = set(done)
    return done, [key for key in begun if key not in stored]
