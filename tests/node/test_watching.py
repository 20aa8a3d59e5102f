"""The live page, ``top`` and metrics of a node, with engines that use it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.node.client.channel import NodeClient, NodeError
from kvtier.observe.live.files import LIVE_PATH
from kvtier.observe.live.make_node import LEAST_BLOCKS
from kvtier.tools.cli import app
from tests.kit.nodes import SEGMENT_BYTES, NodeProcess, running
from tests.kit.waiting import wait_until
from tests.node.control_harness import BLOCK_BYTES, BareEngine, keys


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with running(
        tmp_path, "--control-port=0", f"--quota=team-a={2 * SEGMENT_BYTES}:{6 * SEGMENT_BYTES}"
    ) as own:
        yield own


def test_disk_of_a_tenant_is_shown_between_its_floor_and_its_ceiling(tmp_path: Path) -> None:
    options = "--control-port=0", f"--disk-path={tmp_path / 'disk'}", "--disk-capacity=4MiB"
    quotas = "--disk-total=16MiB", "--disk-quota=team-a=2MiB:8MiB"
    with running(tmp_path, *options, *quotas) as node, BareEngine(node, "team-a", "one") as one:
        one.store(1)
        (first,) = picture(node)["node"]["tenants"]
        assert (first["disk_floor_bytes"], first["disk_ceiling_bytes"]) == (2 << 20, 8 << 20)
        assert 0 < first["slab_bytes"] <= 4 << 20
        done = CliRunner().invoke(app, ["top", "--node", str(node.socket), "--once"])
        assert "slab" in done.output, done.output


def picture(node: NodeProcess) -> Any:
    with urllib.request.urlopen(f"{node.url}{LIVE_PATH}", timeout=30) as answer:
        return json.loads(answer.read())


def engine_of(node: NodeProcess, name: str) -> Any:
    (found,) = (each for each in node.control.get("/status")["engines"] if each["name"] == name)
    return found


def test_top_shows_engines_tenants_and_partitions_of_a_node(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tools.cli.top.FIRST_S", 0.9)
    with BareEngine(node, "team-a", "one") as one, BareEngine(node, "team-b", "other"):
        one.store(1, 2, 3)
        slots = one.lease(1, 2)
        for words in ("--once", "--json"):
            done = CliRunner().invoke(app, ["top", "--node", str(node.socket), words])
            assert done.exit_code == 0, done.output
            if words == "--once":
                assert all(
                    word in done.output for word in ("one", "other", "team-a", "2 MiB", "64 KiB")
                )
        seen = json.loads(done.output)
        assert seen["engine"] == "kvtier node"
        assert seen["server"]["uptime_s"] > 0
        assert [(each["name"], each["slots"]) for each in seen["node"]["engines"]] == [
            ("one", 2),
            ("other", 0),
        ]
        first, second = seen["node"]["tenants"]
        assert (first["floor_bytes"], first["ceiling_bytes"]) == (
            2 * SEGMENT_BYTES,
            6 * SEGMENT_BYTES,
        )
        assert (first["memory_bytes"], second["memory_bytes"]) == (SEGMENT_BYTES, 0)
        assert first["used_bytes"] == {"host": 3 * BLOCK_BYTES}
        (partition, _) = seen["node"]["rooms"]
        assert (partition["block_bytes"], partition["segments"]) == (BLOCK_BYTES, 1)
        (host,) = seen["tiers"]
        assert (host["used_bytes"], host["capacity_bytes"]) == (3 * BLOCK_BYTES, 8 * SEGMENT_BYTES)
        one.release(slots)


def test_the_share_that_was_found_is_of_what_was_looked_up(node: NodeProcess) -> None:
    with BareEngine(node, "team-a") as engine:
        engine.store(1, 2, 3)
        picture(node)
        time.sleep(0.9)  # a picture is at most so old
        num = int(LEAST_BLOCKS // 4)
        for _ in range(num):
            engine.places(1, 2, 3, 4)
        seen = picture(node)
        assert seen["hit_share"]["recent"] == 0.75
        assert seen["node"]["tenants"][0]["found"] == 0.75
        assert seen["node"]["lookups_per_s"] > 0
        assert seen["node"]["lookup_s"] > 0
        assert "75 % of the blocks" in seen["answers"][0]["text"]


def test_a_request_that_waits_is_counted(node: NodeProcess) -> None:
    with BareEngine(node, name="writes") as one, BareEngine(node, name="waits") as other:
        slots = one.reserve(keys(7))
        found: list[int | None] = []
        asking = Thread(target=lambda: found.extend(other.fetch(7)))
        asking.start()
        wait_until(lambda: engine_of(node, "waits")["waiting"] == 1, "nothing waits")
        one.block(slots[0])[:] = 7
        one.commit(slots)
        asking.join()
        assert found == [7]
        wait_until(lambda: engine_of(node, "waits")["waiting"] == 0, "it waits on")


def test_an_engine_reports_late_calls_and_that_it_paused(node: NodeProcess) -> None:
    client = NodeClient(node.socket)
    node.pause()
    try:
        for _ in range(3):
            with pytest.raises(NodeError):
                client.take(time.monotonic() + 0.05)
    finally:
        node.resume()

    def takes() -> bool:
        with suppress(NodeError):
            client.put_back(client.take(time.monotonic() + 10))
            return True
        return False

    wait_until(takes, "the breaker stays open")
    wait_until(
        lambda: (
            [(each["failures"], each["pauses"]) for each in node.control.get("/status")["engines"]]
            == [(3, 1)]
        ),
        "never reported",
    )
    client.close()


def test_the_page_is_served_to_names_of_this_machine_only(node: NodeProcess) -> None:
    with urllib.request.urlopen(f"{node.url}/", timeout=30) as answer:
        assert "<title>kvtier</title>" in answer.read().decode()
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    request = urllib.request.Request(node.url + LIVE_PATH, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    refused.value.close()
    assert refused.value.code == 400
