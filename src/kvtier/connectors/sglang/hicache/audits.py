"""Audits of a back end's hits, over the pages of SGLang's host pool for KV.

Of a chosen hit fewer pages are reported. SGLang computes the others and stores them from one of its
threads, which first compares them with what storage has. All ranks report the same pages, the
fewest of any, and draw the same numbers, so that they choose the same hits.
"""

from __future__ import annotations

import ctypes
import logging
import random
from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from threading import Lock

import numpy as np

from kvtier.cache.audit import Auditor
from kvtier.connectors.common.blocking_calls import BlockingCalls, SpareMemory
from kvtier.connectors.common.recomputed import (
    FLOATS,
    Bytes,
    Layers,
    Recomputations,
    TokenPlaces,
)
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
        self._page_size = pages.page_size
        self._tier = tier
        self._lock = Lock()
        self._recomputations = Recomputations()
        self._layers = _layers_of(pool, pages.num_bytes)
        self._share = share if self._layers else 0.0
        if self._layers is None:
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
                if is_there and self._layers:
                    both = _flat(pages, keys.index(key)), _flat(spare.blocks, at)
                    compared[key] = self._recomputations.compare(key, *both, self._layers)
            spare.close()
            self._audits.end(audited, compared)

    def reset(self) -> None:
        """Forget the audit in flight, and earlier computations."""
        with self._lock:
            self._audits.reset()
            self._recomputations = Recomputations()


def _layers_of(pool: HostPool, page_bytes: int) -> Layers | None:
    """Return where the numbers of each token lie in a page, by layer; None if it is not known."""
    if pool.dtype not in FLOATS or pool.layout not in AXES:
        return None
    axes = AXES[pool.layout]
    # MLA's latents are one head, and have no V.
    num_heads, num_parts = getattr(pool, "head_num", 1), 2 if hasattr(pool, "head_num") else 1
    sizes = {"p": num_parts, "l": pool.layer_num, "t": pool.page_size, "n": num_heads}
    head_dim = page_bytes // pool.dtype.itemsize // prod(sizes.values())
    steps = {
        axis: head_dim * prod(map(sizes.__getitem__, axes[at + 1 :]))
        for at, axis in enumerate(axes)
    }
    by_axis = (np.arange(sizes[axis], dtype=np.int32) * steps[axis] for axis in "ptn")
    places = reduce(np.add.outer, (*by_axis, np.arange(head_dim, dtype=np.int32)))
    of_layer = places.reshape(num_parts, pool.page_size, -1)
    firsts = range(0, sizes["l"] * steps["l"], steps["l"])
    return [[TokenPlaces(pool.dtype, first, of_layer)] for first in firsts]


def _flat(pages: Pieces, page: int) -> Bytes:
    """Return a copy of a page's bytes."""
    pieces = zip(pages.addresses[page].tolist(), pages.sizes.tolist(), strict=True)
    return np.concatenate(
        [
            np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)
            for address, num_bytes in pieces
        ]
    )
