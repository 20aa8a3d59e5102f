"""Choice of SGLang's hits that are audited: fewer pages are reported, the rest is computed.

Pages that SGLang has computed are compared when it stores them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from kvtier.cache.audit import AuditedPiece, Auditor, AuditOutcome
from kvtier.cache.transfer.ranks import Compared
from kvtier.connectors.common.recomputed import MAX_BLOCKS, BlockJudge

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


class PageAudits:
    """Audits of pages, one at a time. Used by one thread at a time.

    Args:
        auditor: chooses hits.
        page_size: tokens per page.
        namespace: return the digest of the pages' names; b"" while it is unknown.
        clock: seconds.

    Attributes:
        current: the audit in flight.
    """

    def __init__(
        self,
        auditor: Auditor,
        page_size: int,
        namespace: Callable[[], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.current: PageAudit | None = None
        self._judge = BlockJudge(auditor)
        self._page_size = page_size
        self._namespace = namespace
        self._clock = clock
        self._names: Sequence[bytes] = (bytes(32),)

    def begin_look_up(self) -> None:
        """Find the present name of the namespace, for this look-up and what follows it."""
        self._names = self._judge.auditor.quarantine.names(self._namespace() or bytes(32))

    def keyed(self, keys: list[bytes]) -> list[bytes]:
        """Return pages under the present name of their namespace."""
        if len(self._names) < 2:
            return keys
        return [blake3(self._names[-1] + key).digest() for key in keys]

    @property
    def is_closed(self) -> bool:
        """Whether nothing may be found or stored any more."""
        return self._judge.auditor.quarantine.is_closed(self._names[-1])

    def begin(
        self, first: int, keys: Sequence[bytes], tier_of: Callable[[bytes], str]
    ) -> int | None:
        """Return how many pages of a hit to load, if it is audited; None if it is not.

        Args:
            first: tokens before the pages.
            keys: of the pages that could be loaded.
            tier_of: return the tier that a page is in.
        """
        judge, auditor = self._judge, self._judge.auditor
        is_chosen = auditor.chooses()
        known = next((at for at, key in enumerate(keys) if key in judge.known), None)
        known = known if judge.learns else None
        if not is_chosen and known is None:
            return None
        now_s = self._clock()
        if self.current is not None and now_s < self.current.end_s:
            if is_chosen:
                auditor.skip(tier_of(keys[0]))
            return None
        if self.current is not None:
            auditor.skip(self.current.tier)
        at = auditor.piece(len(keys)) if known is None else known
        audited = keys[at : at + MAX_BLOCKS]
        begin = first + at * self._page_size
        self.current = PageAudit(audited, begin, tier_of(audited[0]), now_s + AUDIT_S)
        # A page of which there is an earlier computation is computed in other pieces than before.
        return at if known is None else auditor.piece(at + 1)

    def audited(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the audited pages among ``keys``, which are to be stored."""
        return [] if self.current is None else [key for key in self.current.keys if key in keys]

    def end(
        self,
        keys: Sequence[bytes],
        compared: dict[bytes, Compared],
        age_s: Callable[[bytes], float | None] = lambda key: None,
    ) -> AuditOutcome | None:
        """Note the results of some audited pages. Return the outcome once it has all.

        Args:
            keys: the pages, some of which may have no result.
            compared: results by key.
            age_s: return the seconds since this process stored a page; None if it is not known.
        """
        audit = self.current
        if audit is None or not keys or not set(keys) <= set(audit.keys):
            return None
        audit.compared |= compared
        audit.num_ended += len(keys)
        if audit.num_ended < len(audit.keys):
            return None
        self.current = None
        piece = AuditedPiece(audit.tier, self._names[-1], audit.first, 0.0, age_s(audit.keys[0]))
        return self._judge.judge(audit.keys, audit.compared, piece)

    def reset(self) -> None:
        """Forget the audit in flight, and the pages that are known."""
        self.current, self._judge.known = None, ()
