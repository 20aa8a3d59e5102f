"""A plan as values: printable, comparable, replayable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.types import BlockId

MAX_COMPARED = 32
"""Maximum number of cuts that a plan keeps: a fragmented prompt has thousands."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a group's part of ``blocks`` from tier ``src`` to tier ``dst``, in prompt order."""

    src: str
    dst: str
    blocks: Sequence[BlockId]
    group: int = 0

    def __str__(self) -> str:
        of_group = f" of group {self.group}" if self.group else ""
        return f"{self.src} -> {self.dst}: {len(self.blocks)} blocks{of_group}"


@dataclass(frozen=True, slots=True)
class Cut:
    """A length up to which a prompt could be reused, and its expected cost.

    load_s: to load what is not on the device.
    recompute_s: to compute the rest.
    """

    num_blocks: int
    load_s: float
    recompute_s: float

    @property
    def seconds(self) -> float:
        return self.load_s + self.recompute_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one request: its operations and their expected cost.

    copies: to be run in this order.
    num_reused_blocks: the cut. Up to it every group has what it needs on the device when all copies
    succeed; prefill starts after it.
    load_s, recompute_s: estimated seconds of the copies, and of the prefill of the rest.
    all_recompute_s: estimated seconds of the prefill without any reuse.
    compared: the cuts that were compared, shortest first, without the empty one; at most
    ``MAX_COMPARED``, evenly spread.
    num_declined_blocks: usable blocks after the cut.
    from_both_ends: the copies are of one chunk each, the last one first, so that the engine may
    compute chunks from the front meanwhile.
    num_claimed_blocks: blocks before the cut that it is expected to compute so. They are copied
    only if the load gets there first.
    overlap_s: estimated seconds for which ``load_s`` and ``recompute_s`` overlap then.
    """

    copies: tuple[Copy, ...] = ()
    num_reused_blocks: int = 0
    load_s: float = 0.0
    recompute_s: float = 0.0
    all_recompute_s: float = 0.0
    compared: tuple[Cut, ...] = ()
    num_declined_blocks: int = 0
    from_both_ends: bool = False
    num_claimed_blocks: int = 0
    overlap_s: float = 0.0

    @property
    def num_copied_blocks(self) -> int:
        """Number of copied blocks; a block counts once per group."""
        return sum(len(copy.blocks) for copy in self.copies)

    @property
    def seconds(self) -> float:
        """Estimated seconds until the whole prompt is on the device."""
        return self.load_s + self.recompute_s - self.overlap_s

    def __str__(self) -> str:
        steps = "; ".join(map(str, self.copies)) or "nothing to copy"
        overlap = f", {self.overlap_s * 1e3:.2f} ms of it together" if self.overlap_s else ""
        return (
            f"reuse {self.num_reused_blocks} blocks ({steps}), load {self.load_s * 1e3:.2f} ms + "
            f"prefill {self.recompute_s * 1e3:.2f} ms{overlap}, "
            f"without cache {self.all_recompute_s * 1e3:.2f} ms"
        )
