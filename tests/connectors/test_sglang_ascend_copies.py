"""Copies between SGLang's own pools on Ascend, through a simulated driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.connectors.ascend_world import BATCH, AscendWorld, Worlds, at_pages, raw

POOLS: dict[str, Callable[[AscendWorld], Any]] = {
    "keys and values": lambda world: world.mha(5),
    "one layer": lambda world: world.mha(1),
    "with drafts": lambda world: world.mha(3, drafts=2),
    "latents": lambda world: world.mla(5),
    "with an indexer": lambda world: world.mla(5, indexed=(1, 3)),
    "latents and drafts": lambda world: world.mla(3, indexed=(0, 2), drafts=2),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("variant", ["cann85", "cann91"])
@pytest.mark.parametrize("kind", POOLS)
def test_what_went_to_host_memory_comes_back_elsewhere(
    ascends: Worlds, kind: str, variant: str, seed: int
) -> None:
    world = ascends(variant, seed=seed)
    pool = POOLS[kind](world)
    before = [(raw(device), raw(host)) for device, host in pool.pairs()]
    on_device, in_host, elsewhere = (3, 4, 7), (6, 2, 1), (8, 1, 2)
    world.back_up(pool, at_pages(pool, in_host, on_device))
    world.finish()
    for (device, host), (old_device, old_host) in zip(pool.pairs(), before, strict=True):
        old_host[list(in_host)] = old_device[:, list(on_device)].transpose(0, 1)
        assert torch.equal(raw(host), old_host)
        assert torch.equal(raw(device), old_device), "a back-up changes nothing"
    world.load_all(pool, at_pages(pool, in_host, elsewhere))
    world.finish()
    for (device, _), (old_device, _) in zip(pool.pairs(), before, strict=True):
        old_device[:, list(elsewhere)] = old_device[:, list(on_device)]
        assert torch.equal(raw(device), old_device)
    assert world.theirs == []
    assert world.fake.count("synchronous_copies") == 0


def test_a_load_is_a_batch_call_per_layer_and_a_back_up_is_one(ascends: Worlds) -> None:
    world = ascends()
    pool = world.mha(layers=6, page=128, heads=8, dim=64)  # 128 KiB a page and tensor
    at = at_pages(pool, (0, 1, 2, 3, 4, 5), (8, 6, 4, 2, 1, 3))
    world.back_up(pool, at)
    assert world.fake.count(BATCH) == 1
    world.load_all(pool, at)
    world.finish()
    assert world.fake.count(BATCH) == 1 + 6, "two 2-D copies for each of six pages are SGLang's way"
    assert world.fake.count("copies") == 2 * (2 * 6 * 6)
    assert world.num_copies_of("aclrtMemcpy2dAsync", "aclrtMemcpyAsync") == 0


def test_layers_that_are_not_worth_a_call_share_one(ascends: Worlds) -> None:
    world = ascends()
    pool = world.mha(layers=6, page=16, heads=4, dim=96)  # 864 KiB with 6 pages: one step
    at = at_pages(pool, (0, 1, 2, 3, 4, 5), (8, 6, 4, 2, 1, 3))
    world.load_all(pool, at)
    assert world.fake.count(BATCH) == 1
    wide = world.mha(layers=6, page=64, heads=4, dim=96)  # four times as much: three steps
    world.load_all(wide, at_pages(wide, (0, 1, 2, 3, 4, 5), (8, 6, 4, 2, 1, 3)))
    assert world.fake.count(BATCH) == 1 + 3
    world.finish()


def test_more_copies_than_a_call_may_have_are_several_calls(ascends: Worlds) -> None:
    world = ascends()
    pool = world.mha(layers=400, page=1, heads=1, dim=8)
    at = at_pages(pool, (0, 1, 2, 3, 4, 5, 6), (8, 6, 4, 2, 1, 3, 7))
    world.back_up(pool, at)
    world.finish()
    assert world.fake.count("copies") == 2 * 400 * 7
    assert world.fake.count(BATCH) == 2


@pytest.mark.parametrize("seed", range(3))
def test_layer_arrives_without_those_behind_it(ascends: Worlds, seed: int) -> None:
    """SGLang's event for a layer, and those for the others, while SGLang is still at that layer."""
    world = ascends(seed=seed)
    pool = world.mha(layers=4, page=128, heads=8, dim=64)
    in_host, on_device = (0, 2, 4, 5), (7, 5, 3, 1)
    at = at_pages(pool, in_host, on_device)
    before = [raw(device) for device, _ in pool.pairs()]
    for layer in range(4):
        world.load(pool, at, layer)
        world.device.fence().wait()  # what SGLang records for the layer
        for (device, host), old in zip(pool.pairs(), before, strict=True):
            old[layer, list(on_device)] = raw(host[:, layer])[list(in_host)]
            assert torch.equal(raw(device), old), "this layer is there, and nothing of the next"


