"""Two real vLLM engines on the CPU that share a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engines import (
    BLOCK,
    Answers,
    connector,
    count,
    engine,
    loaded,
    one_by_one,
    prompt,
)
from tests.kit.proxy import Proxy
from tests.kit.servers import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    AZURITE,
    ValkeyCluster,
    ValkeyServer,
    azurite,
    make_container,
)
from tests.kit.waiting import wait_until
from tests.tiers.remote.bucket import AzureContainer

# 50 tokens beyond the last full block: hits on the device and from the store are computed from the
# same boundary.
PROMPTS = [prompt(seed, 6 * BLOCK + 50) for seed in range(3)]
NUM_BLOCKS = 6 * len(PROMPTS)
BLOCK_BYTES = 640 << 10
"""Bytes of a block of the built-in model in float32."""


@pytest.mark.timeout(600)
def test_engine_loads_what_another_has_computed(alone: Answers, valkey: str) -> None:
    config = connector(host_capacity="256MiB", storage=valkey, lookup_deadline_s=5)
    with engine(config) as first:
        assert one_by_one(first, PROMPTS) == alone["cold"]
        with engine(config) as second:
            before = loaded("valkey"), loaded("host")
            assert one_by_one(second, PROMPTS) == alone["warm"]
            assert loaded("valkey") - before[0] == NUM_BLOCKS
            assert second.reset_prefix_cache()
            assert one_by_one(second, PROMPTS) == alone["warm"]
            assert loaded("valkey") - before[0] == NUM_BLOCKS
            assert loaded("host") - before[1] == NUM_BLOCKS, "it is in host memory by then"


@pytest.mark.timeout(600)
def test_store_that_is_gone_is_no_reason_to_stop(alone: Answers, server: ValkeyServer) -> None:
    proxy = Proxy(server.port)
    config = connector(host_capacity="256MiB", storage=f"valkey://127.0.0.1:{proxy.port}")
    with engine(config) as llm:
        proxy.hold()
        assert one_by_one(llm, PROMPTS[:2]) == alone["cold"][:2]
        proxy.release()
        proxy.close()
        assert one_by_one(llm, PROMPTS[2:]) == alone["cold"][2:]
        assert llm.reset_prefix_cache()
        assert one_by_one(llm, PROMPTS) == alone["warm"]


def until_stored(llm: Any, server: ValkeyServer, num: int) -> None:
    """Send prompts until all blocks are stored: vLLM handles stores only in its steps."""
    for seed in range(100, 160):
        if server.num_values >= num:
            return
        one_by_one(llm, [prompt(seed, 20)])
    pytest.fail(f"{server.num_values} of {num} blocks are in the store")


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("two_cores")
def test_two_ranks_load_the_shards_that_two_others_have_stored(
    server: ValkeyServer, valkey: str
) -> None:
    """Each rank has half of the heads, under a key of its own; the scheduler decides for both."""
    config = connector(host_capacity="256MiB", storage=valkey, lookup_deadline_s=5)
    with engine(config, tensor_parallel_size=2) as first:
        one_by_one(first, PROMPTS)
        on_device = one_by_one(first, PROMPTS)
        assert [cached for cached, _ in on_device] == [6 * BLOCK] * len(PROMPTS)
        until_stored(first, server, 2 * NUM_BLOCKS)
    with engine(config, tensor_parallel_size=2) as second:
        before = loaded("valkey")
        assert one_by_one(second, PROMPTS) == on_device
        assert loaded("valkey") - before == NUM_BLOCKS


class Cluster:
    """A Valkey Cluster. One primary dies, and its replica takes over."""

    tier = "valkey"

    def __init__(self, folder: Path) -> None:
        self._cluster = ValkeyCluster(folder)
        self.url = f"valkey://127.0.0.1:{self._cluster.servers[0].port}"

    def fail(self) -> None:
        self._cluster.primaries[1].stop()

    def recover(self) -> None:
        self._cluster.wait()

    def close(self) -> None:
        self._cluster.close()


class Azure:
    """A container in Azure's emulator, which is killed and started again."""

    tier = "az"

    def __init__(self, folder: Path) -> None:
        if not AZURITE.exists():
            pytest.skip("no emulator of Azure: make peers-azurite")
        pytest.importorskip("obstore", reason="no client of Azure: pip install obstore")
        self._server = azurite(folder / "blobs")
        self._server.start()
        make_container(self._server.url)
        container = AzureContainer(self._server.url, "replicas")
        self.url = f"az:{container.location()}&poll_s=0.1&publish_s=0.1"

    def fail(self) -> None:
        self._server.kill()

    def recover(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.kill()


class Directory:
    """A directory of several machines, whose file system is away for a while."""

    tier = "dir"

    def __init__(self, folder: Path) -> None:
        self._folder, self._away = folder / "shared", folder / "away"
        self._folder.mkdir()
        self.url = f"dir://{self._folder}?poll_s=0.1&publish_s=0.1"

    def fail(self) -> None:
        self._folder.rename(self._away)

    def recover(self) -> None:
        self._away.rename(self._folder)

    def close(self) -> None:
        """Nothing runs."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [Cluster, Azure, Directory])
def test_replicas_share_a_store_over_a_failover(
    alone: Answers,
    kind: type[Cluster | Azure | Directory],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither a hit from the store, nor its failure, nor its return changes a bit."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
    store, early, num = kind(tmp_path), slice(2), 2 * NUM_BLOCKS // 3
    config = connector(host_capacity="256MiB", storage=store.url, lookup_deadline_s=5)

    def is_written() -> bool:
        one_by_one(first, [prompt(100, 20)])  # vLLM handles stores only in its steps
        stored = count("vllm:kvtier_moved_bytes_total", src="host", dst=store.tier)
        return stored - before >= num * BLOCK_BYTES

    def all_from_store(llm: Any) -> None:
        before = loaded(store.tier)
        assert one_by_one(llm, PROMPTS[early]) == alone["warm"][early]
        assert loaded(store.tier) - before == num

    try:
        before = count("vllm:kvtier_moved_bytes_total", src="host", dst=store.tier)
        with engine(config) as first:
            assert one_by_one(first, PROMPTS[early]) == alone["cold"][early]
            wait_until(is_written, "the blocks are in the store")
            with engine(config) as second:
                all_from_store(second)
                store.fail()
                assert one_by_one(second, PROMPTS[2:]) == alone["cold"][2:]
                assert second.reset_prefix_cache()
                assert one_by_one(second, PROMPTS[early]) == alone["warm"][early]
                store.recover()
                with engine(config) as third:
                    all_from_store(third)
    finally:
        store.close()
