"""The control API and its commands, against a node in a process of its own."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send
from typer.testing import CliRunner

from kvtier import __version__
from kvtier.core.errors import CacheError, ConfigError
from kvtier.devices.cpu import CpuDevice
from kvtier.node.client.channel import NodeClient
from kvtier.node.config import NodeConfig, control_socket, parse_quotas
from kvtier.node.server import http
from kvtier.node.server.http import MAX_BODY_BYTES
from kvtier.node.server.node import CacheNode
from kvtier.node.wire import protocol
from kvtier.node.wire.protocol import MAX_KEYS, MEMORY
from kvtier.observe.live.files import LIVE_PATH
from kvtier.tools.cli import app
from tests.kit.nodes import SEGMENT_BYTES, NodeProcess, running
from tests.kit.waiting import wait_until
from tests.node.control_harness import BLOCK_BYTES, BareEngine, hexed, key

PER_SEGMENT = SEGMENT_BYTES // BLOCK_BYTES


@contextmanager
def started(folder: Path) -> Iterator[NodeProcess]:
    with running(
        folder,
        f"--disk-path={folder / 'disk'}",
        f"--disk-capacity={256 * BLOCK_BYTES}",
        "--control-port=0",
        f"--quota=team-a={2 * SEGMENT_BYTES}:{6 * SEGMENT_BYTES}",
    ) as node:
        yield node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with started(tmp_path) as own:
        yield own


@pytest.fixture(scope="module")
def node_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with started(tmp_path_factory.mktemp("node")) as own:
        yield own


@pytest.fixture
def shared(node_of_all: NodeProcess) -> Iterator[NodeProcess]:
    """Return a node of several tests, whose only room is the default tenant's and empty."""
    yield node_of_all
    assert node_of_all.control.post("/clear")["is_complete"]


def fetched(node: NodeProcess, route: str, body: bytes | None = None) -> str:
    """Return the answer on the TCP port."""
    request = urllib.request.Request(f"{node.url}{route}", body)
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def expect_metrics(node: NodeProcess) -> None:
    """Compare the metrics with three blocks of team-a and one of team-b."""

    def used(tenant: str) -> list[float]:
        lines = fetched(node, "/metrics").splitlines()
        mine = [line for line in lines if f'tenant="{tenant}"' in line]
        return [
            float(each.split()[-1])
            for each in mine
            if each.startswith("kvtier_used_slots{") and 'tier="host"' in each
        ]

    wait_until(lambda: (used("team-a"), used("team-b")) == ([3.0], [1.0]), "the gauges never came")
    text = fetched(node, "/metrics")
    assert text.count("# TYPE kvtier_used_slots gauge") == 1
    assert 'kvtier_node_engines{tenant="team-a"} 1.0' in text
    assert 'kvtier_node_tenant_bytes{tenant="team-a"} 1.048576e+06' in text


def command(node: NodeProcess, *words: str, status: int = 0, stdin: str = "") -> str:
    done = CliRunner().invoke(app, ["node", *words, "--socket", str(node.socket)], input=stdin)
    assert done.exit_code == status, done.output
    return done.stdout


def test_state_and_metrics_name_engines_rooms_and_tenants(node: NodeProcess) -> None:
    with BareEngine(node, "team-a", "replica-0") as engine:
        engine.store(1, 2, 3)
        slots = engine.lease(1, 2)
        told = json.loads(command(node, "status", "--json"))
        (attached,) = told["engines"]
        assert (attached["name"], attached["tenant"]) == ("replica-0", "team-a")
        assert attached["slots"] == 2
        assert len(attached["pids"]) == 1
        (room,) = told["rooms"]
        assert room["block_bytes"] == BLOCK_BYTES
        assert room["used_bytes"]["host"] == 3 * BLOCK_BYTES
        assert room["breakers"] == {"disk": "closed"}
        assert told["tenants"]["team-a"]["floor_bytes"] == 2 * SEGMENT_BYTES
        assert told["tenants"]["team-a"]["segments"] == 1
        engine.release(slots)
        words = command(node, "status")
        assert room["name"] in words
        assert "engine replica-0 of team-a" in words
        with BareEngine(node, "team-b", "b") as other:
            other.store(1)
            expect_metrics(node)


