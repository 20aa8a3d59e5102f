"""A server with a low limit of open files, and more clients than that."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.engine

LIMIT = 300
SERVE = "serve --port 0 --threads 1 --device-capacity 64MiB --host-capacity 0"
NUM_CLIENTS = 700


@pytest.mark.slow
@pytest.mark.nightly
def test_a_flood_of_connections_leaves_descriptors_for_the_rest(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f"ulimit -n {LIMIT}; exec {sys.executable} -m kvtier.tools.cli {SERVE} 2>{log}"
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://(127\.0\.0\.1):(\d+)\n", line)
            assert found, log.read_text()
            most = 0
            for _ in range(3):
                with ExitStack() as clients:
                    for _ in range(NUM_CLIENTS):
                        client = clients.enter_context(socket.socket())
                        client.setblocking(False)
                        client.connect_ex((found[1], int(found[2])))
                    for _ in range(20):
                        most = max(most, len(os.listdir(f"/proc/{process.pid}/fd")))
                        health = httpx.get(f"http://{found[1]}:{found[2]}/health", timeout=60)
                        assert health.status_code == 200
            assert most < LIMIT - 16, most
        finally:
            process.terminate()
    said = log.read_text()
    assert "connections limited" in said
    for sign in ("Too many open files", "not accepted", "Logging error", "Traceback"):
        assert sign not in said, said


def test_a_connection_that_cant_be_accepted_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    from kvtier.control.doorman import on_loop_error

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(on_loop_error)
    told = {"message": "socket.accept() out of system resource", "socket": None}
    loop.call_exception_handler({**told, "exception": OSError(errno.EMFILE, "Too many open files")})
    assert caplog.messages == ["connections not accepted error=Too many open files"]
    assert caplog.records[0].exc_info is None
    loop.call_exception_handler({"message": "else", "exception": OSError(errno.EIO, "I/O")})
    assert caplog.records[1].name == "asyncio"
    loop.close()
