"""Audits of a linker's hits: fewer pages are reported, and the rest is computed and compared.

Every rank chooses the same hits at the same pages, since that follows from the request's name,
and judges its own part of them.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from kvtier.cache.audit import AuditedPiece, Auditor, AuditOutcome, ComputedBlocks
from kvtier.cache.transfer.ranks import Compared
from kvtier.connectors.common.pool_copies import Store
from kvtier.connectors.common.recomputed import MAX_BLOCKS, BlockJudge
from kvtier.connectors.sglang.linker.loading import PoolTiers
from kvtier.core.types import HOST
from kvtier.devices import Device

MAX_REQUESTS = 4096
"""Most requests remembered, since SGLang does not report all that end."""
AUDIT_S = 60.0
"""Longest time between the choice of a hit and the store of its pages."""


@dataclass(slots=True, eq=False)
class PageAudit:
    """Audit of one hit.

    Attributes:
        keys: the audited pages, neighbours in the prompt.
        first: position of their first token in the prompt.
        tier: tier that had the first one.
        end_s: when it is given up.
        num_ended: pages whose store has ended.
        compared: results by key.
    """

    keys: Sequence[bytes]
    first: int
    tier: str
    end_s: float
    num_ended: int = 0
    compared: dict[bytes, Compared] = field(default_factory=dict)


class LinkerAudits:
    """Audits of the pages of a linker's KV pool, on the scheduler's thread.

    Args:
        share: of hits to audit; 0 for none.
        linked: the KV pool.
        device: has it.
        page_size: tokens per page.
        namespace: return the digest of its pages' names; b"" while it is unknown.
        clock: seconds.
    """

    def __init__(
        self,
        share: float,
        linked: PoolTiers,
        device: Device,
        page_size: int,
        namespace: Callable[[], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._random = random.Random()
        self.auditor = Auditor(share, linked.cache.metrics, self._random)
        self._judge = BlockJudge(self.auditor)
        self._share = share
        self._linked = linked
        self._page_size = page_size
        self._namespace = namespace
        self._clock = clock
        self._limits: OrderedDict[str, int] = OrderedDict()  # last token to load, by request
        self._current: PageAudit | None = None
        self._names: Sequence[bytes] = ()  # at the last look-up: what it promised is loaded
        if share:
            linked.cache.computed = ComputedBlocks()
            linked.copies.compare_with(linked.pool.tokens(), device)

    def begin_look_up(self) -> None:
        """Find the present name of the namespace, for this look-up and what follows it."""
        self._names = self.auditor.quarantine.names(self._namespace() or bytes(32))

    def keyed(self, keys: list[bytes]) -> list[bytes]:
        """Return pages under the present name of their namespace."""
        if len(self._names) < 2:
            return keys
        return [blake3(self._names[-1] + key).digest() for key in keys]

    @property
    def is_closed(self) -> bool:
        """Whether nothing may be found or stored any more."""
        return bool(self._names) and self.auditor.quarantine.is_closed(self._names[-1])

    def limit(self, rid: str, first: int, keys: Sequence[bytes], num: int) -> int:
        """Return how many pages of a hit to report, and audit some of those behind them.

        Args:
            rid: the request.
            first: tokens on the device.
            keys: its pages behind these.
            num: pages that could be loaded now.
        """
        if not self._share or not num:
            return num
        if rid not in self._limits:
            self._limits[rid] = self._begin(rid, first, keys[:num])
            while len(self._limits) > MAX_REQUESTS:
                self._limits.popitem(last=False)
        return min(num, max(0, self._limits[rid] - first) // self._page_size)

    def _begin(self, rid: str, first: int, keys: Sequence[bytes]) -> int:
        """Return the last token to load. keys: of pages that could be loaded."""
        everything = 1 << 62
        self._random.seed(rid)
        is_chosen = self.auditor.chooses()
        known = next((at for at, key in enumerate(keys) if key in self._judge.known), None)
        known = known if self._judge.learns else None
        if not is_chosen and known is None:
            return everything
        now_s = self._clock()
        if self._current is not None and now_s < self._current.end_s:
            if is_chosen:
                self.auditor.skip(HOST)
            return everything
        if self._current is not None:
            self.auditor.skip(self._current.tier)
        at = self.auditor.piece(len(keys)) if known is None else known
        audited = keys[at : at + MAX_BLOCKS]
        (tier, *_) = self._linked.cache.origins(audited)
        begin = first + at * self._page_size
        self._current = PageAudit(audited, begin, tier, now_s + AUDIT_S)
        # A page of which there is an earlier computation is computed in other pieces than before.
        num_before = at if known is None else self.auditor.piece(at + 1)
        return first + num_before * self._page_size

    def audited(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the audited pages among ``keys``, which are to be stored."""
        audit = self._current
        return [] if audit is None else [key for key in audit.keys if key in keys]

    def end(self, keys: Sequence[bytes], store: Store) -> None:
        """Note the end of a store. keys: its audited pages."""
        audit, comparer = self._current, self._linked.copies.comparer
        compared = {}
        if store.comparison is not None and comparer is not None:
            compared = comparer.end(store.comparison)
        if audit is None or not set(keys) <= set(audit.keys) or not keys:
            return
        audit.compared |= compared
        audit.num_ended += len(keys)
        if audit.num_ended < len(audit.keys):
            return
        self._current = None
        piece = AuditedPiece(
            audit.tier,
            self._names[-1],
            audit.first,
            0.0,
            self._linked.cache.age_s(audit.keys[0]),
        )
        if self._judge.judge(audit.keys, audit.compared, piece) is AuditOutcome.DIFFERENT:
            self._limits.clear()

    def reset(self) -> None:
        """Forget the audit in flight, whose pages are forgotten."""
        self._current, self._judge.known = None, ()

    def close(self, timeout_s: float) -> bool:
        """Return whether nothing is compared any more."""
        comparer = self._linked.copies.comparer
        return comparer is None or comparer.close(timeout_s)
