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


class Loaded(NamedTuple):
    """Blocks that were found in memory.

    num: how many. wrong: how many of them had wrong bytes. missing: keys of the others.
    """

    num: int
    wrong: int
    missing: Sequence[bytes]


def content_of(key: bytes) -> Bytes:
    """Return the bytes of a block, which follow from its key."""
    seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def store(cache: NodeCache, host: NodeHost, keys: Sequence[bytes]) -> bool:
    """Store a prompt with its bytes, as an engine's scheduler and rank do. False for no node."""
    reserved = cache.reserve(keys)
    if reserved is None:
        return False
    memory = host.memory_of(reserved.guard)
    if memory is None:
        cache.abort(reserved.keys)
        return False
    blocks = blocks_of(memory, BLOCK_BYTES)
    for key, slot in zip(reserved.keys, reserved.slots, strict=True):
        blocks[slot] = content_of(key)
    cache.commit(reserved.keys, range(len(reserved.keys)))
    return True


def load(cache: NodeCache, host: NodeHost, keys: Sequence[bytes]) -> Loaded:
    """Look blocks up, and compare the bytes of those in memory."""
    places, _ = cache.lookup(keys)
    ready = [k for k, place in zip(keys, places, strict=True) if place is BlockState.MEMORY]
    found, wrong = set[bytes](), 0
    if ready:
        held = cache.hold(ready)
        slots, memory = held.slots, host.memory_of(held.guard)
        if memory is not None and held.guard is not None:
            copied = blocks_of(memory, BLOCK_BYTES)[slots]
            assert memory.generations is not None
            are_same = memory.generations[slots] == held.guard.generations
            for key, block, is_same in zip(ready, copied, are_same.tolist(), strict=True):
                if is_same:  # else a miss
                    found.add(key)
                    wrong += not np.array_equal(block, content_of(key))
        cache.release(ready)
    cache.poll()
    return Loaded(len(found), wrong, [key for key in keys if key not in found])


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
            cache.forget_seen()  # the node itself is to answer
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
            until(lambda: host.memory_of(cache.hold([]).guard))
            found, half = load(cache, host, acknowledged), load(cache, host, rest)
    rows = [
        {"blocks": name, "kills": num_kills, "num": num, "found": each.num, "wrong": each.wrong}
        for name, num, each in (
            ("acknowledged", len(acknowledged), found),
            ("others", len(rest), half),
        )
    ]
    share = exactly((found.num - found.wrong) / len(acknowledged))
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
