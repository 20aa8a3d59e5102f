"""HTTPS: versions, trust, and a handshake under the same limits as every other connection."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from cryptography.hazmat.primitives import serialization

from kvtier.control.doorman import NUM_RESERVED
from kvtier.core.errors import ConfigError
from kvtier.serve.engine import Engine
from kvtier.serve.server.config import ServerConfig
from kvtier.serve.server.tls import Certificate
from tests.kit.cli import refused
from tests.kit.waiting import wait_until

from .certificates import Authority, Files
from .conftest import MODEL, Running, running
from .program import program
from .raw import COMPLETIONS, connect, is_closed, read, request, samples

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def config(files: Files, **others: object) -> ServerConfig:
    certificate, key = str(files.certificate), str(files.key)
    return ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, **others)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def encrypted(engine: Engine, authority: Authority) -> Iterator[Running]:
    with running(engine, config(authority.write(), api_key="right-key")) as made:
        yield made


@contextmanager
def connected(served: Running, authority: Authority) -> Iterator[ssl.SSLSocket]:
    with (
        connect(served) as raw,
        authority.context().wrap_socket(raw, server_hostname="127.0.0.1") as made,
    ):
        yield made


def closed_for(served: Running, authority: Authority, reason: str) -> float:
    found = samples(served, verify=authority.context(), headers=KEY)
    return found["kvtier_server_closed_connections_total", reason]


KEY = {"Authorization": "Bearer right-key"}


def test_the_api_is_served_encrypted(encrypted: Running, authority: Authority) -> None:
    assert encrypted.url.startswith("https://127.0.0.1:")
    with (
        httpx.Client(verify=authority.context(), timeout=60) as transport,
        openai.OpenAI(
            base_url=f"{encrypted.url}/v1",
            api_key="right-key",
            http_client=transport,  # type: ignore[arg-type] # it takes both of its libraries' clients
        ) as client,
    ):
        whole = client.completions.create(model=MODEL, prompt="import", max_tokens=8, seed=1)
        chunks = client.completions.create(
            model=MODEL, prompt="import", max_tokens=8, seed=1, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert whole.choices[0].text


def test_the_key_is_asked_for_all_the_same(encrypted: Running, authority: Authority) -> None:
    answer = httpx.get(f"{encrypted.url}/v1/models", verify=authority.context())
    assert answer.status_code == 401
    assert httpx.get(f"{encrypted.url}/health", verify=authority.context()).status_code == 200


def test_who_does_not_trust_the_certificate_sends_nothing(encrypted: Running) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{encrypted.url}/health")


def test_a_request_that_comes_with_the_end_of_the_handshake_is_not_lost(
    encrypted: Running, authority: Authority
) -> None:
    """Built by hand, so that both are in one packet."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = authority.context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with connect(encrypted) as raw:
        is_done = False
        while not is_done:
            try:
                session.do_handshake()
                is_done = True
                session.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            except ssl.SSLWantReadError:
                pass
            raw.sendall(outgoing.read())
            if not is_done:
                incoming.write(raw.recv(65536))
        answer = b""
        while b'"status"' not in answer:
            received = raw.recv(65536)
            assert received, answer
            incoming.write(received)
            try:
                answer += session.read()
            except ssl.SSLWantReadError:
                continue
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_plain_http_is_closed_and_counted(encrypted: Running, authority: Authority) -> None:
    before = closed_for(encrypted, authority, "tls")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{encrypted.url.rpartition(':')[2]}/health", timeout=60)
    wait_until(lambda: closed_for(encrypted, authority, "tls") == before + 1, "it is counted")


def test_old_versions_of_tls_are_refused(encrypted: Running, authority: Authority) -> None:
    before = closed_for(encrypted, authority, "tls")
    context = authority.context()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        connect(encrypted) as raw,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(raw, server_hostname="127.0.0.1")
    wait_until(lambda: closed_for(encrypted, authority, "tls") == before + 1, "it is refused")


def test_a_handshake_that_does_not_end_is_closed_in_time(
    engine: Engine, authority: Authority
) -> None:
    with running(engine, config(authority.write(), header_timeout_s=0.5)) as made:
        with connect(made) as silent:
            silent.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a handshake
            assert is_closed(silent)
        with connected(made, authority) as slow:  # the handshake ends, but no request follows
            assert is_closed(slow)
        assert closed_for(made, authority, "header_timeout") == 2


def test_handshakes_leave_for_those_who_ask(engine: Engine, authority: Authority) -> None:
    with running(engine, config(authority.write(), max_connections=4)) as made:
        silent = [connect(made) for _ in range(8)]
        with connected(made, authority) as asking:
            asking.sendall(request(COMPLETIONS, b"{}"))
            answer = read(asking)
            assert answer is not None
            assert answer.status == 400
        assert is_closed(silent[0])
        for each in silent:
            each.close()


