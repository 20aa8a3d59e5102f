"""Waiting requests under kvtier, and vLLM's own manager, in vLLM's environment.

Prints one JSON list on stdout: {operation, contestant, num, seconds}.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from benchmarks.scale.keyed import BLOCK_BYTES, FILL, NUM_TO_MOVE, PROMPT_BLOCKS, new_keys
from benchmarks.scale.part import timed, timed_in_turn
from kvtier.cache.transfer.ranks import Hello, RankMover, Report
from kvtier.connectors.vllm.offloading.manager import OffloadedTiers
from kvtier.connectors.vllm.shared.names import VllmNames
from kvtier.connectors.vllm.shared.prompt import Shape
from kvtier.connectors.vllm.shared.request_state import Advice
from kvtier.connectors.vllm.shared.tiers import rank_tiers
from kvtier.core.types import DISK, HOST, LoadPolicy
from kvtier.tiers import StorageFacts

NUM_WAITING = 500
STEP = 16
CALLS = 20


class Known(VllmNames):
    digest = b"n" * 32  # type: ignore[assignment]


def waiting(num: int) -> Callable[[], None]:
    """Return a step in which ``NUM_WAITING`` requests wait for a prompt that another one stores.

    The cache has ``num`` other blocks.
    """
    mover = RankMover({DISK: StorageFacts(finds_at_once=True)}, BLOCK_BYTES, 1, 1)
    room = {HOST: num + PROMPT_BLOCKS, DISK: num}
    names = Known(None, BLOCK_BYTES, "vllm")  # type: ignore[arg-type]
    shape = Shape((STEP,), BLOCK_BYTES)
    tiers = rank_tiers(mover, room, names, shape)
    manager = OffloadedTiers(tiers, mover, names, shape, LoadPolicy.ALWAYS, publishes_events=False)
    manager.hear(Report(hellos={0: Hello(room[HOST])}))
    for at in range(0, num, FILL):
        held = manager.cache.reserve(new_keys(min(FILL, num - at)))
        assert held is not None
        manager.cache.commit(held.keys, [0] * len(held.keys), to_storage=False)
    prompt = new_keys(PROMPT_BLOCKS)
    assert manager.cache.reserve(prompt) is not None
    ends = {key: (block + 1) * STEP for block, key in enumerate(prompt)}
    for at in range(NUM_WAITING):
        context = ReqContext(f"request {at}")
        context._offload_key_positions.update(ends)
        manager.on_new_request(context)
        state = manager.state_of(context.req_id)
        state.begin_look_up(0)
        for key in prompt:
            manager.lookup(key, context)
        advice = manager.promotion.advise(state, 0, len(prompt) * STEP)
        assert advice is Advice.WAIT, advice
    states = [manager.state_of(f"request {at}") for at in range(NUM_WAITING)]
    for state in states:  # no wait ends while the others arrive
        assert state.wait is not None
        state.wait = dataclasses.replace(state.wait, until_s=float("inf"))

    def step() -> None:
        manager.hear(Report())
        for state in states:
            assert manager.promotion.must_wait(state, 0)

    step()
    return step


def peer(num: int) -> dict[str, list[float]]:
    """Time vLLM's full ``CPUOffloadingManager``: a prompt looked up key by key, and a store."""
    manager = CPUOffloadingManager(num, cache_policy="lru")
    context = ReqContext("request")
    keys = []
    for at in range(0, num, FILL):
        keys = new_keys(min(FILL, num - at))
        manager.prepare_store(keys, context)
        manager.complete_store(set(keys), context)
    prompt = keys[:PROMPT_BLOCKS]

    def look_up() -> None:
        for key in prompt:
            manager.lookup(key, context)

    def store() -> None:
        new = new_keys(NUM_TO_MOVE)
        manager.prepare_store(new, context)
        manager.complete_store(set(new), context)

    operations: dict[str, Callable[[], None]] = {
        "look up a prompt of 6,250 blocks": look_up,
        "store 64 blocks, 64 others leave": store,
    }
    return {name: timed(call, CALLS) for name, call in operations.items()}


def main() -> None:
    sizes = list(map(int, sys.argv[1:]))
    name = f"{NUM_WAITING} requests of 100,000 tokens wait"
    of_ours = timed_in_turn({num: waiting(num) for num in sizes}, CALLS)
    found = [_told(name, "kvtier", num, seconds) for num, seconds in of_ours.items()]
    for num in sizes:
        if num <= 1_000_000:  # beyond, a store of vLLM's takes minutes
            found += [_told(each, "vLLM", num, seconds) for each, seconds in peer(num).items()]
    print(json.dumps(found))


def _told(operation: str, contestant: str, num: int, seconds: list[float]) -> dict[str, object]:
    return {"operation": operation, "contestant": contestant, "num": num, "seconds": seconds}


if __name__ == "__main__":
    main()
