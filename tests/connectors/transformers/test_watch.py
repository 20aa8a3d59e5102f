"""Changes that a comparison in columns could miss."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kvtier.connectors.transformers.watch import Watch
from kvtier.connectors.transformers.weights_in_memory import TensorContents

pytestmark = pytest.mark.engine


def watched(*places: Any) -> Watch:
    watch = Watch()
    for place in places:
        if isinstance(place, dict):
            watch.mapping(place)
        elif isinstance(place, list):
            watch.sequence(place)
        else:
            watch.references(partial(list, place))
    watch.freeze()
    return watch


def rename(held: dict[str, object]) -> None:
    """Move the last value to another key."""
    held["other"] = held.pop([*held][-1])


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.update(a=True),  # equals 1
        lambda held: held.update(a=1.0),
        rename,
        lambda held: held.update(c=3),
        lambda held: held.clear(),
    ],
)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_every_change_of_a_dictionary_is_noticed(
    kind: type, change: Callable[[dict[str, object]], None]
) -> None:
    held = kind(a=1, b=2)
    watch = watched({}, held, {})
    assert watch.is_same()
    change(held)
    assert not watch.is_same()


def test_order_and_first_entries_are_noticed() -> None:
    ordered, empty = OrderedDict(a=1, b=2), dict[str, int]()
    watch = watched(ordered, empty)
    ordered.move_to_end("a")
    assert not watch.is_same()
    ordered.move_to_end("b")
    assert watch.is_same()
    empty["a"] = 1
    assert not watch.is_same()


def test_an_object_that_goes_from_one_place_to_the_next_is_noticed() -> None:
    one, next_one = [1, 2], [3]
    watch = watched(one, next_one)
    next_one.insert(0, one.pop())
    assert not watch.is_same()
    small, large = {1, 2}, {3}
    watch = watched(small, large)
    assert watch.is_same()
    small.remove(2)
    large.add(2)
    assert not watch.is_same()


@pytest.mark.parametrize(
    "other",
    [
        lambda data: data.t(),
        lambda data: data.view(torch.int32),
        lambda data: data._neg_view(),
        lambda data: data[:3],
        lambda data: data.clone(),
    ],
)
def test_data_of_another_view_of_the_same_bytes_is_noticed(
    other: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = torch.nn.Parameter(torch.arange(16.0).view(4, 4), requires_grad=False)
    contents = TensorContents({"weight": tensor})
    assert contents.is_same()
    data = tensor.data
    tensor.data = other(data)
    assert not contents.is_same()
    tensor.data = data
    assert contents.is_same()
    tensor.numpy(force=True)[3, 3] += 1
    assert not contents.is_same()
