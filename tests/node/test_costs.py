"""Costs of a prompt in the engines of a node, asked by its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtier.core.errors import CacheError
from kvtier.core.types import DEVICE, DISK, HOST, BlockId, Match
from kvtier.node.client.cache import NodeCache
from kvtier.node.client.channel import NodeClient
from kvtier.node.server.control import MAX_PROMPT_TOKENS
from kvtier.node.wire import protocol
from kvtier.plan import PromptCost, weigh
from tests.kit.nodes import NodeProcess
from tests.kit.waiting import wait_until
from tests.node.harness import BLOCK, SCOPE, bare, node_process
from tests.node.test_events import SIZE, description, keys_of, store

PROMPT = list(range(1, 41))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    disk = (f"--disk-path={tmp_path / 'disk'}", "--disk-capacity=1MiB")
    with node_process(tmp_path, "--events=tcp://127.0.0.1:*", *disk) as made:
        yield made


@pytest.fixture
def engine(node: NodeProcess) -> Iterator[NodeCache]:
    """An engine that has measured copies and prefill."""
    made = NodeCache(NodeClient(node.socket, engine="engine"), lambda: SCOPE, BLOCK, 5.0)
    probe = [b"probe".ljust(36)]
    wait_until(lambda: made.reserve(probe) is not None)
    made.abort(probe)
    for size in 1, 8:
        made._model.observe_copy((HOST, DEVICE), size * BLOCK, 1e-6 * size)
        made._model.observe_copy((DISK, HOST), size * BLOCK, 1e-5 * size)
    for tokens in 100, 400:
        made.costs.observe_prefill(0, tokens, 1e-4 * tokens)
    yield made
    made.close()


def cost(node: NodeProcess, prompt: list[int], salt: str = "") -> Any:
    return node.control.post("/cost", prompt=prompt, tenant=salt)


def found(node: NodeProcess, prompt: list[int], salt: str = "") -> Any:
    """Return the tokens that the engine would reuse."""
    return cost(node, prompt, salt).get("engine", {}).get("reused_tokens")


def measured(engine: NodeCache, node: NodeProcess) -> None:
    engine._next_costs_s = 0.0
    engine.poll()
    wait_until(lambda: "engine" in cost(node, [9]), "the node knows what it has measured")


def expected(engine: NodeCache, tiers: tuple[str, ...], num_tokens: int) -> Any:
    match = Match(list(map(BlockId, range(len(tiers)))), tiers, (False,) * len(tiers), len(tiers))
    decision = weigh(
        match,
        engine.cost_snapshot(),
        num_tokens=num_tokens,
        block_size=SIZE,
        bytes_per_block=BLOCK,
        num_free_slots=len(tiers),
    )
    return asdict(PromptCost.of(decision))


def test_the_cost_is_that_of_the_engines_own_plan(node: NodeProcess, engine: NodeCache) -> None:
    store(engine, PROMPT)
    measured(engine, node)
    wait_until(lambda: found(node, PROMPT), "the blocks are known")
    asked = [*PROMPT[:20], *range(500, 600)]
    told = cost(node, asked)["engine"]
    assert {**told, "unknown_in": ()} == expected(engine, (HOST,) * 10, len(asked))
    assert told["reused_tokens"] == {"host": 20}
    assert told["computed_tokens"] == 100
    assert told["seconds"] == pytest.approx(told["load_s"] + told["compute_s"])
    assert told["queue_s"] is None
    wait_until(lambda: node.room()["used_bytes"][DISK] == 20 * BLOCK, "all are on disk")

    def is_on_disk() -> bool:
        node.control.post("/clear", memory_only=True)  # but for blocks that are being written
        return bool(found(node, PROMPT[:20]) == {"disk": 18})

    wait_until(is_on_disk, "all blocks but the last are read, and that is computed")
    assert node.room()["looked_up"]["memory"] == 0, "nothing is counted"


def test_a_prompt_has_no_cost_before_engines_describe_and_in_no_room_of_several(
    node: NodeProcess, engine: NodeCache
) -> None:
    assert engine.wants_descriptions
    with pytest.raises(CacheError, match="is published at no address of --events so far"):
        cost(node, PROMPT)
    other = NodeCache(NodeClient(node.socket, engine="other"), lambda: b"o" * 32, BLOCK, 5.0)
    wait_until(lambda: other.reserve([bytes(36)]) is not None)
    with pytest.raises(CacheError, match="name a room; rooms: "):
        cost(node, PROMPT)
    other.abort([bytes(36)])
    other.close()


def test_a_salt_finds_its_own_prompts_only(node: NodeProcess, engine: NodeCache) -> None:
    other = [number + 1000 for number in PROMPT]
    of_salt = msgspec.msgpack.encode([["mine"], *[None] * 19])
    store(engine, PROMPT)
    store(engine, other, salt="mine", extra_keys=of_salt)
    measured(engine, node)
    wait_until(lambda: found(node, other, "mine"), "the blocks are known")
    assert found(node, other, "mine") == found(node, PROMPT) == {"host": 38}
    assert found(node, other) == found(node, other, "yours") == found(node, PROMPT, "mine") == {}


@pytest.mark.parametrize("more", [{"lora_name": "a"}, {"extra_keys": [[["image", 0]]]}])
def test_blocks_of_adapters_and_media_are_not_found_by_tokens(
    node: NodeProcess, engine: NodeCache, more: dict[str, Any]
) -> None:
    if "extra_keys" in more:
        more = {"extra_keys": msgspec.msgpack.encode([*more["extra_keys"], *[None] * 19])}
    store(engine, PROMPT, **more)
    store(engine, [7, 7, 7, 7])
    measured(engine, node)
    wait_until(lambda: found(node, [7, 7, 7, 7, 7]) == {"host": 4}, "the others are known")
    assert found(node, PROMPT) == {}


def test_what_is_no_prompt_is_refused(node: NodeProcess) -> None:
    wrong: list[tuple[object, str]] = [
        ([], "give prompt as 1 to"),
        ("text", "give prompt as 1 to"),
        ([1] * (MAX_PROMPT_TOKENS + 1), "give prompt as 1 to 1048576 token ids"),
        ([-1], "a token id is below 0"),
        ([1 << 32], "or above 32 bits"),
    ]
    for prompt, reason in wrong:
        with pytest.raises(CacheError, match=reason):
            node.control.post("/cost", prompt=prompt)
    with pytest.raises(CacheError, match="half of a surrogate pair"):
        cost(node, [1], "\ud800")


def test_costs_that_are_no_numbers_are_left_out(node: NodeProcess) -> None:
    with bare(node.socket) as engine:
        number = engine.enter("odd")
        text = description(PROMPT[:4], partition=number, keys=bytes(8) + bytes([1]) * 8)
        engine.send(msgspec.structs.replace(text, is_first=True))
        for bad in float("nan"), float("inf"), -1.0, 1e308:
            copies = [("host", "device", 1, bad, 1)]
            engine.send(protocol.CostsNotice(number, copies, (bad, bad), 3))
            wait_until(lambda: "odd" in cost(node, PROMPT), "it is known")
            assert cost(node, PROMPT)["odd"]["seconds"] is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_rate_that_is_no_number_counts_as_never_measured(
    node: NodeProcess, engine: NodeCache, bad: float
) -> None:
    store(engine, PROMPT)
    wait_until(lambda: cost(node, [9]) is not None, "it is published")
    engine._next_costs_s = float("inf")  # none of its own
    engine._notify(protocol.CostsNotice(0, [(HOST, DEVICE, BLOCK, bad, 9)], (1e-4, 0.0), 9))
    wait_until(lambda: found(node, PROMPT), "the blocks are known")
    estimate = cost(node, PROMPT)["engine"]
    assert (estimate["load_s"], estimate["unmeasured"]) == (0.0, ["host -> device"])


def test_without_events_there_are_no_costs(tmp_path: Path) -> None:
    with node_process(tmp_path) as node, pytest.raises(CacheError, match="start it with --events"):
        cost(node, PROMPT)


def test_a_long_prompt_is_found_as_its_blocks_are(node: NodeProcess, engine: NodeCache) -> None:
    keys = keys_of(PROMPT)
    store(engine, PROMPT)
    measured(engine, node)
    many = np.arange(MAX_PROMPT_TOKENS).tolist()
    wait_until(lambda: found(node, PROMPT), "the blocks are known")
    assert cost(node, [*PROMPT, *many[len(PROMPT) :]])["engine"]["reused_tokens"] == {
        "host": SIZE * len(keys)
    }
