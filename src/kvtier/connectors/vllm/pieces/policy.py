"""An eviction policy for vLLM's own host tier: ``"eviction_policy": "kvtier"``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from kvtier.connectors.vllm.pieces.eviction import EvictionOrder
from kvtier.connectors.vllm.prompt import blocks_of


class _Begun:
    """Kept with a request that has stored something."""


class KvtierPolicy(CachePolicy):
    """Keeps what is used again soonest, as far as what was used again before tells.

    As LRU while nothing is learned. Prompts that nobody repeats, and more than fit, do not drive
    out those that are. Remembers as many blocks that left as there are.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.order = EvictionOrder(cache_capacity)
        self._blocks: dict[OffloadKey, ChunkStatus] = {}

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._blocks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._blocks[key] = chunk
        self.order.insert(key)

    def remove(self, key: OffloadKey) -> None:
        del self._blocks[key]
        self.order.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        for key in reversed(list(keys)):
            self.order.refresh(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """A request begins to store: what it has loaded is in use until it is over. Blocks that
        left count when they are inserted, not here."""
        if req_context.get_state(_Begun) is None:
            req_context.set_state(_Begun())
            self.touch(blocks_of(req_context), req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self.order.finish(key_groups, reused_keys, order_request_keys(key_groups, req_context))

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        blocks = self._blocks
        leaving = self.order.evict(
            n, lambda key: key not in protected and blocks[OffloadKey(key)].ref_cnt == 0
        )
        if leaving is None:
            return None
        return [(OffloadKey(key), blocks.pop(OffloadKey(key))) for key in leaving]

    def clear(self) -> None:
        self._blocks.clear()
        self.order.clear()
