"""Load or recompute, and how long to wait, from what both took so far."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.plan.cost import CostModel, Costs
from kvtier.plan.planner import plan_load
from kvtier.types import DEVICE, DISK, HOST, BlockId, LoadPolicy, Match

TIERS = (DEVICE, HOST, DISK)
TO_HOST = (DISK, HOST)
TO_DEVICE = (HOST, DEVICE)

MAX_PATIENCE_S = 10.0
"""While nothing is known about prefill yet."""
MAX_CUTS = 64
"""Places at which a prompt may be cut: with thousands of chunks, several of them go together."""
MIN_STEP_TOKENS = 32
"""A step that computes fewer tokens says little about prefill."""


class Judge:
    """Learns from every copy and every step of the engine. Time is an argument.

    tokens_per_chunk, chunk_bytes: of the largest group, on one rank.
    """

    def __init__(self, policy: LoadPolicy, tokens_per_chunk: int, chunk_bytes: int) -> None:
        self.costs = CostModel()
        self._policy = policy
        self._tokens_per_chunk = tokens_per_chunk
        self._chunk_bytes = chunk_bytes
        self._steps: dict[int, tuple[float, int, int]] = {}
        self._num_steps = 0
        self._last_end_s = 0.0

    # -- what it learns ----------------------------------------------------------------------------

    def begin_step(self, now_s: float, pieces: Sequence[tuple[int, int]]) -> int | None:
        """The engine is about to compute. pieces: per prompt the tokens before, and those to
        compute. A number, if it should be told when this step has ended."""
        num_tokens = sum(num for _, num in pieces)
        if num_tokens < MIN_STEP_TOKENS:
            return None
        self._num_steps += 1
        num_before = sum(before * num for before, num in pieces) // num_tokens
        self._steps[self._num_steps] = (now_s, num_before, num_tokens)
        return self._num_steps

    def end_step(self, step: int, now_s: float) -> None:
        """A step has ended. Of two that overlap the second one began when the first had ended."""
        began = self._steps.pop(step, None)
        if began is not None:
            start_s, num_before, num_tokens = began
            took_s = now_s - max(start_s, self._last_end_s)
            self.costs.observe_prefill(num_before, num_tokens, took_s)
        self._last_end_s = now_s

    def observe_loads(self, sizes: Sequence[float], seconds: float) -> None:
        """Copies to the device, of so many bytes each, took so long together."""
        total = sum(sizes)
        for size in sizes if total else ():
            self.costs.observe_copy(TO_DEVICE, int(size), seconds * size / total)

    # -- what it says ------------------------------------------------------------------------------

    def num_worth_loading(
        self, tiers: Sequence[str], num_tokens: int, num_staging: int, queued_bytes: int = 0
    ) -> int:
        """How many of the first chunks of a prompt to load rather than compute.

        tiers: of each chunk, from the prompt's start; those on the device cost nothing.
        num_tokens: of the prompt. num_staging: host slots that could be had. queued_bytes: that
        stand in line at the disk.
        """
        if self._policy is LoadPolicy.ALWAYS:
            return len(tiers)
        width = -(-len(tiers) // MAX_CUTS) or 1
        wide = [max(tiers[at : at + width], key=TIERS.index) for at in range(0, len(tiers), width)]
        plan = plan_load(
            Match(tuple(map(BlockId, range(len(wide)))), tuple(wide), (False,) * len(wide), 0),
            self._costs(queued_bytes),
            # A hit of the whole prompt counts as one: the engine computes its last token again.
            num_tokens=max(num_tokens, len(wide) * width * self._tokens_per_chunk) + 1,
            block_size=self._tokens_per_chunk * width,
            bytes_per_block=self._chunk_bytes * width,
            num_free_slots=len(wide),
            num_staging_slots=num_staging // width,
        )
        return min(len(tiers), plan.num_reused_blocks * width)

    def is_worth_loading(
        self, num_chunks: dict[str, int], first: int, end: int, queued_bytes: int = 0
    ) -> bool:
        """Whether to load chunks of several groups, by tier, rather than compute the tokens from
        ``first`` up to ``end``."""
        if self._policy is LoadPolicy.ALWAYS:
            return True
        costs = self._costs(queued_bytes)
        num_bytes = {tier: num * self._chunk_bytes for tier, num in num_chunks.items()}
        return costs.load_s(num_bytes) <= costs.prefill_s(first, end)

    def patience_s(self, first: int, end: int) -> float:
        """How long a prompt may wait for the KV of its tokens from ``first`` up to ``end``: no
        longer than computing them would take."""
        return min(MAX_PATIENCE_S, self._costs().prefill_s(first, end))

    def _costs(self, queued_bytes: int = 0) -> Costs:
        costs = self.costs.snapshot(tiers=TIERS)
        if not queued_bytes:
            return costs
        queued = {TO_HOST: costs.copy_s(TO_HOST, queued_bytes)}
        return self.costs.snapshot(queued, TIERS)