def test_an_engine_has_the_title_that_it_gives_itself(shared: NodeProcess) -> None:
    """Two engines with one title stay two: it is for people."""
    clients = [NodeClient(shared.socket, title="chat: qwen on port 8000\n") for _ in range(2)]
    try:
        for client in clients:
            client.put_back(client.take(time.monotonic() + 30.0))
        engines = shared.control.get("/status")["engines"]
        assert [engine["title"] for engine in engines] == ["chat: qwen on port 8000\\n"] * 2
        assert command(shared, "status").count("engine chat: qwen on port 8000") == 2
        assert fetched(shared, "/metrics").count('title="chat: qwen on port 8000') == 2
        seen = json.loads(fetched(shared, LIVE_PATH))
        names = [engine["name"] for engine in seen["node"]["engines"]]
        assert names == ["chat: qwen on port 8000\\n"] * 2
    finally:
        for client in clients:
            client.close()


def test_a_prompt_is_looked_up_and_prefetched_by_the_keys_of_engines(shared: NodeProcess) -> None:
    with BareEngine(shared) as engine:
        engine.store(1, 2, 3)
        wait_until(lambda: shared.room()["used_bytes"]["disk"] == 3 * BLOCK_BYTES, "never written")
        command(shared, "clear", "--memory-only")
        told = json.loads(command(shared, "lookup", "--json", stdin="\n".join(hexed(1, 2, 3, 4))))
        assert told["places"] == ["storage", "storage", "storage", "nowhere"]
        assert (told["in_memory"], told["found"], told["blocks"]) == (0, 3, 4)
        words = command(shared, "prefetch", *hexed(1, 2, 4), "--room", told["room"])
        assert "of 3 blocks the first 2 are in memory" in words
        assert engine.places(1, 2) == [MEMORY, MEMORY]
        with pytest.raises(CacheError, match="has 2 bytes; keys of room .* have 32"):
            shared.control.post("/lookup", keys=["aabb"])
        with pytest.raises(CacheError, match="not hexadecimal"):
            shared.control.post("/lookup", keys=["zz"])


def test_pinned_blocks_stay_until_the_pin_ends(tmp_path: Path) -> None:
    with running(tmp_path, "--eviction-policy=lru") as node, BareEngine(node) as engine:
        engine.store(1, 2)
        told = json.loads(command(node, "pin", *hexed(1, 2), "--for-s", "3600", "--json"))
        assert told["pinned"] == 2
        flood(engine, 8 * PER_SEGMENT)
        assert engine.places(1, 2) == [MEMORY, MEMORY]
        assert "1 MiB pinned" in command(node, "quota")
        assert "has ended" in command(node, "pin", "--end", str(told["number"]))
        flood(engine, 8 * PER_SEGMENT)
        assert MEMORY not in engine.places(1, 2)


def test_a_pin_expires(shared: NodeProcess) -> None:
    with BareEngine(shared) as engine:
        engine.store(1)
        assert shared.control.post("/pin", keys=hexed(1), seconds=0.2)["pinned"] == 1
        wait_until(lambda: shared.room()["pinned_blocks"] == 0, "it never expired")


def test_pins_leave_others_their_floor(tmp_path: Path) -> None:
    """A tenant may pin its floor, or half of the memory outside other tenants' floors."""
    quota = f"--quota=team-b={4 * SEGMENT_BYTES}"
    with (
        running(tmp_path, quota) as node,
        BareEngine(node, "team-a", "a") as engine,
        BareEngine(node, "team-b", "b") as other,
    ):
        numbers = flood(engine, 8 * PER_SEGMENT, first=1000)
        name = node.room("team-a")["name"]
        pinned = sum(
            node.control.post("/pin", room=name, keys=hexed(number), seconds=3600)["pinned"]
            for number in numbers
        )
        assert pinned == 2 * PER_SEGMENT, "half of the four segments beside the floor"
        flood(other, 4 * PER_SEGMENT)
        tenants = node.control.get("/quota")
        assert tenants["team-b"]["segments"] == 4
        assert tenants["team-a"]["pinned_segments"] == 2


