"""Replicas under vLLM over a store that they share: their halves, without a model.

Needs vLLM, and servers of stores: ``make test-vllm``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import Locality, Medium, ReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connectors.vllm.shared.key_scope import KeyScope
from kvtier.core.errors import ConfigError
from kvtier.observe.specs import VLLM_LOADED_CHUNKS
from kvtier.tiers.remote.pruning import make_keeper
from tests.engines.vllm.replica import PAGE_BYTES, Replica, replica
from tests.kit.proxy import Proxy
from tests.kit.servers import ValkeyServer
from tests.kit.waiting import wait_until


def test_replica_loads_what_another_has_computed(server: ValkeyServer, valkey: str) -> None:
    with replica(valkey) as first, replica(valkey) as second:
        first.compute(1, 2, 3)
        first.settle()
        assert server.num_values == 2 * 3, "each rank has its shard"
        assert second.load(1, 2, 3, 4) == 3
        assert second.sources == [CacheHitSource.EXTERNAL_UNSPECIFIED] * 3
        assert second.load(1, 2, 3, 4) == 3
        assert second.sources == [CacheHitSource.HOST] * 3


def test_replica_loads_from_s3_what_another_has_computed(s3: str) -> None:
    with replica(s3) as first, replica(s3) as second:
        first.compute(1, 2, 3)
        first.settle()
        wait_until(lambda: second.load(1, 2, 3) == 3, "it is found")


def test_ranks_find_what_a_warm_start_has_copied_though_the_store_is_gone(
    server: ValkeyServer, valkey: str, tmp_path: Path
) -> None:
    """One of the two ranks copies the shards of both."""
    near = f"dir://{tmp_path / 'near'}?poll_s=0.1&publish_s=0.05"
    with replica(valkey) as first:
        first.compute(1, 2, 3)
        first.settle()
    proxy = Proxy(server.port)
    with replica([near, f"valkey://127.0.0.1:{proxy.port}"], warm_start="1GiB") as second:
        keeper = make_keeper(near)

        def num_copied() -> int:
            stored = keeper.blocks(keeper.entries())
            return sum(len(each.keys) for each in stored if each is not None)

        wait_until(lambda: num_copied() == 2 * 3, "the shards are copied")
        keeper.close()
        proxy.close()
        wait_until(lambda: second.load(1, 2, 3) == 3, "they are found")


def test_ranks_of_another_number_share_nothing(valkey: str) -> None:
    with replica(valkey, num_ranks=2) as two, replica(valkey, num_ranks=1) as one:
        two.compute(1, 2)
        two.settle()
        assert one.load(1, 2) == 0
        one.compute(1, 2)
        one.settle()
        assert two.load(1, 2) == 2


def _any_size(num_ranks: int) -> dict[str, Any]:
    """Return an engine of so many ranks, whose blocks have 4 shards."""
    page_bytes = [4 * PAGE_BYTES // num_ranks] * num_ranks
    return {"num_ranks": num_ranks, "num_cut": 4, "page_bytes": page_bytes}


@pytest.mark.parametrize("first", [1, 2, 4])
@pytest.mark.parametrize("second", [1, 2, 4])
def test_ranks_of_any_number_share_shards(
    first: int, second: int, server: ValkeyServer, valkey: str
) -> None:
    with replica(valkey, **_any_size(first)) as some, replica(valkey, **_any_size(second)) as more:
        some.compute(1, 2, 3)
        some.settle()
        assert server.num_values == 4 * 3
        assert more.load(1, 2, 3, 4) == 3
        more.compute(3, 4)
        more.settle()
        assert server.num_values == 4 * 4
        assert some.load(4, 5) == 1


def test_slabs_of_two_sizes_are_apart(valkey: str, tmp_path: Path) -> None:
    """A block's key is the same for both, and its bytes on a rank's disk are not."""
    disk = {"disk_path": str(tmp_path / "slabs"), "disk_capacity": "1MiB"}
    for num_ranks in (1, 2, 1):
        with replica(valkey, **_any_size(num_ranks), **disk) as made:
            made.compute(num_ranks)
            made.settle()
            assert made.load(num_ranks) == 1
    with replica(valkey, **_any_size(1), **disk) as made:
        assert made.load(1, 2) == 2
        assert made.sources == [CacheHitSource.DISK, CacheHitSource.EXTERNAL_UNSPECIFIED]
    assert len(list((tmp_path / "slabs").iterdir())) == 3


def test_latents_are_stored_once_for_all_ranks(server: ValkeyServer, valkey: str) -> None:
    with replica(valkey, replicated=True) as first:
        first.compute(1, 2, 3)
        first.settle()
        assert server.num_values == 3
    with replica(valkey, replicated=True) as second:
        assert second.load(1, 2, 3) == 3


def test_block_that_one_rank_has_not_stored_is_computed(server: ValkeyServer, valkey: str) -> None:
    with replica(valkey) as first, replica(valkey) as second:
        first.compute(1, 2)
        first.settle(without=[1])
        wait_until(lambda: server.num_values == 2, "the other rank stores blocks")
        assert second.load(1, 2) == 0
        second.compute(1, 2)
        second.settle()
        assert server.num_values == 4


def test_disk_comes_before_the_store_and_a_second_store_after_it(
    server: ValkeyServer, valkey: str, tmp_path: Path
) -> None:
    other = ValkeyServer(tmp_path)
    stores = [valkey, f"far=valkey://127.0.0.1:{other.port}"]
    disk = {"disk_path": str(tmp_path / "slab"), "disk_capacity": "1MiB"}
    with replica(stores[1]) as elsewhere:
        elsewhere.compute(3)
        elsewhere.settle()
    with replica(stores[0]) as nearby:
        nearby.compute(1, 2)
        nearby.settle()
    with replica(stores, **disk) as first:
        first.compute(1)
        first.settle()
    with replica(stores, **disk) as second:
        assert second.load(1, 2, 3) == 3
        stored = CacheHitSource.EXTERNAL_UNSPECIFIED
        assert second.sources == [CacheHitSource.DISK, stored, stored]
        loaded = {
            labels[0]: num
            for (metric, labels), num in second.manager.counts.take().items()
            if metric is VLLM_LOADED_CHUNKS
        }
        assert loaded == {"disk": 1, "valkey": 1, "far": 1}
    assert server.num_values == 2 * 2
    other.close()


def test_store_that_dies_costs_its_blocks_only(server: ValkeyServer, valkey: str) -> None:
    with replica(valkey) as first, replica(valkey) as second:
        first.compute(1, 2)
        first.settle()
        server.stop()
        assert second.load(1, 2) == 0
        second.compute(1, 2)
        second.settle()
        assert second.load(1, 2) == 2
        server.start()  # with nothing in it
        wait_until(lambda: _asks_again(second), "the store is asked again")
        second.compute(7, 8)
        second.settle()
        assert server.num_values >= 4


def _asks_again(harness: Replica) -> bool:
    harness.load(next(_OTHERS))
    return bool(harness.manager._mover.has_unindexed("valkey"))


_OTHERS = iter(range(1000, 100_000))


def test_store_dies_between_the_answer_and_the_read(server: ValkeyServer, valkey: str) -> None:
    with replica(valkey) as first, replica(valkey) as second:
        first.compute(1, 2)
        first.settle()
        stop: list[Any] = [server.stop]
        take_orders = second.manager.take_orders

        def and_stop() -> Any:
            orders = take_orders()
            if stop and any(order.verb.value == "read" for order in orders):
                stop.pop()()
            return orders

        second.manager.take_orders = and_stop
        assert second.load(1, 2) == 0
        assert not stop, "nothing was read"
        second.compute(1, 2)
        second.settle()
        assert second.load(1, 2) == 2


def test_store_that_answers_nobody_holds_up_one_request_only(server: ValkeyServer) -> None:
    proxy = Proxy(server.port)
    with replica(f"valkey://127.0.0.1:{proxy.port}") as harness:
        proxy.hold()
        began_s = time.monotonic()
        assert harness.load(1, 2) == 0
        assert time.monotonic() - began_s >= 0.5, "it was not waited for"
        num_steps = harness.num_steps
        for number in range(10, 20):
            assert harness.load(number) == 0
        assert harness.num_steps == num_steps, "others waited for it, too"
        harness.compute(1, 2)
        assert harness.load(1, 2) == 2
        proxy.release()
        harness.settle()
    proxy.close()


def test_blocks_of_stores_are_elsewhere_for_who_asks_by_place(valkey: str) -> None:
    with replica(valkey) as harness:
        harness.compute(1)
        harness.settle()
        told = {(event.medium, event.locality) for event in harness.manager.take_events()}
        assert told == {(Medium.CPU, Locality.LOCAL), (Medium.STORAGE, Locality.REMOTE)}


def test_kv_of_names_is_kept_out_of_the_store(server: ValkeyServer, valkey: str) -> None:
    with replica(valkey) as first:
        begin = first.manager.on_new_request

        def adapted(context: ReqContext) -> None:
            begin(context)
            first.manager.state_of(context.req_id).scope = KeyScope(shared=0)

        first.manager.on_new_request = adapted
        first.compute(1, 2)
        first.settle()
        assert server.num_values == 0
        assert first.load(1, 2) == 2


def test_reset_cache_finds_nothing_of_before(valkey: str) -> None:
    with replica(valkey) as harness:
        harness.compute(1, 2)
        harness.settle()
        harness.manager.reset_cache()
        assert harness.load(1, 2) == 0


@pytest.mark.parametrize(("client_hints", "are_followed"), [("on", True), ("off", False)])
def test_hints_of_clients_can_be_switched_off(
    valkey: str, client_hints: str, are_followed: bool
) -> None:
    with replica(valkey, client_hints=client_hints) as harness:
        assert harness.manager._follows_hints == are_followed


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"storage": "host=valkey://a"}, "two tiers are called 'host'"),
        ({"storage": "nobody://a"}, "no plug-in 'nobody' in kvtier.tiers"),
        ({"host_capacity": "100TiB"}, "host_capacity: '100TiB' is more than the "),
        ({"storage_capacity": "4KiB"}, "storage_capacity: 4096 bytes are below one block"),
    ],
)
def test_setting_that_cant_be_used_is_one_sentence(
    valkey: str, settings: dict[str, Any], sentence: str
) -> None:
    given = {"storage": valkey, **settings}
    with pytest.raises(ConfigError) as caught:
        Replica(given.pop("storage"), **given)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
