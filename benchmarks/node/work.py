"""M6: CPU time of a node per request of 100 blocks, and its memory per block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.node.part import JsonRow, Part
from benchmarks.node.processes import (
    STORED_AT_ONCE,
    Node,
    attached,
    check_all_there,
    running_node,
    store,
)
from benchmarks.report.targets import judged
from benchmarks.scale.keyed import new_keys
from kvtier.node.client.cache import NodeCache
from kvtier.node.server.records import record_type
from kvtier.tools.report.stats import exactly, median_with_interval

REQUEST_BLOCKS = 100
ONE_BLOCK = "reserve and commit 1 block"
"""Row without a target: the share of messages in the time for 100 blocks."""
BY_PROMPT, BY_STEP = "96 blocks of 8 prompts, 8 commits", "96 blocks of 8 prompts, 1 commit"
"""Rows without a target: what a step stores, committed by prompt, or at once as by kvtier's own
connector."""
WITHOUT_TARGET = (ONE_BLOCK, BY_PROMPT, BY_STEP)
NUM_PROMPTS, PROMPT_BLOCKS = 8, 12
MAX_US = 50.0
MAX_BYTES = 150.0
BLOCK_BYTES = 64
SEGMENT_BYTES = 4 << 20
ROW_BYTES = 8 + 8 + record_type(len(new_keys(1)[0])).itemsize
"""Bytes of a slot's generation, users and record, which lie in shared memory."""
ROOM, SHORT = 6, 4
"""With room, the memory holds so many times the blocks that one kind of request stores; if full,
they are ``SHORT`` times what the memory holds."""


def measure(quick: bool) -> Part:
    """Measure CPU time per request in two nodes, one with room and one full; then memory."""
    num_rounds, num_requests = (2, 20) if quick else (12, 200)
    num_new = (num_rounds + 1) * num_requests * REQUEST_BLOCKS
    found: dict[str, list[float]] = {}
    for state, capacity in ("with room", ROOM * num_new), ("full", num_new // SHORT):
        num_bytes = max(capacity * BLOCK_BYTES, SEGMENT_BYTES)
        with (
            running_node(num_bytes, SEGMENT_BYTES) as node,
            attached(node.config.socket, BLOCK_BYTES) as cache,
        ):
            if state == "full":
                store(cache, new_keys(num_bytes // BLOCK_BYTES))
            found |= _requests(node, cache, state, num_rounds, num_requests)
    cpu = [_row(name, times) for name, times in found.items()]
    memory = _memory(200_000 if quick else 1_000_000)
    rows = [*cpu, memory]
    targets = [
        judged(
            "M6",
            median_with_interval(times),
            MAX_US,
            at_least=False,
            digits=1,
            measure=f"CPU us, {name}",
        )
        for name, times in found.items()
        if name not in WITHOUT_TARGET
    ]
    per_block = exactly(float(str(memory["median"])))
    targets.append(judged("M6", per_block, MAX_BYTES, at_least=False, measure="bytes per block"))
    return Part(rows, targets)


def _requests(
    node: Node, cache: NodeCache, state: str, num_rounds: int, num_requests: int
) -> dict[str, list[float]]:
    """Return the node's CPU microseconds per request of each round, by kind of request."""
    known = new_keys(REQUEST_BLOCKS)
    store(cache, known)

    def look_up() -> None:
        for _ in range(num_requests):
            check_all_there(cache.lookup(known)[0])
            cache.poll()

    def reserve() -> None:
        for _ in range(num_requests):
            store(cache, new_keys(REQUEST_BLOCKS))

    def reserve_one() -> None:
        for _ in range(num_requests):
            store(cache, new_keys(1))

    def reserve_step(num_commits: int) -> None:
        depths = [*range(PROMPT_BLOCKS)] * (NUM_PROMPTS // num_commits)
        for _ in range(num_requests):
            reserved = cache.reserve(new_keys(NUM_PROMPTS * PROMPT_BLOCKS))
            assert reserved is not None, "the node has room"
            for at in range(0, len(reserved.keys), len(depths)):
                cache.commit(reserved.keys[at : at + len(depths)], depths)

    def report_and_reserve() -> None:
        for _ in range(num_requests):
            _store_prompt(cache, new_keys(REQUEST_BLOCKS))

    kinds: dict[str, Callable[[], None]] = {
        f"reserve and commit, {state}": reserve,
    }
    if state == "with room":
        kinds[ONE_BLOCK] = reserve_one
        kinds[BY_PROMPT] = partial(reserve_step, NUM_PROMPTS)
        kinds[BY_STEP] = partial(reserve_step, 1)
        kinds["report, reserve and commit"] = report_and_reserve
        kinds["look up, lease and release"] = look_up
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(num_rounds + 1):
        for name, work in kinds.items():
            began = node.cpu_s
            work()
            cache.lookup_again(known[0])  # answered after all earlier requests
            if number:
                found[name].append(1e6 * (node.cpu_s - began) / num_requests)
    return found


def _store_prompt(cache: NodeCache, keys: list[bytes]) -> None:
    """Report a request and store its blocks, as an engine does."""
    cache.on_request(keys)
    store(cache, keys)


def _fill(cache: NodeCache, num_blocks: int) -> list[bytes]:
    """Fill a node with prompts. Return the keys of the last one."""
    keys: list[bytes] = []
    for at in range(0, num_blocks, STORED_AT_ONCE):
        keys = new_keys(min(STORED_AT_ONCE, num_blocks - at))
        _store_prompt(cache, keys)
    return keys


def _memory(num_blocks: int) -> JsonRow:
    """Return the bytes that a node needs per block besides the blocks themselves."""
    with running_node(num_blocks * BLOCK_BYTES, SEGMENT_BYTES) as node:
        num_slots = node.config.host_bytes // SEGMENT_BYTES * (SEGMENT_BYTES // BLOCK_BYTES)
        before = node.own_bytes
        with attached(node.config.socket, BLOCK_BYTES) as cache:
            keys = _fill(cache, num_slots)
            places, _ = cache.lookup(keys)
            check_all_there(places)
            cache.poll()
            grown = node.own_bytes - before
    per_block = grown / num_slots + ROW_BYTES
    return {"what": f"{num_slots:,} blocks", "unit": "bytes per block", "median": per_block}


def _row(name: str, times: Sequence[float]) -> JsonRow:
    value = median_with_interval(times).value
    return {"what": name, "unit": "CPU us per request", "median": value}
