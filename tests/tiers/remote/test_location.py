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
from kvtier.tiers.row import make_storage
from kvtier.tools.cli import app
from tests.tiers.remote.scripted_server import ScriptedServer

PARTS = ("hunter", "2026")
SIGNS = [*"#/?[]\\\u2100\uff0f% \n@:=&\ud800"]


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
    sent = password.encode(errors="surrogateescape")
    coded = quote(sent, safe="")
    assert words_sent(f"kv:{coded}@", "/3") == [[b"AUTH", b"kv", sent], [b"SELECT", b"3"]]


def test_password_of_the_environment_need_not_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALKEYCLI_AUTH", "pass\udcff")
    assert words_sent() == [[b"AUTH", b"pass\xff"]]


def words_sent(credentials: str = "", path: str = "") -> list[list[bytes]]:
    """Return the commands that a server gets at the start of a connection."""
    sent: list[list[bytes]] = []

    def hear(words: list[bytes], reply: bytes) -> bytes:
        sent.append(words)
        return reply

    server = ScriptedServer(hear)
    location = read_location("valkey", f"//{credentials}127.0.0.1:{server.port}{path}")
    lines = ConnectionPool(location, ValkeyOptions())
    assert lines.use(lambda _: None, 10) is None
    lines.close()
    server.close()
    return sent


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
    "valkey:127.0.0.1": "no place",
    "valkey://127.0.0.1:1?prefx=a": "no option is called 'prefx'; did you mean 'prefix'?",
    "valkey://127.0.0.1:1?readers=0": "readers and writers are 1 at least",
    "valkey://127.0.0.1:1?max_age_s=soon": "max_age_s='soon'; write a number",
    "valkey://127.0.0.1:1?codec=lossless": "'codec' is no option of a store",
    "s3:bucket": 'write it as "s3://host"',
    "s3://": "no bucket",
    "s3://bucket:9000/x": "?endpoint=http://host:port",
    "s3://bucket/x?endpoint=host:9000": "begins with http:// or https://",
    "s3://bucket/x?requests=0": "requests is 1 at least",
    "s3://bucket?publish_s=0": "publish_s is above 0",
    "s3://bucket?encryption_key=env:A": "'encryption_key' is no option of a store",
    "mooncake://": "no master",
    "mooncake://host?protocol=udp": "protocol='udp'; write tcp or rdma",
    "mooncake://host?segment_bytes=1MiB": "16MiB at least",
    "mooncake://me:secret@host": "knows no users",
    "nixl://": "no plug-in",
    "nixl://POSIX/folder?params=x": "params; write",
    "valkye://127.0.0.1:1": "no plug-in 'valkye' in kvtier.tiers",
}
WRONG_FOR_A_TIER = {
    "valkey://": "no server",
    "valkey://127.0.0.1:1?secret_file=/nowhere": "secret_file: /nowhere",
    "valkeys://127.0.0.1:1?ca_file=/nowhere.pem": "ca_file",
}
"""URLs that are noticed when their tier is made."""
WRONG_FOR_A_SETTING = {
    "node:/run/kvtier.sock": "a node is no store; give its socket as the setting node",
}


@pytest.mark.parametrize(("url", "sentence"), (WRONG | WRONG_FOR_A_TIER).items())
def test_wrong_url_is_one_sentence(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        make_storage(url, GROUP, 1 << 20, None)
    assert "secret@" not in str(caught.value)


@pytest.mark.engine
@pytest.mark.parametrize(("url", "sentence"), (WRONG | WRONG_FOR_A_SETTING).items())
def test_wrong_url_is_refused_before_a_model_is_loaded(
    url: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="needs the engine extra")
    monkeypatch.setattr("kvtier.serve.engine.Engine", lambda _: pytest.fail("a model is loaded"))
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--storage", url])
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        VllmSettings.read({"storage": url})
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        CacheNode(NodeConfig(socket=tmp_path / "node.sock", storage=(url,)), CpuDevice())
