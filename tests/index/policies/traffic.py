"""Request sequences made to be hard for a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Requests = Iterator[tuple[float, Keys]]
"""Seconds, and the keys of a prompt's blocks."""
CAPACITY = 1000
"""Capacity, in blocks, of the tier for which the sequences are made."""


def prompt(number: int, num_blocks: int) -> Keys:
    """Return a prompt that shares nothing with others."""
    return np.arange(num_blocks, dtype=np.uint64) + np.uint64(number << 24)


def scan_flood(chance: np.random.Generator) -> Requests:
    """Twenty prompts are repeated every minute. Long prompts between them are requested once."""
    once = count(1000)
    for now in range(6000):
        yield float(now), prompt(now % 20, 20) if now % 3 == 0 else prompt(next(once), 40)


def loop_over_capacity(chance: np.random.Generator) -> Requests:
    """The same prompts in the same order, a tenth more than fit."""
    for now in range(12_000):
        yield float(now), prompt(now % 110, 10)


def loop_under_capacity(chance: np.random.Generator) -> Requests:
    """The same prompts in the same order, exactly as many as fit."""
    for now in range(12_000):
        yield float(now), prompt(now % 100, 10)


def sudden_change(chance: np.random.Generator) -> Requests:
    """The set of requested prompts changes completely, six times."""
    for now in range(12_000):
        era, place = now // 2000, int(chance.integers(90))
        yield now / 4, prompt(1000 * era + place, 10)


def reversed_habits(chance: np.random.Generator) -> Requests:
    """Alternately, only old prompts are used again, and only the newest ones."""
    for now in range(12_000):
        era, at = divmod(now, 3000)
        if era % 2 == 0:
            yield float(now), prompt(at % 130, 10)
        else:
            yield float(now), prompt(10_000 * era + at - at % 2, 30)


def stack(chance: np.random.Generator) -> Requests:
    """Recently used prompts are used next. LRU is the best policy for this sequence."""
    order = list(range(400))
    for now in range(12_000):
        at = min(int(chance.geometric(0.02)) - 1, len(order) - 1)
        number = order.pop(len(order) - 1 - at)
        order.append(number)
        yield float(now), prompt(number, 10)


def uniform(chance: np.random.Generator) -> Requests:
    """Independent, uniformly drawn prompts: no request is predictable."""
    for now in range(12_000):
        yield float(now), prompt(int(chance.integers(400)), 10)


def one_million_tokens(chance: np.random.Generator) -> Requests:
    """Conversations, and now and then a prompt of 65,536 blocks that is never repeated."""
    for now in range(8000):
        if now % 1000 == 999:
            yield float(now), prompt(100_000 + now, 65_536)
        else:
            yield float(now), prompt(int(chance.zipf(1.2)) % 500, 12)


def tenants(chance: np.random.Generator) -> Requests:
    """Four tenants with a system prompt each; conversations grow by turns.

    The fourth tenant sends as many requests as the others together, and repeats no conversation.
    """
    once = count(1 << 20)
    turns: dict[int, int] = {}
    for now in range(9000):
        tenant = int(chance.choice(4, p=(0.2, 0.2, 0.1, 0.5)))
        shared = prompt(tenant, 8)
        if tenant == 3:
            yield now / 2, np.concatenate([shared, prompt(next(once), 24)])
            continue
        conversation = 100 * (tenant + 1) + int(chance.integers(15)) + now // 600 * 1000
        turns[conversation] = turns.get(conversation, 0) + 1
        yield now / 2, np.concatenate([shared, prompt(conversation, 3 * turns[conversation])])


def same_moment(chance: np.random.Generator) -> Requests:
    """As ``stack``, but no time passes: all ages are 0."""
    for _, keys in stack(chance):
        yield 0.0, keys


def bursts(chance: np.random.Generator) -> Requests:
    """Bursts of a hundred requests, an hour apart."""
    for now in range(9000):
        era = now // 100
        number = int(chance.integers(60)) + 20 * (era % 7)
        yield 3600.0 * era + now % 100 * 0.01, prompt(number, 12)


TRAFFIC: dict[str, Callable[[np.random.Generator], Requests]] = {
    each.__name__: each
    for each in (
        scan_flood,
        loop_over_capacity,
        loop_under_capacity,
        sudden_change,
        reversed_habits,
        stack,
        uniform,
        one_million_tokens,
        tenants,
        same_moment,
        bursts,
    )
}