def test_hints_leave_others_their_floor(tmp_path: Path) -> None:
    """A tenant prefetches and pins all that it can, and another one keeps what is in its floor."""
    with (
        started(tmp_path) as node,
        BareEngine(node, "team-b", "b") as hostile,
        BareEngine(node, "team-a", "a") as other,
    ):
        numbers: list[int] = []

        def are_written() -> bool:
            used = node.room("team-b")["used_bytes"]
            return bool(used["disk"] == len(numbers) * BLOCK_BYTES)

        for part in range(8):  # in parts: a block that is evicted before it is written is lost
            numbers += flood(hostile, PER_SEGMENT, first=1000 + part * PER_SEGMENT)
            wait_until(are_written, "never written")
        name = node.room("team-b")["name"]
        command(node, "clear", "--room", name, "--memory-only")
        wanted = flood(other, 2 * PER_SEGMENT)
        for number in numbers:
            for given in ({"prefetch": {"within_s": 0.1}}, {"retain": [{"priority": 100}]}):
                node.control.post("/hint", room=name, keys=hexed(number), kvtier=given)
            node.control.post("/pin", room=name, keys=hexed(number), seconds=3600)
        assert other.places(*wanted) == [MEMORY] * len(wanted)


def test_a_prompt_is_prefetched_by_its_keys_before_its_request(shared: NodeProcess) -> None:
    with BareEngine(shared) as engine:
        engine.store(1, 2, 3)
        room = shared.room()["name"]

        def hint(**given: object) -> list[dict[str, Any]]:
            named = {"room": room, "keys": hexed(1, 2, 3), "kvtier": given}
            return list(shared.control.post("/hint", **named)["hints"])

        demoted = [{"action": "demote", "outcome": "done", "blocks": 3}]
        wait_until(lambda: hint(demote={}) == demoted, "never written")
        done = hint(prefetch={"within_s": 0.1})
        assert done == [{"action": "prefetch", "outcome": "begun", "blocks": 3}]
        wait_until(lambda: engine.places(1, 2, 3) == [MEMORY] * 3, "never read")
        with pytest.raises(CacheError, match="prefetch has no time"):
            shared.control.post("/hint", room=room, keys=hexed(1), kvtier={"prefetch": {}})


def flood(engine: BareEngine, num: int, first: int = 100) -> list[int]:
    """Store blocks one by one, as many as are admitted. Return the stored ones."""
    stored = []
    for number in range(first, first + num):
        for slot in engine.reserve([key(number)]):
            engine.block(slot)[:] = number % 251
            engine.commit([slot])
            stored.append(number)
    return stored


def test_quotas_that_change_move_memory(node: NodeProcess) -> None:
    with BareEngine(node, "team-b", "b") as other, BareEngine(node, "team-a", "a") as engine:
        flood(other, 8 * PER_SEGMENT)
        assert node.control.get("/quota")["team-b"]["segments"] == 6
        command(node, "quota", f"team-a={4 * SEGMENT_BYTES}:{6 * SEGMENT_BYTES}")

        def has_floor() -> bool:
            flood(engine, 4 * PER_SEGMENT)
            flood(other, PER_SEGMENT)  # whose memory is as warm
            return bool(node.control.get("/quota")["team-a"]["segments"] >= 4)

        wait_until(has_floor, "the floor was never reached")
        assert node.control.get("/quota")["team-b"]["segments"] <= 4
        # And a ceiling that is lowered frees memory.
        command(node, "quota", f"team-b=0:{2 * SEGMENT_BYTES}")
        wait_until(lambda: node.control.get("/quota")["team-b"]["segments"] == 2, "it never shrank")
        with pytest.raises(CacheError, match="floors add up"):
            node.control.post("/quota", tenant="team-b", floor="8MiB", ceiling="none")


def test_bound_that_is_not_named_stays_as_it_is(shared: NodeProcess) -> None:
    def changed(bounds: str, *options: str) -> tuple[object, ...]:
        command(shared, "quota", f"team-c={bounds}", *options)
        its = shared.control.get("/quota")["team-c"]
        return tuple(
            its[name]
            for name in ("floor_bytes", "ceiling_bytes", "disk_floor_bytes", "disk_ceiling_bytes")
        )

    mib = 1 << 20
    assert changed("1MiB:5MiB") == (mib, 5 * mib, 0, None)
    assert changed("2MiB") == (2 * mib, 5 * mib, 0, None)
    assert changed(":64MiB", "--disk") == (2 * mib, 5 * mib, 0, 64 * mib)
    assert changed(":4MiB") == (2 * mib, 4 * mib, 0, 64 * mib)
    assert changed("0:none") == (0, None, 0, 64 * mib)
    with pytest.raises(CacheError, match="can't read 'much' as a size"):
        shared.control.post("/quota", tenant="team-c", ceiling="much")


