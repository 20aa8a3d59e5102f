"""The seam of policies in a tier of a running cache: the twin of ``native/policy/live.hpp``, which
says what each call means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol

from kvtier._reference.lfuda import Lfuda
from kvtier._reference.live_queues import LiveQueues
from kvtier._reference.live_runs import LiveRuns, Place
from kvtier._reference.queues import Arc, S3Fifo, Sieve
from kvtier._reference.run_policy import MayLeave
from kvtier._reference.runs import Block
from kvtier.hints import Said

Find = Callable[[int], Block | None]
"""The resident block of a name, if there is one."""


class Live(Protocol):
    """A victim's block has the number that its owner gave it."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_history(self) -> int: ...
    def set_capacity(self, capacity: int) -> None: ...
    def asked(self, path: Sequence[int], found: Sequence[Block], now: float) -> None: ...
    def continues(self, names: Sequence[int], before: int) -> None: ...
    def retain(
        self, path: Sequence[int], found: Sequence[Block], said: Said, now: float
    ) -> None: ...
    def set_doubling(self, doubles_at_blocks: float) -> None: ...
    def admit(
        self, names: Sequence[int], num_free: int, least_chance: float = 0.0
    ) -> list[int]: ...
    def entered(
        self, name: int, item: int, place: Place | None, behind: Block | None = None
    ) -> Block: ...
    def let_go(self, block: Block) -> None: ...
    def begin_evicting(self) -> None: ...
    def next_victim(self) -> Block | None: ...
    def left(self, block: Block) -> None: ...
    def check_invariants(self) -> None: ...


def _make_runs(capacity: int, seed: int, may_leave: MayLeave, find: Find) -> Live:
    return LiveRuns(capacity, seed, 0.0, may_leave, find)


def _make_queues(
    make: type[Arc | Lfuda | S3Fifo | Sieve],
    capacity: int,
    seed: int,
    may_leave: MayLeave,
    find: Find,
) -> Live:
    return LiveQueues(make(capacity), capacity, may_leave, find)


LIVE: Mapping[str, Callable[[int, int, MayLeave, Find], Live]] = MappingProxyType(
    {
        "runs": _make_runs,
        "arc": partial(_make_queues, Arc),
        "s3fifo": partial(_make_queues, S3Fifo),
        "lfuda": partial(_make_queues, Lfuda),
        "sieve": partial(_make_queues, Sieve),
    }
)
"""By name: makes one of (capacity, seed, may_leave, find)."""
