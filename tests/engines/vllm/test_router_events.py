"""Dynamo's indexer reads the events of a vLLM with kvtier, and knows where each prompt's KV is."""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config.kv_events import KVEventsConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier.connectors.vllm.shared.prompt import group_key
from kvtier.serve.engine import SamplingParams as OneToken
from tests.engines.routers.test_dynamo import SALTS
from tests.engines.routers.test_dynamo import engine as server
from tests.engines.routers.test_dynamo import held as held_by_server
from tests.engines.vllm.engines import (
    BLOCK,
    Connects,
    connector,
    engine,
    own_connector,
    prompt,
    run,
)
from tests.kit.dynamo import DynamoIndexer, needs_routers
from tests.kit.nodes import NodeProcess, running
from tests.kit.servers import free_ports
from tests.kit.waiting import wait_until

pytestmark = needs_routers

DYNAMO = "dynamo-cache-salt:"
"""Dynamo's front end puts it before salts, so that its indexer knows them among other keys."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("connects", [own_connector, connector])
def test_an_indexer_knows_what_lies_on_the_device_in_host_memory_and_on_disk(
    connects: Connects, tmp_path: Path
) -> None:
    endpoints = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    publishes = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoints[0].replace("127.0.0.1", "*"),  # else vLLM connects, and binds nothing
        replay_endpoint=endpoints[1],
    )
    settings = {"host_capacity": "256MiB", "disk_path": str(tmp_path), "disk_capacity": "256MiB"}
    config = connects(**settings, self_describing_kv_events=True)
    prompts = [prompt(seed, 4 * BLOCK + 50) for seed in range(6)]
    size = 4 * BLOCK
    with (
        engine(
            config, num_gpu_blocks_override=20, max_model_len=2048, kv_events_config=publishes
        ) as llm,
        DynamoIndexer(tmp_path) as indexer,
    ):
        indexer.register(0, endpoints, BLOCK)
        for each in prompts:
            run(llm, each)
        if connects is own_connector:  # vLLM's OffloadingConnector publishes no salts
            salted: Any = {**prompts[0], "cache_salt": f"{DYNAMO}tenant"}
            run(llm, salted)

        def places(at: int, salt: str = "") -> dict[str, int]:
            return indexer.found(prompts[at]["prompt_token_ids"], salt).get(0, {})

        def are_stored() -> bool:
            run(llm, prompt(99, 10))  # vLLM publishes in its steps
            return all(places(at).get("disk", 0) >= size for at in range(len(prompts)))

        wait_until(are_stored, "all prompts are known to be on disk")
        assert places(5) == {"gpu": size, "cpu": size, "disk": size}
        evicted = places(1)
        assert evicted.pop("gpu", 0) < size
        assert evicted == {"cpu": size, "disk": size}
        assert places(1, "tenant") == {}
        assert places(0, "tenant").get("cpu", 0) == (size if connects is own_connector else 0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("connects", [own_connector, connector])
def test_an_indexer_knows_what_a_node_holds_for_its_engine(
    connects: Connects, tmp_path: Path
) -> None:
    ports = [f"tcp://127.0.0.1:{port}" for port in free_ports(4)]
    of_engine, of_node = ports[:2], ports[2:]
    publishes = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=of_engine[0].replace("127.0.0.1", "*"),
        replay_endpoint=of_engine[1],
    )
    prompts = [prompt(seed, 4 * BLOCK + 50) for seed in range(6)]
    salts = {0: "tenant", 1: f"{DYNAMO}other"}
    size = 4 * BLOCK
    options = (
        f"--events={of_node[0]},{of_node[1]}",
        f"--disk-path={tmp_path / 'disk'}",
        "--disk-capacity=128MiB",
    )
    with running(tmp_path, *options, segments=64) as node, DynamoIndexer(tmp_path) as indexer:
        config = connects(node=str(node.socket), node_deadline_s=1.0)
        with engine(
            config, num_gpu_blocks_override=20, max_model_len=2048, kv_events_config=publishes
        ) as llm:
            for at, its in enumerate((of_engine, of_node)):
                indexer.register(0, its, BLOCK, rank=at)
                indexer.register(1 + at, its, BLOCK)
            seeds = count(50)

            def is_open() -> bool:
                run(llm, prompt(next(seeds), BLOCK + 10))
                rooms = node.control.get("/status")["rooms"]
                return any(room["used_bytes"]["host"] for room in rooms)

            wait_until(is_open, "the node stores for the engine")
            for each in prompts:
                run(llm, each)
            for at, salt in salts.items():
                salted: Any = {**prompts[at], "cache_salt": salt}
                run(llm, salted)

            def places(at: int, salt: str = "", instance: int = 0) -> dict[str, int]:
                return indexer.found(prompts[at]["prompt_token_ids"], salt).get(instance, {})

            def are_stored() -> bool:
                run(llm, prompt(99, 10))  # vLLM publishes in its steps
                asked = [*((at, "") for at in range(len(prompts))), (0, "tenant"), (1, "other")]
                return all(places(*one, instance=2).get("disk", 0) >= size for one in asked)

            wait_until(are_stored, "all prompts are known to be on disk")
            assert places(5) == {"gpu": size, "cpu": size, "disk": size}
            assert places(1)["cpu"] == size
            assert places(1, instance=1).get("cpu", 0) < size, "only the node publishes its blocks"
            assert places(5, instance=2) == {"cpu": size, "disk": size}
            assert places(0, "tenant", 2) == places(1, "other", 2) == places(5, instance=2)
            assert not places(0, "other")
            assert not places(2, "tenant")

            def cost(at: int, salt: str = "") -> Any:
                tokens = prompts[at]["prompt_token_ids"]
                (found,) = node.control.post("/cost", prompt=tokens, tenant=salt).values()
                return found

            def is_measured() -> bool:
                run(llm, prompt(next(seeds), 2 * BLOCK))
                return cost(5)["seconds"] is not None

            wait_until(is_measured, "the node knows how fast the engine computes")
            for at, salt in (5, ""), (0, "tenant"), (1, "other"):
                found = cost(at, salt)
                known = [*found["declined_tokens"].values(), *found["reused_tokens"].values()]
                assert sum(known) == size
                assert found["seconds"] > 0
            assert not cost(2, "tenant")["reused_tokens"]
            node.control.post("/clear", room="", memory_only=False, timeout_s=10.0)
            wait_until(lambda: not places(5, instance=2), "removals are known")


def held_by_node(node: NodeProcess, tokens: list[int], salt: str) -> dict[str, int]:
    """Return how many tokens of a prompt lie in a node's memory, and in it or on its disk."""
    hasher = get_request_block_hasher(BLOCK, sha256)
    salted = Request(
        "1", tokens, SamplingParams(), None, cache_salt=salt or None, block_hasher=hasher
    )
    keys = [group_key(bytes(each), 0).hex() for each in salted.block_hashes]
    if not keys:
        return {}
    found = node.control.post("/lookup", room="", keys=keys, timeout_s=1.0)
    places = {"cpu": found["in_memory"] * BLOCK, "disk": found["found"] * BLOCK}
    return {name: num for name, num in places.items() if num}


