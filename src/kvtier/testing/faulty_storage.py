"""Storage wrapper with fault injection."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import Any, NoReturn

from kvtier.core.types import BlockKey, BlockName
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome, StorageTier
from kvtier.tiers.wrappers.wrapper import StorageWrapper

CALLS = ("find", "put", "get", "drop")

Fault = Callable[..., list[Outcome]]
"""Takes the place of a call, with its arguments."""


class FaultyStorage(StorageWrapper):
    """Storage wrapper that injects faults into the calls "find", "put", "get" and "drop".

    With ``hold`` and ``release`` a test decides when calls run, so it needs no sleeps.

    num_calls: number of calls of each kind so far. is_dead: whether a ``crash`` has happened.
    """

    def __init__(self, inner: StorageTier) -> None:
        super().__init__(inner)
        self.num_calls = dict.fromkeys(CALLS, 0)
        self.is_dead = False
        self._gates = {call: Event() for call in CALLS}
        self._hanging = Event()
        self._lock = Lock()
        self._faults: dict[tuple[str, int], Fault] = {}
        self.release()

    # -- control by tests --------------------------------------------------------------------------

    def hold(self, *calls: str) -> None:
        """Make these calls (default: all) wait until ``release``, like a slow storage."""
        for call in calls or CALLS:
            self._gates[call].clear()

    def release(self, *calls: str) -> None:
        """Let these calls (default: all) run again, and release hanging ones."""
        for call in calls or CALLS:
            self._gates[call].set()
        self._hanging.set()

    def fail(self, call: str, nth: int = 1) -> None:
        """Make the ``nth`` call from now raise ``OSError`` and do nothing."""
        self._plan(call, nth, lambda *_: self._raise(call))

    def refuse(self, call: str, nth: int = 1) -> None:
        """Make the ``nth`` call from now do nothing, and return ``FAILED`` for all blocks."""
        self._plan(call, nth, lambda keys, *_: [Outcome.FAILED] * len(keys))

    def lose(self, call: str, nth: int = 1) -> None:
        """Make the ``nth`` call from now succeed, but return ``FAILED``."""

        def lose(keys: Sequence[object], *rest: Any) -> list[Outcome]:
            getattr(self.inner, call)(keys, *rest)
            return [Outcome.FAILED] * len(keys)

        self._plan(call, nth, lose)

    def hang(self, call: str, nth: int = 1) -> None:
        """Make the ``nth`` call from now hang until ``release``, then return ``FAILED``."""

        def hang(keys: Sequence[object], *_: Any) -> list[Outcome]:
            self._hanging.wait()
            return [Outcome.FAILED] * len(keys)

        self._hanging.clear()
        self._plan(call, nth, hang)

    def flip(self, nth: int = 1) -> None:
        """Make the ``nth`` get from now read a wrong byte in its first block, and detect it."""

        def flip(keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
            outcomes = self.inner.get(keys, blocks, timeout_s)
            ctypes.c_uint8.from_address(int(blocks.addresses[0, 0])).value ^= 0x01
            self.inner.drop(keys[:1], for_good=True)
            return [Outcome.DAMAGED, *outcomes[1:]]

        self._plan("get", nth, flip)

    def shorten(self, nth: int = 1) -> None:
        """Make the ``nth`` get from now read half of its last block, and garbage after that."""

        def shorten(keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
            outcomes = self.inner.get(keys, blocks, timeout_s)
            num_bytes = self.bytes_per_block
            half = blocks.pick(slice(-1, None)).part(num_bytes // 2, num_bytes)
            half.write(0, b"\xee" * half.block_bytes)
            return [*outcomes[:-1], Outcome.FAILED]

        self._plan("get", nth, shorten)

    def crash(self, nth: int = 1) -> None:
        """Make the ``nth`` put from now write half of its blocks, and then crash.

        That call, and all later calls, raise ``OSError``.
        """

        def crash(names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
            half = slice(len(names) // 2)
            self.inner.put(names[half], blocks.pick(half), timeout_s)
            self.is_dead = True
            return self._raise("put")

        self._plan("put", nth, crash)

    def forget_faults(self) -> None:
        """Cancel all faults that have not happened yet."""
        with self._lock:
            self._faults.clear()

    # -- the storage -------------------------------------------------------------------------------

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        return self._run("find", keys, timeout_s)

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return self._run("put", names, blocks, timeout_s)

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        return self._run("get", keys, blocks, timeout_s)

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        self._run("drop", keys, for_good)

    # -- faults ------------------------------------------------------------------------------------

    def _plan(self, call: str, nth: int, fault: Fault) -> None:
        with self._lock:
            self._faults[call, self.num_calls[call] + nth] = fault

    def _run(self, call: str, *arguments: Any) -> list[Outcome]:
        """Make a call of the wrapped storage, or cause the planned fault in its place."""
        self._gates[call].wait()
        with self._lock:
            self.num_calls[call] += 1
            usual: Fault = getattr(self.inner, call)
            fault = self._faults.pop((call, self.num_calls[call]), usual)
        return self._raise(call) if self.is_dead else fault(*arguments)

    def _raise(self, call: str) -> NoReturn:
        reason = "its process has ended" if self.is_dead else "the test wants it"
        raise OSError(f"{call} of the {self.name} tier failed: {reason}")
