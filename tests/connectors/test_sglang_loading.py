"""Loads under SGLang, from the look-up that promises them to the end of their batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.cache.block_cache import BlockState
from kvtier.connectors.sglang.linker.layer_counter import LayerCounter
from kvtier.connectors.sglang.linker.loading import Loading
from kvtier.connectors.sglang.shared.device_pools import DevicePool
from kvtier.core.types import HOST
from tests.connectors.pool_world import ENDS, PoolWorld, key_of

PAGE = 16
NUM_HOST = 8
WANTED = (0, 1, 2)


class Name(StrEnum):
    """Stand-in for SGLang's ``PoolName``."""

    KV = "kv"
    SWA = "swa"


class World:
    """Loads of one pool, or of several. fails: error that the beginning of a batch raises."""

    def __init__(self, *names: Name) -> None:
        self.pools = {name: PoolWorld(NUM_HOST) for name in names or (Name.KV,)}
        linked: dict[str, Any] = {
            name.value: SimpleNamespace(
                pool=DevicePool(name.value, PAGE, len(ENDS), (), None),
                cache=world.pool,
                copies=world.copies,
            )
            for name, world in self.pools.items()
        }
        self.layers = LayerCounter()
        self.fails: Exception | None = None
        self.loading = Loading(linked, PAGE, self.layers, self.after_forward)
        for world in self.pools.values():
            assert world.keep(*WANTED)
            world.settle()

    @contextmanager
    def after_forward(self) -> Iterator[None]:
        if self.fails is not None:
            raise self.fails
        yield

    def promise(self, *numbers: int) -> None:
        """Look a prompt up."""
        self.loading.look_up(0)
        places = {name.value: each.places(*numbers) for name, each in self.pools.items()}
        self.loading.promise([key_of(number) for number in numbers], places)

    def queue(self, rid: str, numbers: Sequence[int], first_page: int = 10) -> None:
        """Queue a load as SGLang does, into consecutive device pages from ``first_page``."""
        slots = torch.arange(first_page * PAGE, (first_page + len(numbers)) * PAGE)
        keys = [key_of(number).hex() for number in numbers]
        wanted: list[Any] = [
            SimpleNamespace(name=name, keys=keys, device_indices=slots) for name in self.pools
        ]
        self.loading.queue(rid, wanted, waited_s=0.0)

    def num_held(self) -> list[int]:
        """Return the number of held pages in host memory, by pool."""
        return [NUM_HOST - pool.pool.ladder.num_available(HOST) for pool in self.pools.values()]

    def has(self, numbers: Sequence[int], first_page: int = 10) -> bool:
        """Return whether the device has these pages in all pools."""
        return all(
            pool.has(key_of(number), page)
            for pool in self.pools.values()
            for page, number in enumerate(numbers, first_page)
        )


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    """Returns a function that makes worlds; at the end no page may be held."""
    made: list[World] = []

    def make(*names: Name) -> World:
        made.append(World(*names))
        return made[-1]

    yield make
    for world in made:
        world.loading.reset()
        for pool in world.pools.values():
            pool.close()


@pytest.mark.parametrize("names", [(Name.KV,), (Name.KV, Name.SWA)])
def test_pages_are_held_from_the_look_up_to_the_end_of_the_batch(
    worlds: Callable[..., World], names: tuple[Name, ...]
) -> None:
    world = worlds(*names)
    held = [len(WANTED)] * len(names)
    world.promise(*WANTED)
    assert world.num_held() == held
    world.queue("r", WANTED)
    assert world.num_held() == held
    index = world.loading.begin()
    assert world.num_held() == held
    assert world.loading.finish(index)
    assert world.num_held() == [0] * len(names)
    assert world.has(WANTED)


def test_next_look_up_lets_go_of_what_was_promised(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.promise(*WANTED)
    world.promise(0)
    assert world.num_held() == [1]
    world.loading.look_up(0)
    assert world.num_held() == [0]


def test_request_that_is_cancelled_holds_nothing(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.queue("r", WANTED)
    assert world.loading.cancel("r")
    assert world.num_held() == [0]
    assert not world.loading.cancel("r")
    assert world.loading.begin() == -1


def test_request_that_asks_again_wants_that_alone(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.queue("r", WANTED)
    world.queue("r", WANTED[:1], first_page=20)
    assert world.num_held() == [1]
    assert world.loading.finish(world.loading.begin())
    assert world.has(WANTED[:1], first_page=20)
    assert not world.has(WANTED[:1])


def test_requests_of_a_batch_are_one_load_of_each_pool(worlds: Callable[..., World]) -> None:
    world = worlds(Name.KV, Name.SWA)
    world.queue("r", WANTED)
    world.queue("s", WANTED[::-1], first_page=20)  # the same pages of host memory
    index = world.loading.begin()
    assert len(list(world.loading.jobs())) == 2
    assert world.loading.finish(index)
    assert world.has(WANTED)
    assert world.has(WANTED[::-1], first_page=20)
    assert world.num_held() == [0, 0]


def test_pages_that_have_left_are_told_of_at_the_end_of_that_batch_alone(
    worlds: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    """Until then this rank goes on like the others, which have the pages."""
    world = worlds()
    assert world.pools[Name.KV].places(99) == [BlockState.NOWHERE]
    world.queue("r", [*WANTED, 99])
    assert "its request fails rid=r" in caplog.text
    index = world.loading.begin()
    assert index >= 0
    assert not world.loading.finish(index)
    world.queue("s", WANTED)
    later = world.loading.begin()
    assert later > index
    assert world.loading.finish(later)


def test_batch_that_cant_begin_is_told_of_at_its_end(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.queue("r", WANTED)
    world.fails = RuntimeError("no stream")
    index = world.loading.begin()
    assert index >= 0
    assert world.num_held() == [0]
    world.layers.set_consumer(index)
    world.layers.wait_until(0)  # for nothing
    assert not world.loading.finish(index)


def test_forward_finds_each_layer_that_it_has_waited_for(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.queue("r", WANTED)
    index = world.loading.begin()
    world.layers.set_consumer(index)
    for layer in range(len(ENDS)):
        world.layers.wait_until(layer)
    assert world.has(WANTED), "before the batch is finished"
    assert world.loading.finish(index)


def test_batch_that_nobody_knows_is_finished(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.queue("r", WANTED)
    index = world.loading.begin()
    assert world.loading.finish(index)
    assert world.loading.finish(index), "SGLang asks of batches that a reset has finished, too"


def test_forwards_that_wait_are_told_of_once(worlds: Callable[..., World]) -> None:
    world = worlds()
    assert not world.loading.take_waits()
    world.queue("r", WANTED)
    assert not world.loading.take_waits()
    index = world.loading.begin()
    assert world.loading.take_waits()
    assert world.loading.take_waits(), "it is not over"
    world.loading.finish(index)
    assert world.loading.take_waits()
    assert not world.loading.take_waits()


def test_nothing_is_held_after_a_reset(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.queue("r", WANTED)
    world.loading.begin()
    world.queue("s", WANTED)
    world.promise(*WANTED)
    world.loading.reset()
    assert world.num_held() == [0]
    assert list(world.loading.jobs()) == []
    assert world.loading.begin() == -1


def test_what_was_promised_is_forgotten_with_the_caches(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.promise(*WANTED)
    world.loading.forget_promised()
    world.pools[Name.KV].pool.clear()
    assert world.pools[Name.KV].keep(*WANTED)  # again, by the same names
    world.queue("r", WANTED)
    assert world.num_held() == [len(WANTED)]