def test_events_of_layers_pass_in_their_order(ascends: Worlds) -> None:
    world = ascends(seed=2)
    pool = world.mha(layers=4, page=128, heads=8, dim=64)
    at = at_pages(pool, (0, 2, 4, 5), (7, 5, 3, 1))
    world.fake.hold()
    events = []
    for layer in range(4):
        world.load(pool, at, layer)
        events.append(world.device.fence())
    assert not any(event.passed for event in events)
    world.fake.let_go()
    for layer, event in enumerate(events):
        event.wait()
        assert all(event.passed for event in events[:layer])


@pytest.mark.parametrize("seed", range(6))
def test_copies_keep_their_place_in_sglangs_stream(ascends: Worlds, seed: int) -> None:
    """Each of five steps in a stream sees what the one before has left.

    Compute writes a page, then it is backed up, overwritten, loaded again, and one layer of it
    overwritten.
    """
    world = ascends(seed=seed)
    pool = world.mha(layers=3)
    ((keys, host_keys), _) = pool.pairs()
    nbytes = keys[0, 0].nbytes

    def compute(layer: int, value: int) -> None:
        world.fake.fill(keys[layer, 4].data_ptr(), nbytes, value, world.stream)

    at = at_pages(pool, (2,), (4,))
    world.fake.hold()
    for layer in range(3):
        compute(layer, 10 + layer)
    world.back_up(pool, at)
    for layer in range(3):
        compute(layer, 77)
    world.load_all(pool, at)
    compute(1, 99)
    world.fake.let_go()
    world.finish()
    for layer, value in enumerate((10, 99, 12)):
        assert set(raw(keys[layer, 4]).flatten().tolist()) == {value}
        assert set(raw(host_keys[2, layer]).flatten().tolist()) == {10 + layer}


def test_drafts_come_with_the_last_layer(ascends: Worlds) -> None:
    world = ascends()
    pool = world.mha(layers=2, page=128, heads=8, dim=64, drafts=1)
    at = at_pages(pool, (0, 1, 2, 3), (4, 3, 2, 1))
    draft, mirror = pool.pairs()[2]
    old = raw(draft)
    world.load(pool, at, 0)
    world.load(pool, at, 2, is_draft=True)
    world.finish()
    assert torch.equal(raw(draft), old)
    world.load(pool, at, 1)
    world.finish()
    old[0, [4, 3, 2, 1]] = raw(mirror[[0, 1, 2, 3], 0])
    assert torch.equal(raw(draft), old)


def test_loads_of_several_pools_take_turns(ascends: Worlds) -> None:
    world = ascends(seed=1)
    pools = [world.mha(layers=3, page=64, heads=8, dim=64), world.mla(3, indexed=(1,))]
    ats = [at_pages(pool, (0, 3, 5), (6, 2, 1)) for pool in pools]
    for layer in range(3):
        for pool, at in zip(pools, ats, strict=True):
            world.load(pool, at, layer)
    world.finish()
    for pool in pools:
        for device, host in pool.pairs():
            for row in range(len(device)):
                assert torch.equal(raw(device[row, [6, 2, 1]]), raw(host[[0, 3, 5], row]))


def test_events_are_given_back_while_loads_go_on(ascends: Worlds) -> None:
    world = ascends()
    pool = world.mha(layers=4, page=128, heads=8, dim=64)
    for _ in range(10):
        world.load_all(pool, at_pages(pool, (0, 1), (2, 1)))
        world.finish()
    made = world.fake.count("aclrtCreateEventExWithFlag")
    gone = world.fake.count("aclrtDestroyEvent")
    assert made == 10 * (1 + 2), "one to begin after, and one for each of two groups"
    assert made - gone <= 2 * 3
