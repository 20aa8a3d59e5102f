"""Audits of a back end's hits, over the pages of SGLang's host pool for KV.

Of a chosen hit fewer pages are reported. SGLang computes the others and stores them from one of its
threads, which first compares them with what storage has. All ranks report the same pages, the
fewest of any, and draw the same numbers, so that they choose the same hits.
"""

from __future__ import annotations

import ctypes
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np
import torch

from kvtier.cache.audit import Auditor, Distances, stacked, token_distances
from kvtier.cache.transfer.ranks import Compared
from kvtier.connectors.common.blocking_calls import BlockingCalls, SpareMemory
from kvtier.connectors.common.recomputed import FLOATS, MAX_BLOCKS, Bytes
from kvtier.connectors.sglang.shared.auditing import PageAudits
from kvtier.connectors.sglang.shared.pages import HostPool, Pages
from kvtier.observe import Metrics
from kvtier.tiers import Pieces

logger = logging.getLogger(__name__)

AXES = {
    "layer_first": "pltn",
    "page_first": "ptln",
    "page_first_direct": "pltn",
    "page_head": "pntl",
}
"""Order of a page's numbers by the pool's layout: parts (K and V), layers, tokens, heads (n)."""


class StorageAudits:
    """Audits of one rank's pages. Any of SGLang's threads may call it.

    Args:
        share: of hits to audit.
        pool: SGLang's pool for KV.
        pages: its pages.
        tier: name of the storage.
        namespace: return the digest of the pages' names; b"" while it is unknown.
        metrics: of the pool.
    """

    def __init__(
        self,
        share: float,
        pool: HostPool,
        pages: Pages,
        tier: str,
        namespace: Callable[[], bytes],
        metrics: Metrics,
    ) -> None:
        auditor = Auditor(share, metrics, random.Random(0))
        self._audits = PageAudits(auditor, pages.page_size, namespace)
        self._pool = pool
        self._page_size = pages.page_size
        self._tier = tier
        self._lock = Lock()
        self._fresh: OrderedDict[bytes, Bytes] = OrderedDict()  # earlier computations
        is_known = pool.dtype in FLOATS and pool.layout in AXES
        self._share = share if is_known else 0.0
        if share and not is_known:
            logger.warning(
                "no hit is audited: pages of dtype=%s layout=%s can't be compared token by token",
                pool.dtype,
                pool.layout,
            )

    @property
    def is_closed(self) -> bool:
        """Whether nothing may be found or stored any more."""
        return self._audits.is_closed

    def keyed(self, keys: list[bytes]) -> list[bytes]:
        """Return pages under the present name of their namespace."""
        self._audits.begin_look_up()
        return self._audits.keyed(keys)

    def limit(self, keys: Sequence[bytes], num_before: int, num: int) -> int:
        """Return how many pages of a hit to report, and audit some of those behind them.

        Args:
            keys: of the pages that SGLang asks for.
            num_before: pages of the prompt before them.
            num: how many of them were found.
        """
        if not self._share or not num:
            return num
        with self._lock:
            first = num_before * self._page_size
            limit = self._audits.begin(first, keys[:num], lambda key: self._tier)
        return num if limit is None else limit

    def compare(self, keys: Sequence[bytes], pages: Pieces, calls: BlockingCalls) -> None:
        """Compare the audited pages among some with what storage has. Call it before their store.

        Args:
            keys: the pages that SGLang stores.
            pages: their memory.
            calls: to the storage.
        """
        with self._lock:
            audited = self._audits.audited(keys)
            if not audited:
                return
            spare = SpareMemory(pages.sizes, len(audited))
            are_there = calls.load(audited, spare.blocks)
            compared = {}
            for at, (key, is_there) in enumerate(zip(audited, are_there, strict=True)):
                if is_there:
                    fresh = _flat(pages, keys.index(key))
                    apart = float(self._distances(fresh, self._fresh.pop(key, fresh)).max())
                    distances = self._distances(fresh, _flat(spare.blocks, at))
                    compared[key] = Compared(distances, apart)
                    self._fresh[key] = fresh
                    if len(self._fresh) > MAX_BLOCKS:
                        self._fresh.popitem(last=False)
            spare.close()
            self._audits.end(audited, compared)

    def reset(self) -> None:
        """Forget the audit in flight, and earlier computations."""
        with self._lock:
            self._audits.reset()
            self._fresh.clear()

    def _distances(self, fresh: Bytes, stored: Bytes) -> Distances:
        parts = zip(*map(self._parts, (stored, fresh)), strict=True)
        return stacked(
            [token_distances(*pair) for pair in zip(*layers, strict=True)] for layers in parts
        )

    def _parts(self, page: Bytes) -> torch.Tensor:
        """Return the numbers of a page: [num_layers, num_parts, num_tokens, num_numbers]."""
        pool = self._pool
        num_heads = getattr(pool, "head_num", 1)  # of MLA's latents: one, and no V
        sizes = {
            "p": 2 if hasattr(pool, "head_num") else 1,
            "l": pool.layer_num,
            "t": pool.page_size,
            "n": num_heads,
        }
        axes = AXES[pool.layout]
        numbers = torch.from_numpy(page).view(pool.dtype).view(*(sizes[axis] for axis in axes), -1)
        return numbers.permute(*(axes.index(axis) for axis in "lptn"), 4).flatten(3)


def _flat(pages: Pieces, page: int) -> Bytes:
    """Return a copy of a page's bytes."""
    pieces = zip(pages.addresses[page].tolist(), pages.sizes.tolist(), strict=True)
    return np.concatenate(
        [
            np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)
            for address, num_bytes in pieces
        ]
    )
