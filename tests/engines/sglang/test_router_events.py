"""Dynamo's indexer reads the events of an SGLang with kvtier, and knows where a prompt's KV is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from tests.engines.sglang.servers import FRONTS, LONG, PAGE, prompt, server
from tests.kit.dynamo import DynamoIndexer, needs_routers
from tests.kit.servers import free_ports
from tests.kit.waiting import wait_until

pytestmark = needs_routers

SIZE = LONG // PAGE * PAGE


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("front", FRONTS)
def test_an_indexer_knows_what_left_the_device_for_kvtiers_tiers(
    tmp_path: Path, front: str
) -> None:
    endpoints = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    config = {"publisher": "zmq", "endpoint": endpoints[0], "bind": True}
    options = [
        *FRONTS[front](tmp_path / "slab"),
        *("--kv-events-config", json.dumps(config | {"replay_endpoint": endpoints[1]})),
    ]
    prompts = [prompt(seed, LONG) for seed in range(3)]
    with DynamoIndexer(tmp_path) as indexer:

        def places(at: int, salt: str = "") -> dict[str, int]:
            return indexer.found(prompts[at], salt).get(0, {})

        def are_known(count: int) -> bool:
            return all(places(at).get("disk") == SIZE for at in range(count))

        with server(tmp_path / "log", *options) as first:
            indexer.register(0, endpoints, PAGE)
            for tokens in prompts:
                first.ask(tokens, 1)
            first.ask(prompts[0], 1, salt="tenant")
            wait_until(lambda: are_known(3), "all prompts are known to be on disk")
            wait_until(lambda: places(0, "tenant").get("disk") == SIZE, "the salted one, too")
            assert places(0) == {"gpu": SIZE, "cpu": SIZE, "disk": SIZE}
            assert places(1, "tenant") == {}
            first.flush()
            flushed = {"disk": SIZE} if front == "storage" else {"cpu": SIZE, "disk": SIZE}
            wait_until(lambda: places(0) == flushed, "the device is known to be empty")
            assert places(0, "tenant") == flushed
        print(indexer.log)