def test_who_is_gone_before_the_handshake_ends_leaves_nothing(
    engine: Engine, authority: Authority
) -> None:
    with running(engine, config(authority.write(), max_connections=2)) as made:
        for _ in range(2 * NUM_RESERVED):
            with connect(made) as gone:
                gone.sendall(b"\x16\x03\x01\x02\x00\x01")
                gone.shutdown(socket.SHUT_WR)
                assert is_closed(gone)
        with connected(made, authority) as asking:
            asking.sendall(request(COMPLETIONS, b"{}"))
            assert read(asking) is not None
        assert closed_for(made, authority, "room") == 0


@pytest.mark.slow
@pytest.mark.nightly
def test_kept_connections_do_not_hold_up_the_end(authority: Authority) -> None:
    """A client that keeps its connection does not close it at the end."""
    files = authority.write()
    options = ("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key))
    with program(*options) as (process, url):
        assert url.startswith("https://")
        with httpx.Client(verify=authority.context()) as client:
            assert client.get(f"{url}/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            process.wait(20)  # less than the grace period
        assert process.returncode == 0


# -- certificates ----------------------------------------------------------------------------------


def test_a_new_certificate_is_used_without_a_restart(
    engine: Engine, authority: Authority, tmp_path: Path
) -> None:
    first, second = authority.write("first"), authority.write("second")
    files = Files(tmp_path / "tls.crt", tmp_path / "tls.key")

    def replace(source: Files) -> None:
        for name in ("certificate", "key"):
            new = tmp_path / "new"
            shutil.copyfile(getattr(source, name), new)
            new.rename(getattr(files, name))

    def shown(served: Running) -> bytes:
        with connected(served, authority) as connection:
            found = connection.getpeercert(binary_form=True)
            assert found is not None
            return found

    replace(first)
    with running(engine, config(files)) as made:
        before = shown(made)
        assert shown(made) == before
        replace(second)
        wait_until(lambda: shown(made) != before, "the new one is shown")


def test_a_certificate_that_cant_be_used_changes_nothing(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second = authority.write("one"), authority.write("two")
    files = Files(tmp_path / "tls.crt", tmp_path / "tls.key")
    shutil.copyfile(first.certificate, files.certificate)
    shutil.copyfile(first.key, files.key)
    certificate = Certificate(str(files.certificate), str(files.key))
    before = certificate.context
    certificate.refresh()
    shutil.copyfile(second.certificate, files.certificate)  # its key is not replaced yet
    certificate.refresh()
    assert certificate.context is before
    assert "certificate not replaced" in caplog.text
    files.key.unlink()
    certificate.refresh()
    assert certificate.context is before
    shutil.copyfile(second.key, files.key)
    certificate.refresh()
    assert certificate.context is not before
    assert "certificate replaced" in caplog.text


def _encrypt(files: Files) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    how = serialization.BestAvailableEncryption(b"password")
    form = serialization.PrivateFormat.PKCS8
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, how))


def test_one_file_may_hold_both(authority: Authority, tmp_path: Path) -> None:
    files = authority.write()
    both = tmp_path / "both.pem"
    both.write_bytes(files.key.read_bytes() + files.certificate.read_bytes())
    assert Certificate(str(both), None).context.cert_store_stats()


def test_what_cant_be_used_is_told_in_one_sentence(authority: Authority, tmp_path: Path) -> None:
    files, other = authority.write("mine"), authority.write("other")
    locked, text = authority.write("locked"), tmp_path / "text"
    _encrypt(locked)
    text.write_text("no certificate\n")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[tuple[Path, Path | None, str]] = [
        (files.certificate, tmp_path / "none", "ssl_keyfile: can't read"),
        (tmp_path / "none", files.key, "ssl_certfile: can't read"),
        (files.certificate, other.key, "ssl_certfile: .* key values mismatch"),
        (locked.certificate, locked.key, "ssl_keyfile: .*locked.key is encrypted, and nobody"),
        (text, files.key, "ssl_certfile: .*text and its key can't be used"),
        (files.certificate, None, "ssl_certfile: .* can't be used"),
        (pipe, files.key, "ssl_certfile: can't read .* give a regular file"),
        (files.certificate, pipe, "ssl_keyfile: can't read .* give a regular file"),
    ]
    for certificate, key, sentence in found:
        with pytest.raises(ConfigError, match=sentence):
            Certificate(str(certificate), None if key is None else str(key))


def test_a_key_that_every_user_may_open_is_named_in_a_warning(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.write("open")
    files.certificate.chmod(0o644)
    for mode in (0o600, 0o644):
        files.key.chmod(mode)
        Certificate(str(files.certificate), str(files.key))
        warned = [message for message in caplog.messages if "every user" in message]
        assert len(warned) == (mode == 0o644)
    assert str(files.key) in warned[0]


def test_the_program_says_so_before_it_loads_a_model(tmp_path: Path) -> None:
    for options, sentence in (
        (("--ssl-certfile", str(tmp_path / "x")), "kvtier serve: --ssl-certfile: can't read"),
        (
            ("--ssl-keyfile", "x"),
            "--ssl-keyfile: there is no certificate; give --ssl-certfile, too",
        ),
    ):
        assert sentence in refused("serve", *options)
