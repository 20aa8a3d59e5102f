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
from kvtier.connectors.sglang.linker.loading import Loading
from kvtier.connectors.sglang.shared.device_pools import DevicePool
from kvtier.core.types import HOST
from tests.connectors.pool_harness import ENDS, PoolHarness, key_of

PAGE = 16
NUM_HOST = 8
WANTED = (0, 1, 2)


class Name(StrEnum):
    """Stand-in for SGLang's ``PoolName``."""

    KV = "kv"
    SWA = "swa"


class Harness:
    """Loads of one pool, or of several. fails: error that the beginning of a batch raises."""

    def __init__(self, *names: Name) -> None:
        self.pools = {name: PoolHarness(NUM_HOST) for name in names or (Name.KV,)}
        linked: dict[str, Any] = {
            name.value: SimpleNamespace(
                pool=DevicePool(name.value, PAGE, len(ENDS), (), None),
                cache=harness.pool,
                copies=harness.copies,
            )
            for name, harness in self.pools.items()
        }
        self.fails: Exception | None = None
        self.loading = Loading(linked, PAGE, self.after_forward)
        for harness in self.pools.values():
            assert harness.keep(*WANTED)
            harness.settle()

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
def harnesss() -> Iterator[Callable[..., Harness]]:
    """Returns a function that makes harnesss; at the end no page may be held."""
    made: list[Harness] = []

    def make(*names: Name) -> Harness:
        made.append(Harness(*names))
        return made[-1]

    yield make
    for harness in made:
        harness.loading.reset()
        for pool in harness.pools.values():
            pool.close()


@pytest.mark.parametrize("names", [(Name.KV,), (Name.KV, Name.SWA)])
def test_pages_are_held_from_the_look_up_to_the_end_of_the_batch(
    harnesss: Callable[..., Harness], names: tuple[Name, ...]
) -> None:
    harness = harnesss(*names)
    held = [len(WANTED)] * len(names)
    harness.promise(*WANTED)
    assert harness.num_held() == held
    harness.queue("r", WANTED)
    assert harness.num_held() == held
    index = harness.loading.begin()
    assert harness.num_held() == held
    assert harness.loading.finish(index)
    assert harness.num_held() == [0] * len(names)
    assert harness.has(WANTED)


def test_next_look_up_lets_go_of_what_was_promised(harnesss: Callable[..., Harness]) -> None:
    harness = harnesss()
    harness.promise(*WANTED)
    harness.promise(0)
    assert harness.num_held() == [1]
    harness.loading.look_up(0)
    assert harness.num_held() == [0]


def test_request_that_is_cancelled_holds_nothing(harnesss: Callable[..., Harness]) -> None:
    harness = harnesss()
    harness.queue("r", WANTED)
    assert harness.loading.cancel("r")
    assert harness.num_held() == [0]
    assert not harness.loading.cancel("r")
    assert harness.loading.begin() == -1


def test_request_that_asks_again_wants_that_alone(harnesss: Callable[..., Harness]) -> None:
    harness = harnesss()
    harness.queue("r", WANTED)
    harness.queue("r", WANTED[:1], first_page=20)
    assert harness.num_held() == [1]
    assert harness.loading.finish(harness.loading.begin())
    assert harness.has(WANTED[:1], first_page=20)
    assert not harness.has(WANTED[:1])


def test_requests_of_a_batch_are_one_load_of_each_pool(harnesss: Callable[..., Harness]) -> None:
    harness = harnesss(Name.KV, Name.SWA)
    harness.queue("r", WANTED)
    harness.queue("s", WANTED[::-1], first_page=20)  # the same pages of host memory
    index = harness.loading.begin()
    assert len(list(harness.loading.jobs())) == 2
    assert harness.loading.finish(index)
    assert harness.has(WANTED)
    assert harness.has(WANTED[::-1], first_page=20)
    assert harness.num_held() == [0, 0]


def test_pages_that_have_left_are_told_of_at_the_end_of_that_batch_alone(
    harnesss: Callable[..., Harness], caplog: pytest.LogCaptureFixture
) -> None:
    """Until then this rank goes on like the others, which have the pages."""
    harness = harnesss()
    assert harness.pools[Name.KV].places(99) == [BlockState.NOWHERE]
    harness.queue("r", [*WANTED, 99])
    assert "its request fails rid=r" in caplog.text
    index = harness.loading.begin()
    assert index >= 0
    assert not harness.loading.finish(index)
    harness.queue("s", WANTED)
    later = harness.loading.begin()
    assert later > index
    assert harness.loading.finish(later)


def test_batch_that_cant_begin_is_told_of_at_its_end(harnesss: Callable[..., Harness]) -> None:
    harness = harnesss()
    harness.queue("r", WANTED)
    harness.fails = RuntimeError("no stream")
    index = harness.loading.begin()
    assert index >= 0
    assert harness.num_held() == [0]
    harness.loading.set_consumer(index)
    harness.loading.wait_until(0)  # for nothing
    assert not harness.loading.finish(index)


def test_forward_finds_each_layer_that_it_has_waited_for(harnesss: Callable[..., Harness]) -> None:
    harness = harnesss()
    harness.queue("r", WANTED)
    index = harness.loading.begin()
    harness.loading.set_consumer(index)
    for layer in range(len(ENDS)):
        harness.loading.wait_until(layer)
    assert harness.has(WANTED), "before the batch is finished"
    assert harness.loading.finish(index)


def test_batch_that_nobody_knows_is_finished(harnesss: Callable[..., Harness]) -> None:
    harness = harnesss()
    harness.queue("r", WANTED)
    index = harness.loading.begin()
    assert harness.loading.finish(index)
    assert harness.loading.finish(index), "SGLang asks of batches that a reset has finished, too"


def test_forwards_that_wait_are_told_of_once(harnesss: Callable[..., Harness]) -> None:
    harness = harnesss()
    assert not harness.loading.take_waits()
    harness.queue("r", WANTED)
    assert not harness.loading.take_waits()
    index = harness.loading.begin()
    assert harness.loading.take_waits()
    assert harness.loading.take_waits(), "it is not over"
    harness.loading.finish(index)
    assert harness.loading.take_waits()
    assert not harness.loading.take_waits()


def test_nothing_is_held_after_a_reset(harnesss: Callable[..., Harness]) -> None:
    harness = harnesss()
    harness.queue("r", WANTED)
    harness.loading.begin()
    harness.queue("s", WANTED)
    harness.promise(*WANTED)
    harness.loading.reset()
    assert harness.num_held() == [0]
    assert list(harness.loading.jobs()) == []
    assert harness.loading.begin() == -1


def test_what_was_promised_is_forgotten_with_the_caches(harnesss: Callable[..., Harness]) -> None:
    harness = harnesss()
    harness.promise(*WANTED)
    harness.loading.forget_promised()
    harness.pools[Name.KV].pool.clear()
    assert harness.pools[Name.KV].keep(*WANTED)  # again, by the same names
    harness.queue("r", WANTED)
    assert harness.num_held() == [len(WANTED)]
