"""Audits of a linker's hits: fewer pages are reported, and the rest is computed and compared.

Every rank chooses the same hits at the same pages, since that follows from the request's name,
and judges its own part of them.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier.cache.audit import Auditor, AuditOutcome, ComputedBlocks
from kvtier.cache.transfer.ranks import Compared
from kvtier.connectors.common.pool_copies import Store
from kvtier.connectors.sglang.linker.loading import PoolTiers
from kvtier.connectors.sglang.shared.auditing import PageAudits
from kvtier.devices import Device

EVERYTHING = 1 << 62
MAX_REQUESTS = 4096
"""Most requests remembered, since SGLang does not report all that end."""


class LinkerAudits:
    """Audits of the pages of a linker's KV pool, on the scheduler's thread.

    Args:
        share: of hits to audit; 0 for none.
        linked: the KV pool.
        device: has it.
        page_size: tokens per page.
        namespace: return the digest of its pages' names; b"" while it is unknown.
        clock: seconds.

    Attributes:
        pages: the audit in flight, and the pages' present names.
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
        auditor = Auditor(share, linked.cache.metrics, self._random)
        self.pages = PageAudits(auditor, page_size, namespace, clock)
        self._share = share
        self._linked = linked
        self._page_size = page_size
        self._limits: OrderedDict[str, int] = OrderedDict()  # last token to load, by request
        if share:
            linked.cache.computed = ComputedBlocks()
            linked.copies.compare_with(linked.pool.tokens(), device)

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
        self._random.seed(rid)
        num = self.pages.begin(first, keys, lambda key: self._linked.cache.origins([key])[0])
        return EVERYTHING if num is None else first + num * self._page_size

    def end(self, keys: Sequence[bytes], store: Store) -> None:
        """Note the end of a store. keys: its audited pages."""
        comparer = self._linked.copies.comparer
        compared: dict[bytes, Compared] = {}
        if store.comparison is not None and comparer is not None:
            compared = comparer.end(store.comparison)
        if not keys:
            return
        cache = self._linked.cache
        outcome = self.pages.end(keys, compared, cache.age_s)
        if outcome is AuditOutcome.DIFFERENT:
            self._limits.clear()

    def close(self, timeout_s: float) -> bool:
        """Return whether nothing is compared any more."""
        comparer = self._linked.copies.comparer
        return comparer is None or comparer.close(timeout_s)
