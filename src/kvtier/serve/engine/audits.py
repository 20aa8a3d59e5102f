"""Audits of the engine's hits, in idle moments: one chunk of a hit is computed again and compared.

The chunk is computed on the grid, alone, upon the cached KV before it: in the same shapes as when
it was computed first, so equal bits are expected. Its KV goes to free slots of the device, and is
compared there with what the request's lease holds.

A hit is audited while its request decodes, or at its end: the lease is held until the step is over.
If other requests wait or compute their prompts then, the audit is skipped and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.cache.audit import (
    CAP,
    COMPARED,
    ELSEWHERE,
    AuditedPiece,
    Auditor,
    AuditOutcome,
    ComputedBlocks,
    Distances,
)
from kvtier.cache.lease import Lease
from kvtier.cache.states.stateful import StatefulCache
from kvtier.cache.tokens import Cache
from kvtier.core.types import DEVICE, BlockId, Slot
from kvtier.serve.engine.config import EngineInfo
from kvtier.serve.engine.request import Request
from kvtier.serve.engine.runner import Runner
from kvtier.tiers.row import lossy_codec

logger = logging.getLogger(__name__)

NEAR = 16
"""Last chunks of a hit among which an audit looks for states on the device."""


class Audits:
    """Hits that were chosen, until they are audited. Owned by the engine thread.

    Args:
        auditor: chooses and judges.
        cache, runner, info: the engine's.
        on_difference: called at the end of a step in which a difference was found.
    """

    def __init__(
        self,
        auditor: Auditor,
        cache: Cache,
        runner: Runner,
        info: EngineInfo,
        on_difference: Callable[[], None],
    ) -> None:
        self._auditor = auditor
        self._cache = cache
        self._runner = runner
        self._info = info
        self._on_difference = on_difference
        self._here, self._elsewhere = 0.0, ELSEWHERE[info.dtype]
        if cache.config.locations:
            self._here = self._elsewhere  # another process may replace what this one has stored
        if lossy_codec(cache.config.coding, cache.config.stores):
            self._here = self._elsewhere = CAP  # KV that passed through such a store is not exact
        self._chosen: dict[Request, Lease] = {}
        self._is_wrong = False
        self.written = ComputedBlocks()
        if auditor.share:
            cache.on_twins = self.compare_twins

    @property
    def follows(self) -> bool:
        """Whether to note what this process computes, from which it follows who wrote a block."""
        return self._auditor.share > 0

    def choose(self, request: Request) -> None:
        """Draw whether to audit a request whose prefill has ended, unless it asks for it."""
        if request.num_cached and (request.wants_audit or self._auditor.chooses()):
            assert request.lease is not None
            self._chosen[request] = request.lease

    def has_ended(self, request: Request, is_complete: bool) -> bool:
        """Whether the lease of a request that ends is held until the end of the step.

        is_complete: whether it got its whole answer.
        """
        if request not in self._chosen:
            return False
        if is_complete and request.hint is None:  # hints move its blocks, which must be released
            return True
        self._skip(request)
        return False

    def audit(self, request: Request) -> None:
        """Audit a request now, if it was chosen. A failure is logged, and fails no request."""
        try:
            if request in self._chosen:
                self._audit(request, self._chosen[request])
        except Exception:  # any type: models raise their own
            logger.exception("audit failed")
            self._chosen.pop(request, None)

    def _audit(self, request: Request, lease: Lease) -> None:
        states = partial(self._cache.state_slots, lease)
        with self._cache.scratch(self._runner.num_scratch) as slots:
            if slots is None:
                self._skip(request)
                return
            del self._chosen[request]
            start, size = self._start(request, lease, states), self._info.block_size
            tokens, first = request.prompt[start : start + self._info.chunk_tokens], start // size
            distances = self._runner.recompute(tokens, lease, start, slots, states)
        assert lease.decision is not None, "it found something"
        tiers = lease.decision.match.tiers[first:]
        outcome = self._judge(distances, lease.namespace, first, lease.blocks[first:], tiers)
        said = outcome.value.replace("_", " ")
        last = start + len(tokens) - 1
        request.audit = f"tokens {start:,}-{last:,} were {COMPARED}: {said}"

    def _start(
        self, request: Request, lease: Lease, states: Callable[[int], Sequence[Slot] | None]
    ) -> int:
        """Return the first token of a chunk among the cached tokens, each with the same chance.

        Of models with windows or recurrent layers, the first one, and of the last ``NEAR`` those
        that have a state before them on the device: loading one would move bytes for it alone.
        """
        size = self._info.chunk_tokens
        grain = size // self._info.block_size
        computed = {chunk.start // grain for chunk in lease.claimed}
        num = request.num_cached // size + len(computed)
        chunks: Sequence[int] = [at for at in range(num) if at not in computed]
        if isinstance(self._cache, StatefulCache):
            near = chunks[max(1, num - NEAR) :]
            chunks = [0, *(at for at in near if states(at * grain) is not None)]
        return size * chunks[self._auditor.piece(len(chunks))]

    def compare_twins(
        self,
        lease: Lease,
        blocks: Sequence[BlockId],
        found: Sequence[Slot],
        recomputed: Sequence[Slot],
    ) -> None:
        """Compare blocks that were on the device with what a request has computed of them, too.

        For instance a prompt of whole chunks is repeated: its last token is always computed. Such
        audits cost no forward, but time before the first token: the share of hits applies to them,
        too.

        blocks: those behind the lease's prefix, in the slots ``found``.
        """
        if not self._auditor.chooses():
            return
        pairs = zip(found, recomputed, strict=False)
        twins = [at for at, (ours, theirs) in enumerate(pairs) if ours != theirs]
        first, end = twins[0], twins[-1] + 1
        try:
            distances = self._runner.distances(found[first:end], recomputed[first:end])
        except Exception:  # any type: models raise their own
            logger.exception("audit failed")
            return
        tiers = (DEVICE,) * (end - first)
        position = len(lease.blocks) + first
        self._judge(distances, lease.namespace, position, blocks[first:end], tiers)

    def _judge(
        self,
        distances: Distances,
        namespace: bytes,
        first: int,
        blocks: Sequence[BlockId],
        tiers: Sequence[str],
    ) -> AuditOutcome:
        """Judge distances of consecutive blocks. first: position of the first one in the prompt."""
        size = self._info.block_size
        worst = int(distances.max((0, 1)).argmax()) // size
        age_s = self.written.age_s(blocks[worst])
        piece = AuditedPiece(
            tiers[worst],
            namespace,
            first * size,
            self._elsewhere if age_s is None else self._here,
            age_s,
            self._runner.has_first_layer,
            size,
        )
        outcome = self._auditor.judge(distances, piece)
        self._is_wrong |= outcome is AuditOutcome.DIFFERENT
        return outcome

    def step(self, is_idle: bool) -> None:
        """Audit, at the end of a step, the requests that ended in it, or else one that decodes.

        is_idle: whether no request waits, loads or computes its prompt.
        """
        ended = [request for request in self._chosen if request.lease is None]
        leases = [self._chosen[request] for request in ended]
        for request in ended or [*self._chosen][:1]:
            if is_idle:
                self.audit(request)
            elif request in ended:
                self._skip(request)
        for lease in leases:
            self._cache.release(lease)
        if self._is_wrong:
            self._is_wrong = False
            self._on_difference()

    def _skip(self, request: Request) -> None:
        lease = self._chosen.pop(request)
        assert lease.decision is not None, "it found something"
        self._auditor.skip(lease.decision.match.tiers[0])
