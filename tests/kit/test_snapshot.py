"""A snapshot differs as soon as anything in an object does."""

from __future__ import annotations

from itertools import count

import pytest

from kvtier.core.types import HOST
from kvtier.observe.specs import REFUSED_BLOCKS
from tests.cache.keyed_harness import KEYS, Engine
from tests.kit.snapshot import snapshot


def test_nothing_happened() -> None:
    engine = Engine()
    engine.store(KEYS[:3])
    assert snapshot(engine) == snapshot(engine)


@pytest.mark.parametrize("change", ["use", "ask the clock", "count", "take a slot", "promise"])
def test_something_happened(change: str) -> None:
    ticks = count()
    engine = Engine(clock=lambda: float(next(ticks)))
    engine.store(KEYS[:3])
    before = snapshot(engine)
    match change:
        case "use":
            found = engine.index.find(KEYS[0])
            assert found is not None
            engine.index.touch([found[0]], 1.0)
        case "ask the clock":
            next(ticks)
        case "count":
            engine.ladder.metrics.count(REFUSED_BLOCKS, 1, tier=HOST)
        case "take a slot":
            engine.host.allocate(1)
        case "promise":
            engine.ladder._storage_lookup._late.add("store")
    assert snapshot(engine) != before
