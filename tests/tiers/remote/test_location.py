"""URLs of stores: parsing, and messages that repeat no possible password."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.config import CacheConfig, without_password
from kvtier.core.errors import ConfigError
from kvtier.core.system.plugins import load_plugin
from kvtier.devices.cpu import CpuDevice
from kvtier.node.config import NodeConfig
from kvtier.node.server.node import CacheNode
from kvtier.testing.storage_suite import GROUP
from kvtier.tiers import StorageSite, StorageTier
from kvtier.tiers.remote.location import read_location
from kvtier.tiers.remote.pruning import make_keeper
from kvtier.tiers.remote.valkey.connection_pool import ConnectionPool, ValkeyOptions
from kvtier.tools.cli import app
from tests.tiers.remote.scripted_server import ScriptedServer

PARTS = ("hunter", "2026")
SIGNS = [
    "#",
    "/",
    "?",
    "[",
    "]",
    "\\",
    "\u2100",
    "\uff0f",
    "%",
    " ",
    "\n",
    "@",
    ":",
    "=",
    "&",
    "\ud800",
]


def said_of(url: str) -> list[str]:
    """Return every text that contains a URL after it is read, with the causes of each error."""
    scheme, _, rest = url.partition(":")
    site = StorageSite("store", rest, GROUP, 1 << 20)
    said = [repr(site)]

    def told_by_tier() -> str:
        tier = load_plugin("tiers", scheme)(site)
        assert isinstance(tier, StorageTier)
        tier.close()
        return f"{tier!r} {tier.findings()}"  # no server answers there

    readers = (lambda: make_keeper(url).where, told_by_tier, lambda: CacheConfig(storage=(url,)))
    for reader in readers:
        try:
            said.append(repr(reader()))
        except ConfigError as error:
            said += [*traceback.format_exception(error), repr(error.__context__)]
    return said


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize(
    "form",
    ["valkey://kv:{}@127.0.0.1:1", "valkey://{}@127.0.0.1:1", "redis://kv:12/{}@127.0.0.1:1"],
)
def test_password_with_any_sign_is_told_nowhere(sign: str, form: str) -> None:
    for said in said_of(form.format(sign.join(PARTS))):
        assert not any(part in said for part in PARTS), said


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/x?endpoint=http://hunter:2026@127.0.0.1:1",
        "s3://bucket/x?endpoint=http%3A//hunter:2026%40127.0.0.1%3A1",
        "s3://bucket/hunter2026@x",
        "valkey://127.0.0.1:hunter2026",
        "valkey://127.0.0.1:1/hunter2026",
        "valkey://hunter2026@" + "x" * 70,
        "valkey://hunter2026@a..b",
        "valkey://hunter2026@a%00b",
    ],
)
def test_no_message_has_text_of_a_url(url: str) -> None:
    for said in said_of(url):
        assert "hunter" not in said
        assert "2026" not in said


@pytest.mark.parametrize("password", ["a#b", "a/b?c[d]", "p@ss:word", "\u2100 %", "ä\udcff"])
def test_password_is_sent_as_it_is(password: str) -> None:
    sent: list[list[bytes]] = []

    def hear(words: list[bytes], reply: bytes) -> bytes:
        sent.append(words)
        return reply

    server = ScriptedServer(hear)
    coded = quote(password.encode(errors="surrogateescape"), safe="")
    location = read_location("valkey", f"//kv:{coded}@127.0.0.1:{server.port}/3")
    lines = ConnectionPool(location, ValkeyOptions())
    assert lines.use(lambda _: None, 10) is None
    assert sent == [
        [b"AUTH", b"kv", password.encode(errors="surrogateescape")],
        [b"SELECT", b"3"],
    ]
    lines.close()
    server.close()


def test_password_of_the_environment_need_not_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[bytes]] = []

    def hear(words: list[bytes], reply: bytes) -> bytes:
        sent.append(words)
        return reply

    server = ScriptedServer(hear)
    monkeypatch.setenv("VALKEYCLI_AUTH", "pass\udcff")
    lines = ConnectionPool(read_location("valkey", f"//127.0.0.1:{server.port}"), ValkeyOptions())
    assert lines.use(lambda _: None, 10) is None
    assert sent == [[b"AUTH", b"pass\xff"]]
    lines.close()
    server.close()


def test_location_for_people_has_nothing_of_the_credentials() -> None:
    assert without_password("a=valkey://kv:12/x?y@host:1/0") == "a=valkey://host:1/0"
    location = read_location("valkey", "//kv:pass@[::1]:6379/3?prefix=x")
    assert (location.host, location.port, location.path) == ("::1", 6379, "3")
    assert str(location) == "valkey://[::1]:6379/3"
    assert "pass" not in repr(location)
    s3 = read_location("s3", "//bucket/x?endpoint=http%3A//hunter:2026%40127.0.0.1%3A1")
    assert "hunter" not in repr(s3)


@pytest.mark.parametrize(
    ("rest", "sentence"),
    [
        ("//127.0.0.1:1/0#hunter", "no # is read"),
        ("//127.0.0.1:1/a@b", "credentials do not belong into a path"),
        ("//kv:hun\nter@127.0.0.1:1", "is no URL"),
        ("//a%00b", "is no URL"),
        ("//a b", "is no URL"),
        ("//a\\b", "is no URL"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(rest: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_location("valkey", rest)


WRONG = {
    "valkey://127.0.0.1:1?prefx=a": "no option is called 'prefx'; did you mean 'prefix'?",
    "valkey://127.0.0.1:1?readers=0": "readers and writers are 1 at least",
    "s3://bucket?publish_s=0": "publish_s is above 0",
    "mooncake://host?protocol=udp": "protocol='udp'; write tcp or rdma",
    "nixl://POSIX/folder?params=x": "params; write",
    "valkey://127.0.0.1:1?codec=lossless": "codec is no option of a store; give it as the setting",
    "s3://bucket?encryption_key=env:A": "encryption_key is no option of a store",
    "node:/run/kvtier.sock": "a node is no store; give its socket as the setting node",
    "valkye://127.0.0.1:1": "no plug-in 'valkye' in kvtier.tiers",
}


@pytest.mark.engine
@pytest.mark.parametrize("url", list(WRONG))
def test_wrong_url_is_refused_before_a_model_is_loaded(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="needs the engine extra")
    monkeypatch.setattr("kvtier.serve.engine.Engine", lambda _: pytest.fail("a model is loaded"))
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--storage", url])
    assert done.exit_code == 2
    assert WRONG[url] in " ".join(done.output.split())
    with pytest.raises(ConfigError, match=re.escape(WRONG[url])):
        VllmSettings.read({"storage": url})
    with pytest.raises(ConfigError, match=re.escape(WRONG[url])):
        CacheNode(NodeConfig(socket=tmp_path / "node.sock", storage=(url,)), CpuDevice())
