"""Audits of hits, on the scheduler's side: which blocks vLLM computes although they are cached.

    begin --> vLLM loads what is before the audited blocks, and computes the rest --> take
    take  --> every rank compares its part of the blocks (``recomputed.py``)       --> end

One audit is in flight at a time. Audited are a few neighbouring blocks, from a random one of the
hit on. All of the prompt behind that one is computed, so the price grows with what the hit saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from kvtier.cache.audit import AuditedPiece, Auditor, AuditOutcome, ComputedBlocks
from kvtier.cache.block_cache import BlockCache, BlockState, Held
from kvtier.cache.transfer.ranks import Compared, joined
from kvtier.connectors.common.recomputed import MAX_BLOCKS, BlockJudge
from kvtier.connectors.vllm.shared.adapters import RekeyedRequest
from kvtier.connectors.vllm.shared.key_scope import KeyScope
from kvtier.connectors.vllm.shared.names import VllmNames
from kvtier.connectors.vllm.shared.prompt import GROUP_BYTES, Shape
from kvtier.connectors.vllm.shared.request_state import RequestState
from kvtier.core.types import HOST

HOST_ONLY = bytes(32)
"""Namespace of an engine whose KV is in its own memory only."""


@dataclass(slots=True, eq=False)
class HitAudit:
    """Audit of one hit.

    Attributes:
        state: its request.
        keys: the audited blocks, neighbours in the prompt and of one KV group.
        first: position of their first token in the prompt.
        tier: tier that had them.
        due: blocks that the request has not computed yet.
        held: blocks that the ranks compare now.
        compared: results, of the ranks that have reported.
    """

    state: RequestState
    keys: Sequence[bytes]
    first: int
    tier: str
    due: set[bytes]
    held: set[bytes] = field(default_factory=set)
    compared: dict[bytes, Compared] = field(default_factory=dict)


class HitAudits:
    """Audits of one engine's hits. Used on the scheduler's thread.

    Args:
        share: of hits to audit; 0 for none.
        cache: has the blocks.
        names: names of blocks in storage.
        shape: block sizes of the KV groups.
        has_storage: whether blocks leave this engine's memory.
        is_exact: whether vLLM computes the same bits in any batch.
        requests: the requests that have not finished.
    """

    def __init__(
        self,
        share: float,
        cache: BlockCache,
        names: VllmNames,
        shape: Shape,
        has_storage: bool,
        is_exact: bool,
        requests: Mapping[str, RequestState],
    ) -> None:
        self.auditor = Auditor(share, cache.metrics)
        if share:
            cache.computed = ComputedBlocks()
        self._share = share
        self._cache = cache
        self._names = names
        self._shape = shape
        self._has_storage = has_storage
        self._judge = BlockJudge(self.auditor, is_exact)
        self._requests = requests
        self._current: HitAudit | None = None
        self._considered = WeakSet[RequestState]()

    @property
    def _namespace(self) -> bytes:
        """First name of the namespace; b"" while it is unknown."""
        return self._names.digest if self._has_storage else HOST_ONLY

    def renamed(self, request: Any, scope: KeyScope) -> Any:
        """Return a request of vLLM's with keys of the present name of their namespace."""
        first, *_, name = [self._namespace, *self.auditor.quarantine.names(self._namespace)]
        if self.auditor.quarantine.is_closed(name):
            scope.shared = scope.kept = 0
        return request if name == first else RekeyedRequest(request, name)

    # -- to choose ---------------------------------------------------------------------------------

    def begin(self, state: RequestState, first: int, num: int, is_busy: bool) -> bool:
        """Begin an audit of a hit, if it is chosen. Return whether vLLM must meet less of it.

        A hit is chosen at random; while the tolerance is learned, also if the ranks have an earlier
        computation of its blocks. Found blocks that the planner computes are audited without that.

        Args:
            state: its request, after its look-up.
            first: tokens that the device has.
            num: tokens to load behind them.
            is_busy: whether another request is loading.
        """
        if not self._share or state in self._considered:
            return False
        self._considered.add(state)
        is_chosen = num > 0 and self.auditor.chooses()
        learns = self._judge.learns
        if not (is_chosen or learns or state.declined):
            return False
        ends = state.ends()
        hit = self._ready(state, (key for key, end in ends.items() if first < end <= first + num))
        known = [key for key in hit if key in self._judge.known] if learns else []
        cuts = is_chosen or bool(known)
        keys = hit if cuts else self._ready(state, (key for key in ends if key in state.declined))
        if not keys or self._current is not None or is_busy or not self._namespace:
            if is_chosen:
                self.auditor.skip(HOST)
            return False
        if known:  # in other pieces than before
            before = [first, *(ends[key] for key in hit[: hit.index(known[0])])]
            keys, state.limit = known, before[self.auditor.piece(len(before))]
        elif cuts:
            keys = keys[self.auditor.piece(len(keys)) :]
            state.limit = ends[keys[0]] - 1
        self._current = self._audit(state, keys, ends)
        return cuts

    def _ready(self, state: RequestState, keys: Iterable[bytes]) -> list[bytes]:
        met, memory = state.lookup.met, BlockState.MEMORY
        return [key for key in keys if met[key] is memory and state.is_shared(key)]

    def _audit(
        self, state: RequestState, keys: Sequence[bytes], ends: Mapping[bytes, int]
    ) -> HitAudit:
        """Return an audit of the first blocks, as many as are neighbours of one group and tier."""
        groups = [group.group_id for group in self._names.facts.groups]
        group = keys[0][-GROUP_BYTES:]
        size = self._shape.block_sizes[groups.index(int.from_bytes(group, "big"))]
        tiers = self._cache.origins(keys[:MAX_BLOCKS])
        first, run = ends[keys[0]] - size, list[bytes]()
        for key, tier in zip(keys, tiers, strict=False):
            is_next = ends[key] == first + (len(run) + 1) * size
            if not (is_next and key.endswith(group) and tier == tiers[0]):
                break
            run.append(key)
        return HitAudit(state, run, first, tiers[0], set(run))

    # -- to compare --------------------------------------------------------------------------------

    def of(self, state: RequestState | None) -> HitAudit | None:
        """Return the audit in flight, if it is of this request's hit."""
        audit = self._current
        return audit if audit is not None and audit.state is state else None

    def take(self, state: RequestState, keys: Iterable[bytes]) -> tuple[Sequence[bytes], Held]:
        """Hold audited blocks that a request has computed now, as far as they are in memory yet."""
        audit = self.of(state)
        due = [] if audit is None else [key for key in keys if key in audit.due]
        if audit is None or not due:
            return (), Held(())
        audit.due.difference_update(due)
        states = self._cache.lookup(due).states
        found = [key for key, at in zip(due, states, strict=True) if at is BlockState.MEMORY]
        audit.held.update(found)
        self._judge_if_over(audit)
        return found, self._cache.hold(found)

    def hear(self, compared: Mapping[bytes, Compared]) -> None:
        """Note results of some ranks."""
        if (audit := self._current) is not None:
            mine = {key: compared[key] for key in audit.held & compared.keys()}
            audit.compared = joined(audit.compared, mine)

    def end(
        self, state: RequestState | None, keys: Collection[bytes], is_right: bool
    ) -> Collection[bytes]:
        """Note that all ranks have ended a store. Return those of its blocks that were stored.

        is_right: whether what they copied is the KV of the blocks.
        """
        audit = self.of(state)
        mine = audit.held.intersection(keys) if audit else ()
        if not audit or not mine:
            return keys
        self._cache.release(mine)
        audit.held.difference_update(mine)
        for key in () if is_right else mine:
            audit.compared.pop(key, None)
        self._judge_if_over(audit)
        return [key for key in keys if key not in mine]

    def finish(self, state: RequestState) -> None:
        """Note that a request has finished: it computes no more."""
        if (audit := self.of(state)) is not None:
            audit.due.clear()
            self._judge_if_over(audit)

    def reset(self) -> None:
        """Forget the audit in flight, whose blocks nothing holds any more."""
        self._current, self._judge.known = None, ()

    # -- to judge ----------------------------------------------------------------------------------

    def _judge_if_over(self, audit: HitAudit) -> None:
        if audit.due or audit.held:
            return
        self._current = None
        piece = AuditedPiece(
            audit.tier,
            self.auditor.quarantine.names(self._namespace)[-1],
            audit.first,
            0.0,
            self._cache.age_s(audit.keys[0]),
            self._names.facts.pp_size == 1,
        )
        outcome = self._judge.judge(audit.keys, audit.compared, piece)
        if outcome is AuditOutcome.DIFFERENT:
            for other in self._requests.values():
                other.limit = 0  # their keys are of the name that is in quarantine now