def test_look_ups_of_a_server_are_counted_and_timed(node: NodeProcess) -> None:
    """A server attaches as to a store, and looks up with another message than vLLM."""
    with BareEngine(node) as engine:
        engine.store(1, 2)
        before = node.control.get("/status")["rooms"][0]["looked_up"]["memory"]
        wanted = b"".join(key(number) for number in (1, 2, 3))
        engine.ask(protocol.FindRequest(8, engine.partition, wanted, timeout_s=1.0))
        assert node.control.get("/status")["rooms"][0]["looked_up"]["memory"] == before + 2
        assert "kvtier_node_lookup_seconds_count 1.0" in fetched(node, "/metrics")


# -- limits ----------------------------------------------------------------------------------------


def test_idle_connections_to_the_port_keep_no_engine_out(node: NodeProcess) -> None:
    """Idle connections are closed for new ones, before file descriptors run out."""
    host, port = node.url.removeprefix("http://").split(":")
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (300, 300))
    with ExitStack() as clients:
        for _ in range(600):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((host, int(port)))
        for number in range(2):
            with BareEngine(node, name=f"engine-{number}") as engine:
                engine.store(number)
            assert json.loads(fetched(node, "/health")) == {"status": "ok"}
        assert node.control.get("/status")["rooms"]
    assert "connections not accepted" not in node.log
    assert "a connection was refused" not in node.log


def test_accepting_without_a_descriptor_fails_seldom(node: NodeProcess) -> None:
    host, port = node.url.removeprefix("http://").split(":")
    assert fetched(node, "/health")  # its threads have what they need
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (3, 4096))
    with socket.create_connection((host, int(port))) as client:
        wait_until(lambda: "not accepted" in node.log, "it was accepted")
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (4096, 4096))
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.settimeout(30)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert node.log.count("not accepted") <= 64
    assert "Traceback" not in node.log


def test_long_body_and_many_keys_are_refused_in_one_sentence(shared: NodeProcess) -> None:
    with BareEngine(shared) as engine:
        engine.store(1)
    with pytest.raises(CacheError, match=f"has more than {MAX_BODY_BYTES} bytes"):
        shared.control.post("/delete", keys=["00" * MAX_BODY_BYTES])
    with pytest.raises(CacheError, match=f"name at most {MAX_KEYS} at a time"):
        shared.control.post("/lookup", keys=["00"] * (MAX_KEYS + 1))


