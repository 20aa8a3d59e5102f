"""Copies between SGLang's own pools on Ascend, through a simulated driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.connectors.ascend_harness import BATCH, AscendHarness, Harnesss, at_pages, raw

POOLS: dict[str, Callable[[AscendHarness], Any]] = {
    "keys and values": lambda harness: harness.mha(5),
    "one layer": lambda harness: harness.mha(1),
    "with drafts": lambda harness: harness.mha(3, drafts=2),
    "latents": lambda harness: harness.mla(5),
    "with an indexer": lambda harness: harness.mla(5, indexed=(1, 3)),
    "latents and drafts": lambda harness: harness.mla(3, indexed=(0, 2), drafts=2),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("variant", ["cann85", "cann91"])
@pytest.mark.parametrize("kind", POOLS)
def test_what_went_to_host_memory_comes_back_elsewhere(
    ascends: Harnesss, kind: str, variant: str, seed: int
) -> None:
    harness = ascends(variant, seed=seed)
    pool = POOLS[kind](harness)
    before = [(raw(device), raw(host)) for device, host in pool.pairs()]
    on_device, in_host, elsewhere = (3, 4, 7), (6, 2, 1), (8, 1, 2)
    harness.back_up(pool, at_pages(pool, in_host, on_device))
    harness.finish()
    for (device, host), (old_device, old_host) in zip(pool.pairs(), before, strict=True):
        old_host[list(in_host)] = old_device[:, list(on_device)].transpose(0, 1)
        assert torch.equal(raw(host), old_host)
        assert torch.equal(raw(device), old_device), "a back-up changes nothing"
    harness.load_all(pool, at_pages(pool, in_host, elsewhere))
    harness.finish()
    for (device, _), (old_device, _) in zip(pool.pairs(), before, strict=True):
        old_device[:, list(elsewhere)] = old_device[:, list(on_device)]
        assert torch.equal(raw(device), old_device)
    assert harness.theirs == []
    assert harness.fake.count("synchronous_copies") == 0


def test_a_load_is_a_batch_call_per_layer_and_a_back_up_is_one(ascends: Harnesss) -> None:
    harness = ascends()
    pool = harness.mha(layers=6, page=128, heads=8, dim=64)  # 128 KiB a page and tensor
    at = at_pages(pool, (0, 1, 2, 3, 4, 5), (8, 6, 4, 2, 1, 3))
    harness.back_up(pool, at)
    assert harness.fake.count(BATCH) == 1
    harness.load_all(pool, at)
    harness.finish()
    assert harness.fake.count(BATCH) == 1 + 6, (
        "two 2-D copies for each of six pages are SGLang's way"
    )
    assert harness.fake.count("copies") == 2 * (2 * 6 * 6)
    assert harness.num_copies_of("aclrtMemcpy2dAsync", "aclrtMemcpyAsync") == 0


def test_layers_that_are_not_worth_a_call_share_one(ascends: Harnesss) -> None:
    harness = ascends()
    pool = harness.mha(layers=6, page=16, heads=4, dim=96)  # 864 KiB with 6 pages: one step
    at = at_pages(pool, (0, 1, 2, 3, 4, 5), (8, 6, 4, 2, 1, 3))
    harness.load_all(pool, at)
    assert harness.fake.count(BATCH) == 1
    wide = harness.mha(layers=6, page=64, heads=4, dim=96)  # four times as much: three steps
    harness.load_all(wide, at_pages(wide, (0, 1, 2, 3, 4, 5), (8, 6, 4, 2, 1, 3)))
    assert harness.fake.count(BATCH) == 1 + 3
    harness.finish()


def test_more_copies_than_a_call_may_have_are_several_calls(ascends: Harnesss) -> None:
    harness = ascends()
    pool = harness.mha(layers=400, page=1, heads=1, dim=8)
    at = at_pages(pool, (0, 1, 2, 3, 4, 5, 6), (8, 6, 4, 2, 1, 3, 7))
    harness.back_up(pool, at)
    harness.finish()
    assert harness.fake.count("copies") == 2 * 400 * 7
    assert harness.fake.count(BATCH) == 2


@pytest.mark.parametrize("seed", range(3))
def test_layer_arrives_without_those_behind_it(ascends: Harnesss, seed: int) -> None:
    """SGLang's event for a layer, and those for the others, while SGLang is still at that layer."""
    harness = ascends(seed=seed)
    pool = harness.mha(layers=4, page=128, heads=8, dim=64)
    in_host, on_device = (0, 2, 4, 5), (7, 5, 3, 1)
    at = at_pages(pool, in_host, on_device)
    before = [raw(device) for device, _ in pool.pairs()]
    for layer in range(4):
        harness.load(pool, at, layer)
        harness.device.fence().wait()  # what SGLang records for the layer
        for (device, host), old in zip(pool.pairs(), before, strict=True):
            old[layer, list(on_device)] = raw(host[:, layer])[list(in_host)]
            assert torch.equal(raw(device), old), "this layer is there, and nothing of the next"


