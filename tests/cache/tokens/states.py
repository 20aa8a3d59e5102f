"""Arrangements for caches of models with states: snapshots, or the cells of windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.testing import StoredBlocks
from tests.cache.tokens.harness import A, Harness, Request, until

Kind = TypeVar("Kind", bound=Harness)
LONG = [*A, *[4] * 16, 9]
"""Twelve blocks, and a token left to compute."""


def made_of(kind: Callable[..., Kind], **sizes: int) -> Iterator[Callable[..., Kind]]:
    """Yield a function that makes harnesses; each is closed and checked at the end."""
    made: list[Kind] = []

    def make(*args: Any, **given: Any) -> Kind:
        made.append(kind(*args, **sizes | given))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


def hits(request: Request) -> dict[str, int]:
    return request.lease.record.hit_blocks


def check_deletion(make: Callable[..., Harness], num_stored: int) -> None:
    """Delete ``LONG`` in a cache that has served it, and in one that finds it in storage.

    num_stored: stored blocks of the prompt and its states.
    """
    shelf = StoredBlocks()
    before = make(shelf=shelf)
    before.serve(LONG)
    until(before, lambda: len(shelf.blocks) == num_stored)
    labels = before.start(LONG)
    before.release(labels)
    for harness in (before, make(shelf=shelf.copy())):
        deletion = harness.cache.delete(labels.namespace, labels.labels)
        until(harness, lambda: harness.cache.is_deleted(deletion))  # noqa: B023
        assert not harness.shelf.blocks
        assert [harness.held(tier) for tier in (DEVICE, HOST, DISK)] == [0, 0, 0]


def check_broken_load(make: Callable[..., Harness], shelf: StoredBlocks, spoiled: Any) -> int:
    """Check that a damaged block of a state breaks the lease. Return what is reused afterwards.

    spoiled: key of the block.
    """
    harness = make(shelf=shelf.copy())
    assert harness.storage is not None
    harness.storage.spoiled.add(spoiled)
    request = harness.start(LONG)
    assert request.lease.broken
    harness.release(request)
    again = harness.start(LONG)
    num_shared = again.lease.num_shared
    harness.finish(again)
    return num_shared