@pytest.mark.timeout(900)
def test_an_indexer_finds_server_or_node_tier_and_length_of_random_prompts_with_salts(
    tmp_path: Path,
) -> None:
    """Two servers of kvtier and a vLLM over a node, whose tiers all evict."""
    init_none_hash(sha256)
    ports = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    options = (
        "--events=" + ",".join(ports),
        f"--disk-path={tmp_path / 'disk'}",
        "--disk-capacity=32MiB",
    )
    with ExitStack() as stack:
        node = stack.enter_context(running(tmp_path, *options, segments=24))
        servers = [stack.enter_context(server(tmp_path / str(at))) for at in range(2)]
        indexer = stack.enter_context(DynamoIndexer(tmp_path))
        config = own_connector(node=str(node.socket), node_deadline_s=1.0)
        llm = stack.enter_context(engine(config, num_gpu_blocks_override=20, max_model_len=2048))
        for at, made in enumerate(servers):
            assert made._publisher is not None
            indexer.register(at, made._publisher.endpoints, BLOCK)
        # Below the device it finds equal tokens of workers of one model only by equal hashes.
        indexer.register(2, ports, BLOCK, model="of vLLM")
        chosen, asked = random.Random(2), []
        beginnings = [[chosen.randrange(10, 250) for _ in range(4 * BLOCK)] for _ in range(8)]
        for _ in range(200):
            begins = chosen.choice(beginnings)[: chosen.randrange(1, 9) * BLOCK // 2]
            tokens = begins + [chosen.randrange(10, 250) for _ in range(chosen.randrange(BLOCK))]
            asked.append((chosen.randrange(3), tokens, chosen.choice(SALTS)))
        for worker, tokens, salt in asked:
            if worker < 2:
                servers[worker].submit(tokens, OneToken(max_tokens=1), salt=salt).result(60)
            else:
                salted: Any = {"prompt_token_ids": tokens}
                run(llm, salted | ({"cache_salt": salt} if salt else {}))
        assert all(made.drain() for made in servers)

        def held(tokens: list[int], salt: str) -> list[dict[str, int]]:
            by_server = [held_by_server(made, tokens, salt) for made in servers]
            return [*by_server, held_by_node(node, tokens, salt)]

        def differences() -> list[object]:
            found: list[object] = []
            for _, tokens, salt in asked:
                answer = indexer.found(tokens, salt) | indexer.found(tokens, salt, "of vLLM")
                there = held(tokens, salt)
                known = [answer.get(worker, {}) for worker in range(3)]
                if known != there:
                    found.append((salt, known, there))
            return found

        wait_until(lambda: not differences(), "the indexer knows what is where")
        of_node = [held(tokens, salt)[2] for _, tokens, salt in asked]
        for name in "cpu", "disk":
            assert any(known.get(name) for known in of_node)
            assert any(not known.get(name) for known in of_node), f"{name} evicts"