def test_body_that_does_not_arrive_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_S", 0.01)
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("half a body was passed on")

    async def receive() -> Message:
        if not sent:
            sent.append({})
            return {"type": "http.request", "body": b"{", "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(http.ShortBodies(app)({"type": "http", "method": "POST"}, receive, send))
    assert sent[1]["status"] == 408
    assert (b"connection", b"close") in sent[1]["headers"]


def test_deletion_as_a_command_says_whether_it_is_complete(shared: NodeProcess) -> None:
    with BareEngine(shared) as engine:
        engine.store(1, 2, 3)
        assert "deleted 1 block of" in command(shared, "delete", *hexed(1))
        assert json.loads(command(shared, "delete", "-", "--json", stdin=hexed(2)[0]))[
            "is_complete"
        ]
        assert MEMORY not in engine.places(1, 2)
        assert "deleted all blocks" in command(shared, "clear")
        assert MEMORY not in engine.places(3)


def test_head_is_answered_as_get_without_a_body(shared: NodeProcess) -> None:
    request = urllib.request.Request(f"{shared.url}/health", method="HEAD")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert (answer.status, answer.read()) == (200, b"")


def test_a_port_that_everybody_reaches_changes_nothing(shared: NodeProcess) -> None:
    assert json.loads(fetched(shared, "/health")) == {"status": "ok"}
    for route in ("/hint", "/delete", "/clear", "/pin", "/unpin", "/prefetch", "/lookup", "/quota"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(shared, route, b"{}")
        refused.value.close()
        assert refused.value.code in (404, 405)


def test_only_owner_and_group_reach_the_socket(shared: NodeProcess) -> None:
    assert control_socket(shared.socket).stat().st_mode & 0o777 == 0o660


def test_a_node_is_configured_by_a_file_and_leaves_no_socket(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('quota = ["team-c=1MiB"]\n')
    with running(tmp_path, f"--config={file}") as node:
        found: dict[str, Any] = node.control.get("/quota")
        assert found["team-c"]["floor_bytes"] == 1 << 20
        assert node.stop() == 0
    assert not node.socket.exists()
    assert not control_socket(node.socket).exists()
    words = CliRunner().invoke(app, ["node", "status", "--socket", str(node.socket)])
    assert words.exit_code == 2
    assert "start one with kvtier node run" in words.stderr


@pytest.mark.parametrize(
    ("quotas", "sentence"),
    [
        (["a=20MiB", "b=20MiB", "c=20MiB", "d=20MiB", "e=65MiB"], r"6 segments .*\(e 2, a 1, b 1"),
        (["a=50MiB:70MiB", "b=:63MiB"], "'b' has a ceiling of 66060288 bytes, which is below one"),
        (["a=65MiB:127MiB"], "'a' has a floor .* in segments of 67108864 bytes that is 2 and 1"),
        (["a=20MiB", "b=20MiB", "c=20MiB", "d=20MiB", "e=0:0"], ""),
        (["a=256MiB:256MiB"], ""),
        (["a=65MiB:128MiB", "b=65MiB"], ""),
    ],
)
def test_quotas_are_compared_in_segments(quotas: list[str], sentence: str) -> None:
    """The node has four segments. A floor counts as whole segments, rounded up."""
    its = parse_quotas(quotas)
    if not sentence:
        NodeConfig(host_capacity="256MiB", quotas=its)
        return
    with pytest.raises(ConfigError, match=sentence):
        NodeConfig(host_capacity="256MiB", quotas=its)


def test_a_node_takes_no_pack_file_as_a_store(tmp_path: Path) -> None:
    config = NodeConfig(host_capacity="256MiB", storage=(f"pack://{tmp_path}/a.kvpack",))
    with pytest.raises(ConfigError, match="a pack file is of one model"):
        CacheNode(config, CpuDevice())


def test_quota_of_a_running_node_is_compared_in_segments(node: NodeProcess) -> None:
    with pytest.raises(CacheError, match="'team-b' has a ceiling of 1 bytes, which is below one"):
        node.control.post("/quota", tenant="team-b", floor="0", ceiling="1")
    with pytest.raises(CacheError, match="'team-b' has a floor of 2 bytes, which is above"):
        node.control.post("/quota", tenant="team-b", floor="2", ceiling="1")
    assert "team-b" not in node.control.get("/quota"), "nothing has changed"


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--quota=team-a", "names no bounds"),
        ("--quota=../x=1MiB", "'../x' is no name"),
        ("--quota=a=2MiB:1MiB", "'a' has a floor of 2097152 bytes, which is above"),
        ("--quota=a=9GiB", "the floors add up to 144 segments of 67108864 bytes (a 144), and"),
        ("--quota=a=:1MiB", "'a' has a ceiling of 1048576 bytes, which is below one segment"),
        ("--segment-capacity=0", "give a multiple of"),
        ("--storage=nothing", "names no plug-in"),
        ("--segment-capacity=3", "give a multiple of"),
        ("--control-port=99999", "is no TCP port"),
        ("--codec=zip", "--codec: 'zip' is unknown"),
        ("--encryption-key=file:/nowhere", "--encryption-key: /nowhere: No such file"),
        ("--eviction-policy=none", "--eviction-policy: 'none' is unknown"),
    ],
)
def test_a_node_that_cannot_start_says_why(tmp_path: Path, option: str, sentence: str) -> None:
    words = ["node", "run", f"--socket={tmp_path / 'node.sock'}", "--host-capacity=8MiB", option]
    done = CliRunner().invoke(app, [*words, f"--memory-path={tmp_path / 'memory'}"])
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def findings(*words: str) -> dict[str, dict[str, str]]:
    done = CliRunner().invoke(app, ["doctor", "--json", *words])
    assert done.exit_code == 0, done.output
    return {each["topic"]: each for each in json.loads(done.stdout)["sections"]["node"]}


def test_doctor_says_what_an_engine_would_find(shared: NodeProcess, tmp_path: Path) -> None:
    found = findings("--node", str(shared.socket))
    assert found["reachable"]["found"] == "yes"
    assert found["version"]["found"] == __version__
    assert found["end of this process"]["found"] == "noticed"
    assert {"memory", "memlock", "/dev/shm"} <= set(found)
    wait_until(lambda: not shared.control.get("/status")["engines"], "it left something behind")
    nothing = findings("--node", str(tmp_path / "nothing"))
    assert nothing["reachable"]["found"] == "no"
    assert "No such file" in nothing["reachable"]["note"]
