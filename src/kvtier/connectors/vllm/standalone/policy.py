"""An eviction policy for vLLM's own host tier: ``"eviction_policy": "kvtier"``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from struct import Struct

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvtier.connectors.vllm.offloading.translation import request_of
from kvtier.connectors.vllm.standalone.capacity import Names, Path, UnadmittedTier

NAME_BYTES = 12
"""Trailing bytes of a key: the end of the prefix's hash, and the KV group."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NAME = Struct(">QI")
HASH_AND_GROUP = np.dtype([("hash", ">u8"), ("group", ">u4")])


class KvtierPolicy(CachePolicy):
    """Eviction by the predicted time to the next use, learned from earlier reuse.

    It evicts like LRU while nothing is learned, and where LRU would have more hits. Prompts that
    are never repeated do not displace repeated ones, even if they are too many to fit.

    clock: seconds.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.tier = UnadmittedTier(cache_capacity)
        self._blocks: dict[OffloadKey, ChunkStatus] = {}
        self._keys: dict[int, OffloadKey] = {}
        self._held: set[int] = set()
        self._fresh: list[int] = []
        self._storing: ReqContext | None = None

    # -- blocks ------------------------------------------------------------------------------------

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._blocks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        """Add a block. The blocks of one store are reported together, after the last one."""
        name = _name(key)
        self._blocks[key] = chunk
        self._keys[name] = key
        self._fresh.append(name)
        if chunk.ref_cnt != 0:
            self._held.add(name)

    def remove(self, key: OffloadKey) -> None:
        self._settle()
        name = _name(key)
        del self._blocks[key]
        del self._keys[name]
        self._held.discard(name)
        self.tier.leave(name)

    def mark_evictable(self, key: OffloadKey) -> None:
        self._held.discard(_name(key))

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._held.add(_name(key))

    def clear(self) -> None:
        self.tier = UnadmittedTier(self.cache_capacity)
        self._blocks.clear()
        self._keys.clear()
        self._held.clear()
        self._fresh.clear()
        self._storing = None

    def _settle(self) -> None:
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            path = self._path_of(self._storing)
            behind = path.last if path is not None and path.last in self._keys else None
            self.tier.enter(fresh, behind)
            if path is not None:
                path.last = fresh[-1]

    # -- requests ----------------------------------------------------------------------------------

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note a use of blocks.

        A request's use is known from its first look-up, so nothing is done here.
        """

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note the request whose blocks are stored next. Report it if it is new."""
        self._settle()
        self._storing = req_context
        if self._path_of(req_context) is None:
            self._ask(request_of(req_context).in_order(), req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Apply the request's end hint.

        A request that stored nothing is reported only now, with the resident part of its prompt.
        """
        self._settle()
        if self._storing is req_context:
            self._storing = None
        if self._path_of(req_context) is None:
            keys = request_of(req_context).in_order()
            while keys and keys[-1] not in self._blocks:
                keys.pop()
            self._ask(keys, req_context)
        self._hint(req_context, at_end=True)

    def _path_of(self, context: ReqContext | None) -> Path | None:
        """Return the request's path; None if it was not reported since the last ``clear``."""
        path = None if context is None else context.get_state(Path)
        return path if path is not None and path.tier is self.tier else None

    def _ask(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        paths = [_names(group) for group in self._groups(keys)]
        context.set_state(self.tier.ask(paths, self.clock()))
        self._hint(context, at_end=False)

    def _hint(self, context: ReqContext, at_end: bool) -> None:
        hint = request_of(context).hint
        if hint is None:
            return
        now_s = self.clock()
        for group in self._groups(request_of(context).in_order()):
            block_size = context.get_offload_key_position(group[0]) or 1
            for block_hint in (hint.at_end if at_end else hint.at_begin).block_hint(
                block_size, now_s
            ):
                self.tier.retain(_names(group), block_hint, now_s)

    def _groups(self, keys: Sequence[OffloadKey]) -> list[list[OffloadKey]]:
        """Return the blocks that form one chain each."""
        groups: dict[int, list[OffloadKey]] = defaultdict(list)
        for key in keys:
            groups[get_offload_group_idx(key)].append(key)
        if len(groups) > 1:
            groups = {at: self._without_gaps(group) for at, group in groups.items()}
        return [group for group in groups.values() if group]

    def _without_gaps(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the blocks of a group that needs only the end of a prompt.

        A window or a state never stores most of its blocks. The result has the resident blocks, and
        the blocks behind the last of them, which may be stored next.
        """
        there = (at for at, key in enumerate(keys) if key in self._blocks)
        here = [at for at in there if not self.tier.is_unadmitted(_name(keys[at]))]
        if not here or here[-1] == len(here) - 1:
            return keys
        return [*(keys[at] for at in here), *keys[here[-1] + 1 :]]

    # -- what leaves -------------------------------------------------------------------------------

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        self._settle()
        storing = self._storing  # its prompt has the positions of the blocks to store
        places = {
            key: storing and storing.get_offload_key_position(key)
            for key in protected
            if key not in self._blocks
        }
        new = [_name(key) for key in sorted(places, key=lambda key: places[key] or 0)]
        is_storing = all(place is not None for place in places.values())
        held = self._held | {_name(key) for key in protected if key not in places}
        leaving = self.tier.make(n, new, self._path_of(storing) if is_storing else None, held)
        if len(leaving) < n:
            leaving += self._any(n - len(leaving), held.union(leaving))
        if len(leaving) < n:
            self.tier.enter(leaving)
            return None
        keys = [self._keys.pop(name) for name in leaving]
        return [(key, self._blocks.pop(key)) for key in keys]

    def _any(self, n: int, held: set[int]) -> list[int]:
        """Remove up to ``n`` blocks that are not held, the last inserted first.

        Unlike ``UnadmittedTier.make`` it may remove blocks that precede held ones in their prompts.
        """
        found: list[int] = []
        for name in reversed(self._keys):
            if len(found) == n:
                break
            if name not in held:
                self.tier.leave(name)
                found.append(name)
        return found


def _names(keys: Sequence[OffloadKey]) -> Names:
    """Return the names of keys, uint64 [len(keys)]: the end of each hash, mixed with the group."""
    found = np.frombuffer(b"".join(key[-NAME_BYTES:] for key in keys), HASH_AND_GROUP)
    names: Names = found["hash"] ^ (found["group"].astype(np.uint64) * GOLDEN)
    return names


def _name(key: OffloadKey) -> int:
    """Return the name of one key, as ``_names`` does."""
    prefix, group = NAME.unpack(key[-NAME_BYTES:])
    return int(prefix ^ (group * int(GOLDEN) & 0xFFFF_FFFF_FFFF_FFFF))