def test_events_of_layers_pass_in_their_order(ascends: Harnesss) -> None:
    harness = ascends(seed=2)
    pool = harness.mha(layers=4, page=128, heads=8, dim=64)
    at = at_pages(pool, (0, 2, 4, 5), (7, 5, 3, 1))
    harness.fake.hold()
    events = []
    for layer in range(4):
        harness.load(pool, at, layer)
        events.append(harness.device.fence())
    assert not any(event.passed for event in events)
    harness.fake.release()
    for layer, event in enumerate(events):
        event.wait()
        assert all(event.passed for event in events[:layer])


@pytest.mark.parametrize("seed", range(6))
def test_copies_keep_their_place_in_sglangs_stream(ascends: Harnesss, seed: int) -> None:
    """Each of five steps in a stream sees what the one before has left.

    Compute writes a page, then it is backed up, overwritten, loaded again, and one layer of it
    overwritten.
    """
    harness = ascends(seed=seed)
    pool = harness.mha(layers=3)
    ((keys, host_keys), _) = pool.pairs()
    nbytes = keys[0, 0].nbytes

    def compute(layer: int, value: int) -> None:
        harness.fake.fill(keys[layer, 4].data_ptr(), nbytes, value, harness.stream)

    at = at_pages(pool, (2,), (4,))
    harness.fake.hold()
    for layer in range(3):
        compute(layer, 10 + layer)
    harness.back_up(pool, at)
    for layer in range(3):
        compute(layer, 77)
    harness.load_all(pool, at)
    compute(1, 99)
    harness.fake.release()
    harness.finish()
    for layer, value in enumerate((10, 99, 12)):
        assert set(raw(keys[layer, 4]).flatten().tolist()) == {value}
        assert set(raw(host_keys[2, layer]).flatten().tolist()) == {10 + layer}


def test_drafts_come_with_the_last_layer(ascends: Harnesss) -> None:
    harness = ascends()
    pool = harness.mha(layers=2, page=128, heads=8, dim=64, drafts=1)
    at = at_pages(pool, (0, 1, 2, 3), (4, 3, 2, 1))
    draft, mirror = pool.pairs()[2]
    old = raw(draft)
    harness.load(pool, at, 0)
    harness.load(pool, at, 2, is_draft=True)
    harness.finish()
    assert torch.equal(raw(draft), old)
    harness.load(pool, at, 1)
    harness.finish()
    old[0, [4, 3, 2, 1]] = raw(mirror[[0, 1, 2, 3], 0])
    assert torch.equal(raw(draft), old)


def test_loads_of_several_pools_take_turns(ascends: Harnesss) -> None:
    harness = ascends(seed=1)
    pools = [harness.mha(layers=3, page=64, heads=8, dim=64), harness.mla(3, indexed=(1,))]
    ats = [at_pages(pool, (0, 3, 5), (6, 2, 1)) for pool in pools]
    for layer in range(3):
        for pool, at in zip(pools, ats, strict=True):
            harness.load(pool, at, layer)
    harness.finish()
    for pool in pools:
        for device, host in pool.pairs():
            for row in range(len(device)):
                assert torch.equal(raw(device[row, [6, 2, 1]]), raw(host[[0, 3, 5], row]))


def test_events_are_given_back_while_loads_go_on(ascends: Harnesss) -> None:
    harness = ascends()
    pool = harness.mha(layers=4, page=128, heads=8, dim=64)
    for _ in range(10):
        harness.load_all(pool, at_pages(pool, (0, 1), (2, 1)))
        harness.finish()
    made = harness.fake.count("aclrtCreateEventExWithFlag")
    gone = harness.fake.count("aclrtDestroyEvent")
    assert made == 10 * (1 + 2), "one to begin after, and one for each of two groups"
    assert made - gone <= 2 * 3
