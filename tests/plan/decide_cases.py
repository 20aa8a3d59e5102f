"""Cases of load, wait or compute, and of waits: tables for the functions and for each connector.

Blocks of a prompt are letters, in prompt order:

    D  the device has it          M  in memory             S  in storage
    A  on its way to memory       U  of unknown location   .  nowhere
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.plan.decide import WaitState

BLOCK_TOKENS = 16
PREFILL_S = 0.016
"""Seconds to compute a block."""


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and what becomes of it.

    load_s, promote_s: seconds to load a block from memory, and to promote one from storage.
    computes_s: seconds to compute a block; None if prefill was not measured. waited_s: how long the
    request has waited when it is looked up. has_failed: reads from storage fail.

    loads: blocks that are loaded now, those of the device not counted. waits_for: blocks that are
    there when the wait has ended, if it waits; 0 if it does not.
    """

    name: str
    blocks: str
    loads: int = 0
    waits_for: int = 0
    load_s: float = 0.001
    promote_s: float = 0.001
    computes_s: float | None = PREFILL_S
    waited_s: float = 0.0
    always_loads: bool = False
    has_failed: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def num_device(self) -> int:
        return self.blocks.count("D")

    @property
    def behind(self) -> str:
        """Return the blocks behind those on the device."""
        return self.blocks.lstrip("D")

    @property
    def num_found(self) -> int:
        return len(self.behind.rstrip("."))


CASES = [
    Case("all in memory", "MMMM", loads=4),
    Case("memory slower than computing", "MMMM", load_s=1.0),
    Case("memory slower, always loads", "MMMM", loads=4, load_s=1.0, always_loads=True),
    Case("nothing is there", "...."),
    Case("a prefix is in memory", "MM..", loads=2),
    Case("behind what the device has", "DDMM", loads=2),
    Case("prefill is not measured", "MMMM", loads=4, load_s=1.0, computes_s=None),
    Case("all in storage", "SSSS", waits_for=4),
    Case("storage behind the device", "DDSS", waits_for=2),
    Case("storage, then nothing", "SS..", waits_for=2),
    Case("storage slower than computing", "SSSS", promote_s=1.0),
    Case("storage slower, always loads", "SSSS", waits_for=4, promote_s=0.1, always_loads=True),
    Case("storage behind memory", "MMSS", loads=2, waits_for=4),
    Case("slow storage behind memory", "MMSS", loads=2, promote_s=1.0),
    Case("arriving behind memory", "MMAA", loads=2, waits_for=4),
    Case("arriving, slower than computing", "AAAA", load_s=1.0),
    Case("arriving, then storage", "AASS", waits_for=4),
    Case("in storage, waited half", "SSSS", waits_for=4, waited_s=2 * PREFILL_S),
    Case("in storage, waited too long", "SSSS", waited_s=5 * PREFILL_S),
    Case("waited too long behind memory", "MMSS", loads=2, waited_s=5 * PREFILL_S),
    Case("waited long, prefill is not measured", "SS", waits_for=2, waited_s=5.0, computes_s=None),
    Case("waited too long, always loads", "MS", loads=1, waited_s=1.0, always_loads=True),
    Case("a read failed", "SS", has_failed=True),
    Case("a read failed behind memory", "MS", loads=1, has_failed=True),
    Case("unknown", "UUUU", waits_for=4),
    Case("unknown behind memory", "MMUU", loads=2, waits_for=4),
    Case("unknown, slow even from memory", "UUUU", load_s=1.0),
    Case("unknown behind storage", "SSUU", waits_for=4),
    Case("unknown, waited too long", "MMUU", loads=2, waited_s=5 * PREFILL_S),
    Case("unknown behind slow storage", "SSUU", promote_s=1.0),
]


@dataclass(frozen=True, slots=True)
class WaitCase:
    """A request that waits, and what it waits for after something has happened.

    blocks: as in ``Case``: it waits for reads (S) or for the answer of a store (U).
    happens: in this order: reads end (r) or fail (f), the store answers (a), its time is up (t).
    """

    name: str
    blocks: str
    happens: str
    state: WaitState

    def __str__(self) -> str:
        return self.name

    @property
    def case(self) -> Case:
        return Case(self.name, self.blocks)


WAITS = [
    WaitCase("reads", "SS", "", WaitState.READS),
    WaitCase("reads behind memory", "MS", "", WaitState.READS),
    WaitCase("reads have ended", "SS", "r", WaitState.OVER),
    WaitCase("a read has failed", "SS", "f", WaitState.OVER),
    WaitCase("too long for reads", "SS", "t", WaitState.OVER),
    WaitCase("an answer", "UU", "", WaitState.ANSWERS),
    WaitCase("the answer is there", "UU", "a", WaitState.OVER),
    WaitCase("too long for an answer", "UU", "t", WaitState.OVER),
    WaitCase("reads and an answer", "SU", "", WaitState.ANSWERS),
    WaitCase("reads have ended before the answer", "SU", "r", WaitState.ANSWERS),
    WaitCase("the answer is there before reads have ended", "SU", "a", WaitState.OVER),
    WaitCase("both are there", "SU", "ra", WaitState.OVER),
]
