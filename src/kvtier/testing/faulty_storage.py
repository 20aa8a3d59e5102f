"""Storage wrapper with fault injection."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import Enum, auto
from threading import Event, Lock

from kvtier.core.types import BlockKey, BlockName
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome, StorageTier
from kvtier.tiers.wrappers.wrapper import StorageWrapper

CALLS = ("find", "put", "get", "drop")


class _Fault(Enum):
    FAIL = auto()
    REFUSE = auto()
    LOSE = auto()
    HANG = auto()
    FLIP = auto()
    SHORTEN = auto()
    CRASH = auto()


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
        self._faults: dict[tuple[str, int], _Fault] = {}
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
        self._plan(call, nth, _Fault.FAIL)

    def refuse(self, call: str, nth: int = 1) -> None:
        """Make the ``nth`` call from now do nothing, and return ``FAILED`` for all blocks."""
        self._plan(call, nth, _Fault.REFUSE)

    def lose(self, call: str, nth: int = 1) -> None:
        """Make the ``nth`` call from now succeed, but return ``FAILED``."""
        self._plan(call, nth, _Fault.LOSE)

    def hang(self, call: str, nth: int = 1) -> None:
        """Make the ``nth`` call from now hang until ``release``, then return ``FAILED``."""
        self._hanging.clear()
        self._plan(call, nth, _Fault.HANG)

    def flip(self, nth: int = 1) -> None:
        """Make the ``nth`` get from now read a wrong byte in its first block, and detect it."""
        self._plan("get", nth, _Fault.FLIP)

    def shorten(self, nth: int = 1) -> None:
        """Make the ``nth`` get from now read half of its last block, and garbage after that."""
        self._plan("get", nth, _Fault.SHORTEN)

    def crash(self, nth: int = 1) -> None:
        """Make the ``nth`` put from now write half of its blocks, and then crash.

        That call, and all later calls, raise ``OSError``.
        """
        self._plan("put", nth, _Fault.CRASH)

    def forget_faults(self) -> None:
        """Cancel all faults that have not happened yet."""
        with self._lock:
            self._faults.clear()

    # -- the storage -------------------------------------------------------------------------------

    def find(self, keys: Sequence[BlockKey], timeout_s: float) -> list[Outcome]:
        return self._run("find", len(keys), lambda: self.inner.find(keys, timeout_s))[1]

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        fault, outcomes = self._run(
            "put", len(names), lambda: self.inner.put(names, blocks, timeout_s)
        )
        if fault is _Fault.CRASH:
            half = slice(len(names) // 2)
            self.inner.put(names[half], blocks.pick(half), timeout_s)
            self.is_dead = True
            self._raise("put")
        return outcomes

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        fault, outcomes = self._run(
            "get", len(keys), lambda: self.inner.get(keys, blocks, timeout_s)
        )
        if fault is _Fault.FLIP:
            address = int(blocks.addresses[0, 0])
            ctypes.c_uint8.from_address(address).value ^= 0x01
            self.inner.drop(keys[:1], for_good=True)
            outcomes[0] = Outcome.DAMAGED
        elif fault is _Fault.SHORTEN:
            half = blocks.pick(slice(-1, None)).part(
                self.bytes_per_block // 2, self.bytes_per_block
            )
            half.write(0, b"\xee" * half.block_bytes)
            outcomes[-1] = Outcome.FAILED
        return outcomes

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        def drop() -> list[Outcome]:
            self.inner.drop(keys, for_good)
            return []

        self._run("drop", 0, drop)

    # -- faults ------------------------------------------------------------------------------------

    def _plan(self, call: str, nth: int, fault: _Fault) -> None:
        with self._lock:
            self._faults[call, self.num_calls[call] + nth] = fault

    def _run(
        self, call: str, num_blocks: int, work: Callable[[], list[Outcome]]
    ) -> tuple[_Fault | None, list[Outcome]]:
        """Run ``work``, or cause the planned fault. Return the fault, if any, and the outcomes.

        For ``CRASH`` it does nothing; the caller handles that fault.
        """
        self._gates[call].wait()
        with self._lock:
            self.num_calls[call] += 1
            fault = self._faults.pop((call, self.num_calls[call]), None)
        failed = [Outcome.FAILED] * num_blocks
        if self.is_dead or fault is _Fault.FAIL:
            self._raise(call)
        if fault is _Fault.HANG:
            self._hanging.wait()
        if fault in (_Fault.HANG, _Fault.REFUSE, _Fault.CRASH):
            return fault, failed
        outcomes = work()
        return fault, failed if fault is _Fault.LOSE else outcomes

    def _raise(self, call: str) -> None:
        reason = "its process has ended" if self.is_dead else "the test wants it"
        raise OSError(f"{call} of the {self.name} tier failed: {reason}")
