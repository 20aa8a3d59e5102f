"""The tier of a node, in a process of its own, as any storage tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from kvtier.core.types import BlockKey
from kvtier.node.client.channel import NodeClient
from kvtier.node.client.tier import NodeTier
from kvtier.testing import StorageSuite
from kvtier.tiers import Outcome, StorageSite, StorageTier
from tests.kit.nodes import NodeProcess
from tests.node.harness import node_process


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with node_process(tmp_path_factory.mktemp("node"), "--host-capacity=16MiB") as node:
        yield node


class TestNodeTier(StorageSuite):
    @pytest.fixture(autouse=True)
    def _node(self, node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtier.node.client.tier.ANSWER_S", 30.0)  # machines are busy
        self.node = node
        self.tenant = ""

    def make_storage(self, num_blocks: int) -> StorageTier:
        self.tenant = os.urandom(4).hex()
        return self.again(num_blocks)

    def again(self, num_blocks: int) -> StorageTier:
        capacity = num_blocks * self.group.bytes_per_block
        site = StorageSite(f"node:{self.node.socket}", "node", self.group, capacity)
        return NodeTier(site, NodeClient(self.node.socket, self.tenant))

    def reopen(self, storage: StorageTier) -> StorageTier:
        return self.again(storage.num_blocks)

    def test_it_has_as_much_room_as_its_node(self) -> None:
        storage = self.again(1 << 40)
        assert storage.find([BlockKey(b"k" * 32)], 5.0) == [Outcome.ABSENT]
        status = self.node.control.get("/status")
        (room,) = (room for room in status["rooms"] if room["tenant"] == "default")
        capacity = status["memory_bytes"] + sum(room["capacity_bytes"].values())
        assert storage.num_blocks == capacity // self.group.bytes_per_block
        storage.close()

    def stall(self, storage: StorageTier, num_blocks: int) -> AbstractContextManager[None] | None:
        return None if num_blocks else self._stopped()

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        self.node.pause()
        try:
            yield
        finally:
            self.node.resume()
